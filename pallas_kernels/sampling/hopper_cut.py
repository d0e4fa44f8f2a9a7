"""Where a row is cut on Hopper, and its largest logits in order: one CTA a row.

1. A key below which the cut cannot lie: the k-th largest of the groups' maxima (`hopper_groups`),
   the end of min-p, or the bucket that holds top-p's share (`hopper_buckets`).
2. All logits above it, from the blocks that have any, as a list in shared memory.
3. The cut in that list (`hopper_list`), or among the logits that are equal to the bound.

A row whose list is too long (top_k in the thousands of a flat row, ties by the thousand at the end
of min-p) is searched bit by bit in global memory: slower, and with the same result.
"""

import functools
import types
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ..float_order import LOWEST, NAN, order_key
from ..log_softmax import hopper_blocks as blocks
from ..log_softmax.hopper_blocks import I32, PLACES, Vocabulary
from . import wide
from .hopper_bounds import end_of_gap, in_order, kth_group, share_bucket
from .hopper_groups import Filters
from .hopper_list import CAPACITY, ShortList, search, ties_needed, times
from .hopper_row import Row, exact_value, value_of
from .hopper_scatter import store_at

U32 = jnp.uint32
MOST_ORDERED = PLACES  # of `top_tokens`: a single block has as many groups


def find_row_cut(row: Row, maxima, filters: Filters) -> None:
    """Writes the row's cut into the shared cells."""
    by_count, by_weight, by_gap = filters.by_count, filters.by_weight, filters.by_gap
    alone = filters.weight_alone
    kth = lax.cond(by_count, lambda: kth_group(row, maxima, filters.top_k), lambda: I32(LOWEST))
    least = lax.cond(by_gap, lambda: end_of_gap(row, filters.log_min_p), lambda: I32(LOWEST))
    inside = jnp.where(by_gap, least - 1, I32(LOWEST))
    bound, end, *need = lax.cond(
        alone,
        lambda: share_bucket(row, filters.top_p),
        lambda: (jnp.maximum(kth, inside), I32(NAN), U32(0), U32(0)),
    )
    # Whether logits at the bound are kept too, as far as top-k asks for them.
    tail = by_count & (kth > inside)
    bound, end = in_order(bound), in_order(end)
    low, high = (row.in_block(exact_value, key) for key in (bound, end))  # NaN: no bound
    needed = row.needed_blocks(maxima, bound)
    count = row.collect(needed, lambda x, ids: (x <= low) | (x >= high))

    @pl.when(count <= CAPACITY)
    def _search_list():
        entries = as_list(row, count)
        most = jnp.where(by_count, filters.top_k, count)
        most = jnp.where(tail, most, jnp.minimum(most, count))
        in_list = most <= count

        @pl.when(~alone)
        def _count():
            key, extra = lax.cond(
                in_list,
                lambda: by_search(entries.count_from, (U32(0), most.astype(U32)), bound, row),
                lambda: (bound, (U32(0), (most - count).astype(U32))),
            )
            put_cut(row, key, id_of(row, entries, key, extra[1].astype(I32)))

        @pl.when(by_weight)
        def _weigh():
            entries.drop_after(*get_cut(row))
            ties = jnp.where(alone | in_list, 0, most - count).astype(U32)
            of_list = entries.weight_from(I32(LOWEST))
            whole = wide.add(of_list, times(row.weight_at(bound), ties))
            share = wide.multiply_fraction_up(whole, filters.top_p)
            wanted = tuple(jnp.where(alone, a, b) for a, b in zip(need, share, strict=True))
            key, rest = lax.cond(
                wide.less_equal(wanted, of_list),
                lambda: by_search(entries.weight_from, wanted, bound, row),
                lambda: (bound, wide.subtract(wanted, of_list)),
            )
            put_cut(row, key, id_of(row, entries, key, ties_needed(row.weight_at(key), rest)))

    @pl.when(count > CAPACITY)
    def _search_row():
        counted = functools.partial(row.total, counting=True)

        @pl.when(~alone)
        def _count():
            value = row.in_block(value_of, least)
            likely = counted(lambda x, ids: x < value)[1].astype(I32)
            most = jnp.where(by_count, filters.top_k, row.vocab_size)
            most = jnp.maximum(jnp.minimum(most, likely), 1).astype(U32)
            key, rest = by_search(at_or_above(row, counted), (U32(0), most), I32(LOWEST), row)
            put_cut(row, key, row.tie(key, rest[1].astype(I32)))

        @pl.when(by_weight)
        def _weigh():
            cut_key, cut_id = get_cut(row)
            value = row.in_block(value_of, cut_key)

            def weighed(dropped):
                def left_out(x, ids):
                    return dropped(x, ids) | blocks.is_dropped(x, ids, value, cut_id)

                return row.total(left_out, counting=False)

            whole = weighed(lambda x, ids: ids < 0)
            share = wide.multiply_fraction_up(whole, filters.top_p)
            key, rest = by_search(at_or_above(row, weighed), share, I32(LOWEST), row)
            put_cut(row, key, row.tie(key, ties_needed(row.weight_at(key), rest)))


def at_or_above(row: Row, total: Callable) -> Callable:
    """From a total but for what is dropped to that from a key on."""

    def from_key(lowest):
        value = row.in_block(value_of, lowest)
        return total(lambda x, ids: x < value)

    return from_key


def by_search(from_key: Callable, need: wide.Wide, lowest, row: Row):
    """The key at which `need` is reached, and how much of it is needed there."""
    key, above = search(from_key, need, lowest, row.top_key)
    return key, wide.subtract(need, above)


def as_list(row: Row, count) -> ShortList:
    """The entries that `collect` left, as a list."""
    tiles = jnp.maximum((count + (PLACES - 1)) >> I32(7), 1)
    entries = ShortList(row.smem.entries, row.smem.limbs, tiles)
    entries.take_bits(count, row.top, row.inverse)
    return entries


def id_of(row: Row, entries: ShortList, key, count):
    """The id of the count-th logit with the key; from the list where it is the only one."""
    ties, first = entries.lowest_id_of(key, row.vocab_size)
    return lax.cond(ties != 1, lambda: row.tie(key, count), lambda: first)


def put_cut(row: Row, key, index) -> None:
    plgpu.commit_smem()
    row.smem.cut[0] = key
    row.smem.cut[1] = index
    plgpu.commit_smem()


def get_cut(row: Row):
    return row.smem.cut[0], row.smem.cut[1]


def order_row(row: Row, maxima, k: int) -> None:
    """Writes the ids of the k largest in order."""
    bound = in_order(kth_group(row, maxima, I32(k)))
    low = row.in_block(exact_value, bound)
    needed = row.needed_blocks(maxima, bound - 1)
    count = row.collect(needed, lambda x, ids: x <= low)

    @pl.when(count < k)
    def _ties():
        last, value = row.tie(bound, k - count), row.in_block(value_of, bound)
        row.collect(needed, lambda x, ids: (x != value) | (ids > last), more=True)

    count = jnp.minimum(row.smem.count[0], CAPACITY)
    entries = as_list(row, count)

    def visit(i):
        keys, ids = (entries.tile(entries.entries, n, i) for n in range(2))

        def step(j, rank):
            key, index = entries.entries[0, j], entries.entries[1, j]
            before = (keys < key) | ((keys == key) & (ids > index))
            return rank + jnp.where(before, jnp.full_like(rank, 1), jnp.zeros_like(rank))

        rank = lax.fori_loop(I32(0), count, step, keys - keys)
        store_at(row.gmem.ids.at[row.index], rank, ids, k, row.interpret)

    entries.each(visit)


def _body(*refs, names, vocabulary: Vocabulary, vocab_size: int, k: int | None, interpret: bool):
    count = len(SCRATCH)
    smem = types.SimpleNamespace(**dict(zip(SCRATCH, refs[-count:], strict=True)))
    gmem = types.SimpleNamespace(**dict(zip(names, refs[:-count], strict=True)))
    index = lax.axis_index("row")
    filters = None if k else Filters.load(gmem, index, vocab_size)

    @pl.when(index < gmem.num_rows[0])
    def _choose():
        if filters is not None:
            gmem.cut_key[index] = I32(LOWEST)
            gmem.cut_id[index] = I32(vocab_size)

        @pl.when(filters.cuts if filters is not None else index >= 0)
        def _find():
            maxima = blocks.load_places(gmem.maxima, index, -jnp.inf, vocabulary)
            top = blocks.row_top(maxima)
            inverse = None if filters is None else filters.inverse
            top_key = jnp.max(order_key(maxima))
            row = Row(index, gmem, smem, top, top_key, inverse, vocabulary, vocab_size, interpret)
            if filters is None:
                order_row(row, maxima, k)
                return

            # Comparisons are false for a NaN. Nothing of a bad row is used.
            @pl.when((top < jnp.inf) & (top > -jnp.inf))
            def _cut():
                put_cut(row, I32(LOWEST), I32(vocab_size))
                find_row_cut(row, maxima, filters)
                gmem.cut_key[index], gmem.cut_id[index] = get_cut(row)


SCRATCH = {
    "entries": plgpu.SMEM((2, CAPACITY), I32),
    "limbs": plgpu.SMEM((2, CAPACITY), U32),
    "places": plgpu.SMEM((1, PLACES), I32),
    "sums": plgpu.SMEM((2, 2, 2 * PLACES), U32),
    "count": plgpu.SMEM((1,), I32),
    "cut": plgpu.SMEM((2,), I32),
}


@functools.partial(jax.jit, static_argnames=("vocabulary", "vocab_size", "k", "interpret"))
def cut_rows(
    arrays: dict[str, jax.Array],
    *,
    vocabulary: Vocabulary,
    vocab_size: int,
    k: int | None = None,
    interpret: blocks.Interpret = False,
) -> tuple[jax.Array, ...]:
    """Groups' maxima, and perhaps weights of buckets, -> cuts, or the k largest logits' ids.

    Args:
      arrays: logits, num_rows int32 [1], maxima, groups of `group_maxima`; for a cut also the
        FILTERS [R] and buckets of `bucket_weights`.
      vocabulary: how the row is cut into blocks.
      vocab_size: the real number of columns.
      k: None for a cut; up to MOST_ORDERED.
      interpret: run the kernel in Mosaic GPU's interpreter on a CPU.

    Returns: cut_key and cut_id int32 [R], or ids int32 [R, k].

    Invariance: row r depends on the rows r of all arrays only.
    """
    rows = arrays["logits"].shape[0]
    shapes = {"ids": (rows, k)} if k else {"cut_key": (rows,), "cut_id": (rows,)}
    out = plgpu.kernel(
        functools.partial(
            _body,
            names=(*arrays, *shapes),
            vocabulary=vocabulary,
            vocab_size=vocab_size,
            k=k,
            interpret=bool(interpret),
        ),
        out_type=tuple(jax.ShapeDtypeStruct(shape, I32) for shape in shapes.values()),
        grid=(rows,),
        grid_names=("row",),
        scratch_types=list(SCRATCH.values()),
        compiler_params=blocks.compiler_params(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            # All layouts are stated; to infer them would take half a minute here.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        kernel_name="find_cut" if k is None else "top_tokens",
        interpret=blocks.interpret_params(interpret),
    )(*arrays.values())
    return tuple(out)
