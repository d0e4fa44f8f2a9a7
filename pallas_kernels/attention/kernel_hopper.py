"""Ragged paged causal attention for Hopper (sm90), in Pallas Mosaic GPU.

Equation, for query row r of KV head h at absolute position p, with c = scale * log2(e) rounded once to float32:

    for each block j of kv_block keys, ascending from absolute position 0 (or the window's first block):
        s = q . k                                  float32, wgmma, head axis ascending
        m' = max(m, max(s) * c)
        e = exp2(fma(s, c, -m')),  a = exp2(m - m')
        l = fma(l, a, sum(e))                      sum over the block in the accumulator layout's fixed tree
        acc = acc * a + round(e) . v               round to v's dtype; float32, wgmma, keys ascending
    o = acc * (1 / l) rounded once,  lse = (m + log2(l)) * ln(2)

A key after p, or before the window, has s = -inf, hence e = 0 exactly; values behind the request's last key are
zeroed in shared memory, so that a page that was never written cannot make 0 * NaN. No key range is split, and the
rescale by `a` is done for every row and block.

Grid: `ctas` persistent CTAs over (tile, KV head) items, longest first. A tile holds consecutive query tokens of one
request; a consumer warpgroup owns 64 rows of it, row = head in group * tokens + token, and always runs the same body.
One more warpgroup loads queries, keys and values by TMA.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..ragged import RaggedBatch
from . import hopper_work as work
from .hopper_math import (
    LN_2,
    LOG2_E,
    LOWEST,
    ROW,
    TILE,
    fused_multiply_add,
    rows_to_tile,
    store_plain,
)
from .schedule import SHARED_BYTES, WARPGROUP_ROWS, Schedule, warpgroup_tokens

CONSUMER_REGISTERS = 232  # two warpgroups of consumers and one loader share 65,536 registers
LOADER_REGISTERS = 40
I32 = jnp.int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Static facts of one attention call: shapes, and what fixes its bits."""

    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    dtype: jnp.dtype
    scale: float
    window: int | None
    kv_block: int
    interpret: bool

    @property
    def log2_scale(self) -> float:
        """scale * log2(e): scores times this are exponents of two."""
        return float(np.float32(self.scale * LOG2_E))

    @property
    def rows_a_page(self) -> int:
        """Keys that one TMA copy brings: a whole page, or the part of a larger page that a block covers."""
        return min(self.page_size, self.kv_block)

    @property
    def pages_a_block(self) -> int:
        return self.kv_block // self.rows_a_page


def scratch_types(problem: Problem, schedule: Schedule) -> dict:
    """Shared memory and barriers of one CTA; the launch and the does-it-fit check both read this."""
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    wgs, stages, dim = schedule.consumers, schedule.stages, problem.head_dim
    rows, block, dtype = WARPGROUP_ROWS, problem.kv_block, problem.dtype
    scratch = dict(
        q_smem=plgpu.SMEM((wgs, rows, dim), dtype, transforms=swizzled),
        k_smem=plgpu.SMEM((stages, block, dim), dtype, transforms=swizzled),
        v_smem=plgpu.SMEM((stages, block, dim), dtype, transforms=swizzled),
        o_smem=plgpu.SMEM(
            (wgs, rows, dim), dtype
        ),  # plain rows: single tokens of a partial tile leave from here
        lse_smem=plgpu.SMEM((wgs, rows), jnp.float32),
        q_loaded=plgpu.Barrier(num_arrivals=problem.group, num_barriers=wgs),
        q_consumed=plgpu.Barrier(num_arrivals=wgs),
        k_loaded=plgpu.Barrier(num_arrivals=problem.pages_a_block, num_barriers=stages),
        v_loaded=plgpu.Barrier(num_arrivals=problem.pages_a_block, num_barriers=stages),
        k_consumed=plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
        v_consumed=plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
        tensor_core_turn=plgpu.Barrier(num_arrivals=wgs),
    )
    if schedule.consumers > 1:  # whole tiles leave in one copy a head; decode has only partial ones
        scratch["o_tile_smem"] = plgpu.SMEM((wgs, rows, dim), dtype, transforms=swizzled)
    if problem.interpret:
        scratch["p_smem"] = plgpu.SMEM((wgs, rows, block), dtype)
    return scratch


def shared_bytes(problem: Problem, schedule: Schedule) -> int:
    """Shared memory that `scratch_types` asks for, barriers and alignment excluded."""
    total = 0
    for ref in scratch_types(dataclasses.replace(problem, interpret=False), schedule).values():
        if not isinstance(ref, plgpu.Barrier):
            aval = ref.get_array_aval()
            total += aval.size * aval.dtype.itemsize
    return total


@dataclasses.dataclass(frozen=True)
class Item:
    """One (tile, KV head) of the work list, as traced scalars."""

    tile: jax.Array
    head: jax.Array
    request: jax.Array
    first: jax.Array
    begin: jax.Array
    end: jax.Array
    position: jax.Array
    context: jax.Array


def read_item(tiles_gmem, turn, problem: Problem, ctas: int) -> Item:
    """Reads this CTA's item of round `turn`; odd rounds run backwards, which evens out a falling list."""
    cta = lax.axis_index("cta")
    place = jnp.where(lax.rem(turn, I32(2)) == 0, cta, ctas - 1 - cta)
    index = turn * ctas + place
    tile = lax.div(index, I32(problem.kv_heads))
    fields = [tiles_gmem[tile, f] for f in range(work.CONTEXT + 1)]
    return Item(tile, lax.rem(index, I32(problem.kv_heads)), *fields)


def count_rounds(count_gmem, problem: Problem, ctas: int):
    """How many items this CTA has."""
    items = count_gmem[0] * problem.kv_heads
    full = lax.div(items, I32(ctas))
    cta = lax.axis_index("cta")
    place = jnp.where(lax.rem(full, I32(2)) == 0, cta, ctas - 1 - cta)
    return full + jnp.where(place < lax.rem(items, I32(ctas)), 1, 0).astype(I32)


def block_range(item: Item, problem: Problem):
    """First and one-past-last KV block that any query of the item sees."""
    last = lax.div(item.position + item.end - 1, I32(problem.kv_block)) + 1
    if problem.window is None:
        return I32(0), last
    first_key = jnp.maximum(item.position + item.begin - (problem.window - 1), 0)
    return lax.div(first_key, I32(problem.kv_block)), last


def load_items(refs, scratch, problem: Problem, schedule: Schedule):
    """The loader warpgroup: queries of each item, then its keys and values block by block, by TMA."""
    q_gmem, k_gmem, v_gmem, tiles_gmem, count_gmem, pages_gmem = refs
    wg_tokens = warpgroup_tokens(problem.group)
    rows, stages = problem.rows_a_page, schedule.stages

    def load_queries(item):
        for wg in range(schedule.consumers):
            for g in range(problem.group):
                first = pl.multiple_of(item.first + wg * wg_tokens, work.ALIGN)
                plgpu.copy_gmem_to_smem(
                    q_gmem.at[pl.ds(first, wg_tokens), item.head, g],
                    scratch["q_smem"].at[wg, pl.ds(g * wg_tokens, wg_tokens)],
                    scratch["q_loaded"].at[wg],
                )

    def find_pages(item, block):
        """Page and row in it of each copy; behind the context the last page stands in, never a stale table entry."""
        last_key = item.context - 1
        found = []
        for i in range(problem.pages_a_block):
            key = block * problem.kv_block + i * rows
            page = lax.div(jnp.minimum(key, last_key), I32(problem.page_size))
            found.append((pages_gmem[item.request, page], lax.rem(key, I32(problem.page_size))))
        return found

    def load_block(pages, source, target, loaded, head):
        for i, (page, row) in enumerate(pages):
            place = source.at[page, head]
            if problem.page_size > rows:
                place = place.at[pl.ds(pl.multiple_of(row, rows), rows)]
            plgpu.copy_gmem_to_smem(place, target.at[pl.ds(i * rows, rows)], loaded)

    def load_item(turn, step):
        item = read_item(tiles_gmem, turn, problem, schedule.ctas)
        lo, hi = block_range(item, problem)

        @pl.when(turn > 0)
        def _():
            plgpu.barrier_wait(scratch["q_consumed"])

        load_queries(item)

        def load_step(block, step):
            slot = lax.rem(step, I32(stages))
            pages = find_pages(item, block)
            for name, source in (("k", k_gmem), ("v", v_gmem)):

                @pl.when(step >= stages)
                def _(name=name):
                    plgpu.barrier_wait(scratch[f"{name}_consumed"].at[slot])

                target, loaded = (
                    scratch[f"{name}_smem"].at[slot],
                    scratch[f"{name}_loaded"].at[slot],
                )
                load_block(pages, source, target, loaded, item.head)
            return step + 1

        return lax.fori_loop(lo, hi, load_step, step)

    rounds = count_rounds(count_gmem, problem, schedule.ctas)
    steps = lax.fori_loop(I32(0), rounds, load_item, I32(0))

    @pl.loop(I32(0), jnp.minimum(steps, stages))
    def _drain(slot):  # every completed phase is observed before the barriers go
        plgpu.barrier_wait(scratch["k_consumed"].at[slot])
        plgpu.barrier_wait(scratch["v_consumed"].at[slot])

    @pl.when(rounds > 0)
    def _():
        plgpu.barrier_wait(scratch["q_consumed"])


def multiply_accumulate(acc, p, v_ref, interpreted_p_smem):
    """acc + p @ v with p in registers (in shared memory when interpreted)."""
    if (
        interpreted_p_smem is not None
    ):  # neither run_state nor an operand in registers is interpreted
        interpreted_p_smem[...] = p

        def product(acc_ref):
            plgpu.wgmma(acc_ref, interpreted_p_smem, v_ref)
            return acc_ref[...]

        return acc + pl.run_scoped(product, plgpu.ACC(acc.shape, jnp.float32))

    def issue(acc_ref):
        plgpu.wgmma(acc_ref, p, v_ref)

    return pl.run_state(issue)(plgpu.ACC.init(acc))


def zero_tail(v_ref, valid, problem: Problem):
    """Zeroes the value rows from `valid` on."""
    for start in range(0, problem.kv_block, WARPGROUP_ROWS):
        rows = v_ref.at[pl.ds(start, WARPGROUP_ROWS)]
        values = plgpu.load(rows, layout=TILE)
        row = plgpu.broadcasted_iota(I32, values.shape, 0, layout=TILE)
        rows[...] = jnp.where(row + start < valid, values, jnp.zeros_like(values))
    plgpu.commit_smem()


def attend_block(
    block, slot, carry, bounds, wg, scratch, problem: Problem, schedule: Schedule, *, masked: bool
):
    """One KV block of the online softmax: the body that every query row of every schedule goes through.

    bounds = (position of the warpgroup's first row, tokens a head, keys in context, last block).
    """
    acc, m, l = carry
    position, wg_tokens, context, last_block = bounds
    c, interpret, width = problem.log2_scale, problem.interpret, problem.kv_block
    fma = functools.partial(fused_multiply_add, interpret=interpret)

    def take_turn():
        """With two warpgroups: one has the tensor cores while the other has the softmax."""
        if schedule.consumers > 1:
            plgpu.barrier_arrive(scratch["tensor_core_turn"])
            plgpu.barrier_wait(scratch["tensor_core_turn"])

    plgpu.barrier_wait(scratch["k_loaded"].at[slot])

    def score(s_ref):
        plgpu.wgmma(s_ref, scratch["q_smem"].at[wg], scratch["k_smem"].at[slot].transpose((1, 0)))
        take_turn()
        return s_ref[...]

    s = pl.run_scoped(score, plgpu.ACC((WARPGROUP_ROWS, width), jnp.float32))
    plgpu.barrier_arrive(scratch["k_consumed"].at[slot])

    if masked:

        @pl.when(block == last_block)
        def _():
            plgpu.barrier_arrive(scratch["q_consumed"])

        row = plgpu.broadcasted_iota(I32, s.shape, 0, layout=TILE)
        query = position + (row & (wg_tokens - 1))
        key = block * width + plgpu.broadcasted_iota(I32, s.shape, 1, layout=TILE)
        seen = key <= query
        if problem.window is not None:
            seen &= key > query - problem.window
        s = jnp.where(seen, s, -jnp.inf)

    new_m = jnp.maximum(m, s.max(axis=1) * c)
    alpha = jnp.exp2(m - new_m)
    e = jnp.exp2(fma(s, c, rows_to_tile(-new_m, width), layout=TILE))
    acc *= rows_to_tile(alpha, problem.head_dim)
    p = e.astype(problem.dtype)
    l = fma(l, alpha, e.sum(axis=1), layout=ROW)
    acc, l, new_m, p = lax.optimization_barrier((acc, l, new_m, p))

    if schedule.consumers > 1:
        plgpu.barrier_arrive(scratch["tensor_core_turn"])  # the softmax is done
    v_ref = scratch["v_smem"].at[slot]
    plgpu.barrier_wait(scratch["v_loaded"].at[slot])
    if schedule.consumers > 1:
        plgpu.barrier_wait(scratch["tensor_core_turn"])
    if masked:
        valid = context - block * width

        @pl.when(
            (valid < width) & (wg == 0)
        )  # warpgroup 1's turn at these values comes after warpgroup 0's
        def _():
            zero_tail(v_ref, valid, problem)

    acc = multiply_accumulate(acc, p, v_ref, scratch["p_smem"].at[wg] if interpret else None)
    plgpu.barrier_arrive(scratch["v_consumed"].at[slot])
    return acc, new_m, l


def store_rows(outs, item: Item, wg, o, lse, scratch, problem: Problem, schedule: Schedule):
    """Writes one warpgroup's outputs: a whole tile in one copy a head, a partial one token by token."""
    o_gmem, lse_gmem = outs
    wg_tokens = warpgroup_tokens(problem.group)
    first = pl.multiple_of(item.first + wg * wg_tokens, work.ALIGN)
    begin = jnp.clip(item.begin - wg * wg_tokens, 0, wg_tokens)
    end = jnp.clip(item.end - wg * wg_tokens, 0, wg_tokens)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the staging buffers are free again
    scratch["lse_smem"][wg] = lse

    def store_tile():
        staged = scratch["o_tile_smem"].at[wg]
        staged[...] = o
        plgpu.commit_smem()
        for g in range(problem.group):
            rows = staged.at[pl.ds(g * wg_tokens, wg_tokens)]
            plgpu.copy_smem_to_gmem(rows, o_gmem.at[pl.ds(first, wg_tokens), item.head, g])

    def store_tokens():
        staged = scratch["o_smem"].at[wg]
        store_plain(staged, o, interpret=problem.interpret)
        plgpu.commit_smem()

        @pl.loop(begin, end)
        def _(t):
            for g in range(problem.group):
                plgpu.copy_smem_to_gmem(
                    staged.at[g * wg_tokens + t], o_gmem.at[first + t, item.head, g]
                )

    if schedule.consumers > 1:
        whole = end - begin == wg_tokens
        pl.when(whole)(store_tile)
        pl.when(jnp.logical_not(whole))(store_tokens)
    else:
        store_tokens()
    plgpu.copy_smem_to_gmem(scratch["lse_smem"].at[wg], lse_gmem.at[item.tile, item.head, wg])


def compute_items(refs, outs, scratch, problem: Problem, schedule: Schedule):
    """A consumer warpgroup: its 64 rows of each item."""
    tiles_gmem, count_gmem = refs
    wg = lax.axis_index("wg")
    wg_tokens, dim, width = warpgroup_tokens(problem.group), problem.head_dim, problem.kv_block

    def take_turn():
        plgpu.barrier_arrive(scratch["tensor_core_turn"])
        plgpu.barrier_wait(scratch["tensor_core_turn"])

    def compute_item(turn, step):
        item = read_item(tiles_gmem, turn, problem, schedule.ctas)
        lo, hi = block_range(item, problem)
        position = item.position + wg * wg_tokens
        bounds = (position, wg_tokens, item.context, hi - 1)

        def run(first, last, carry, masked):
            def one(block, carry):
                slot = lax.rem(step + block - lo, I32(schedule.stages))
                return attend_block(
                    block, slot, carry, bounds, wg, scratch, problem, schedule, masked=masked
                )

            return lax.fori_loop(first, last, one, carry)

        # Blocks that every row of this warpgroup sees in full need no mask. The item's last block always goes
        # through the masked body: there the values' tail is zeroed and the queries are given back.
        lowest = jnp.maximum(position, item.position + item.begin)
        plain_end = jnp.clip(lax.div(lowest + 1, I32(width)), lo, hi - 1)
        plain_start = lo
        if problem.window is not None:
            behind = position + wg_tokens - problem.window  # first key that all rows see
            plain_start = jnp.clip(
                lax.div(jnp.maximum(behind, 0) + width - 1, I32(width)), lo, plain_end
            )

        plgpu.barrier_wait(scratch["q_loaded"].at[wg])
        carry = (
            plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, dim), jnp.float32), TILE),
            plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), LOWEST, jnp.float32), ROW),
            plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), ROW),
        )
        if problem.window is not None:
            carry = run(lo, plain_start, carry, True)
        carry = run(plain_start, plain_end, carry, False)
        acc, m, l = run(plain_end, hi, carry, True)

        o = (acc * rows_to_tile(1.0 / l, dim)).astype(problem.dtype)
        store_rows(outs, item, wg, o, (m + jnp.log2(l)) * LN_2, scratch, problem, schedule)
        return step + hi - lo

    if schedule.consumers > 1:
        pl.when(wg == 1)(take_turn)  # warpgroup 1 runs half a block behind
    lax.fori_loop(I32(0), count_rounds(count_gmem, problem, schedule.ctas), compute_item, I32(0))
    if schedule.consumers > 1:
        pl.when(wg == 0)(take_turn)
    plgpu.wait_smem_to_gmem(0)


def launch(q, k_pages, v_pages, tiles, count, page_table, problem: Problem, schedule: Schedule):
    """Runs the kernel on q [T, Nkv, G, Dh]; returns o like q and lse float32 [tiles, Nkv, consumers, 64]."""

    def attention_hopper_kernel(q, k, v, tiles, count, pages, o, lse, **scratch):
        wg = lax.axis_index("wg")

        @pl.when(wg < schedule.consumers)
        def _consume():
            if schedule.consumers > 1:
                plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            compute_items((tiles, count), (o, lse), scratch, problem, schedule)

        @pl.when(wg == schedule.consumers)
        def _load():
            if schedule.consumers > 1:
                plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
            load_items((q, k, v, tiles, count, pages), scratch, problem, schedule)

    lse_shape = (tiles.shape[0], problem.kv_heads, schedule.consumers, WARPGROUP_ROWS)
    return plgpu.kernel(
        attention_hopper_kernel,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(lse_shape, jnp.float32),
        ),
        scratch_types=scratch_types(problem, schedule),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        grid=(schedule.ctas,),
        grid_names=("cta",),
        num_threads=schedule.consumers + 1,
        thread_name="wg",
        interpret=plgpu.InterpretGPUParams() if problem.interpret else None,
    )(q, k_pages, v_pages, tiles, count, page_table)


@functools.partial(
    jax.jit, static_argnames=("scale", "window", "kv_block", "schedule", "interpret")
)
def attention_hopper(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None,
    kv_block: int,
    schedule: Schedule,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attends each query token to its request's paged keys, on a Hopper GPU.

    Args:
      q: [T, Nkv, G, Dh] bfloat16 or float16, normed and roped.
      k_pages, v_pages: [P, Nkv, Tp, Dh] of q's dtype; the batch's own tokens are already in them.
      batch: where each token belongs; tokens of a request stand together at consecutive positions.
      scale: multiplies the scores; positive.
      window: keys a query sees, itself included; None for all.
      kv_block: keys a block (topology).
      schedule: who computes which rows; cannot change a bit.
      interpret: run in the GPU interpret mode, for tests; it does not give the GPU's bits.

    Returns:
      o [T, Nkv, G, Dh] in q's dtype, and the log-sum-exp of the scaled scores, float32
      [T, Nkv, G]. Rows from num_tokens on are undefined.

    Raises:
      NotImplementedError: a shape or dtype that this kernel does not serve.
      ValueError: a scale that is not positive, or a schedule that does not fit the chip.

    Invariance: a token's o and lse depend on its own query, its request's keys and values up to its
    position, scale, window and kv_block; not on the other rows, the chunk it came in, page ids, the
    page size, or the schedule.
    """
    tokens, kv_heads, group, head_dim = q.shape
    _check(q, k_pages, scale, kv_block)
    padded = -(-tokens // work.ALIGN) * work.ALIGN
    problem = Problem(
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        page_size=k_pages.shape[2],
        dtype=jnp.dtype(q.dtype),
        scale=float(scale),
        window=window,
        kv_block=kv_block,
        interpret=interpret,
    )
    if (needed := shared_bytes(problem, schedule)) > SHARED_BYTES:
        raise ValueError(f"{schedule} needs {needed} bytes of shared memory, over {SHARED_BYTES}")
    tile_tokens = warpgroup_tokens(group) * schedule.consumers
    tiles, count = work.make_tiles(batch, tokens=tokens, tile_tokens=tile_tokens)
    schedule = dataclasses.replace(schedule, ctas=min(schedule.ctas, tiles.shape[0] * kv_heads))
    if padded != tokens:
        q = jnp.pad(q, ((0, padded - tokens), (0, 0), (0, 0), (0, 0)))
    o, lse_tiles = launch(q, k_pages, v_pages, tiles, count, batch.page_table, problem, schedule)
    return o[:tokens], _untile_lse(lse_tiles, tiles, tokens, group)


def _untile_lse(lse_tiles: jax.Array, tiles: jax.Array, tokens: int, group: int) -> jax.Array:
    """lse float32 [tiles, Nkv, consumers, 64] -> [T, Nkv, G]; dropped where nobody asks for it."""
    tile, place = work.token_places(tiles, tokens=tokens)
    wg_tokens = warpgroup_tokens(group)
    wg, place = (x[:, None, None] for x in (place // wg_tokens, place % wg_tokens))
    head = jnp.arange(lse_tiles.shape[1])[None, :, None]
    row = jnp.arange(group)[None, None, :] * wg_tokens + place
    return lse_tiles[tile[:, None, None], head, wg, row]


def _check(q: jax.Array, k_pages: jax.Array, scale: float, kv_block: int) -> None:
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"Hopper attention takes bfloat16 or float16, got {q.dtype}")
    if q.shape[3] not in (64, 128):
        raise NotImplementedError(
            f"Hopper attention serves head sizes 64 and 128, got {q.shape[3]}"
        )
    if kv_block not in (64, 128):
        raise NotImplementedError(f"Hopper attention serves kv_block 64 and 128, got {kv_block}")
    page_size = k_pages.shape[2]
    if page_size % 8 or (page_size % kv_block and kv_block % page_size):
        raise NotImplementedError(
            f"page_size={page_size} must be a multiple of 8, and divide kv_block={kv_block} or be "
            "a multiple of it"
        )
    if scale <= 0:
        raise ValueError(f"scale={scale} must be positive")
