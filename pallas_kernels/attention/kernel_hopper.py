"""Ragged paged causal attention for Hopper (sm90), in Pallas Mosaic GPU.

Equation, for a query row at absolute position p, with c = scale * log2(e) rounded once to float32:

    for each block of kv_block keys, ascending at absolute positions (from the window's first):
        s = q . k                         float32, wgmma, head columns ascending
        m' = max(m, max(s) * c)
        e = exp2(fma(s, c, -m'))          a = exp2(m - m')
        l = fma(l, a, sum(e))             the sum in the accumulator layout's fixed tree
        acc = acc * a + round(e) . v      e rounded to v's dtype; float32, wgmma, keys ascending
    o = acc * (1 / l) rounded once        lse = (m + log2(l)) * ln(2)

A key behind p, or before the window, has s = -inf and e = 0 exactly; value rows behind the
request's last key are zeroed in shared memory, so that a page never written cannot make 0 * NaN.
No range of keys is split, unless the topology says so: then o and lse of each range of `kv_split`
keys are made so, in float32, and `hopper_splits` merges them. Every row is rescaled at every block.

Grid: persistent CTAs over (tile, KV head) items, longest first; with `Schedule.columns` an item is
cut into parts of the value columns, each of which makes all scores and meets all keys. A tile holds
consecutive query tokens of one request. A consumer warpgroup owns 64 of its rows, row = head in
group * tokens + token, and always runs the same body; with `Schedule.half_rows` that body's softmax
is done for the half of the rows that can hold a query. With `Schedule.turned` an item is one token,
and keys are the rows of the products. One more warpgroup loads queries, keys and values by TMA.
"""

import dataclasses
import functools
import types

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ..ragged import RaggedBatch
from ..shared_memory import CTA_BYTES
from . import hopper_work as work
from .hopper_block import await_turn, own_rows, pass_turn
from .hopper_item import attend_item
from .hopper_load import load_items
from .hopper_math import LN_2, rows_to_tile
from .hopper_problem import (
    I32,
    Cta,
    Problem,
    count_rounds,
    make_ctas,
    read_item,
    scratch_types,
    shared_bytes,
)
from .hopper_relay import MULTIPLIER, multiply_item, score_items
from .hopper_splits import LINE, merge_splits
from .hopper_store import store_rows
from .hopper_turned import divide_columns
from .schedule import (
    HEADS,
    MOST_HALF,
    WARPGROUP_ROWS,
    Schedule,
    schedule_for,
    warpgroup_tokens,
)
from .topology import AttentionTopology

CONSUMER_REGISTERS = 232  # two consumer warpgroups and a loader share 65,536 registers
LOADER_REGISTERS = 40


def compute_items(tiles_gmem, outs, cta: Cta):
    """A consumer warpgroup: its 64 rows of each item."""
    wg = lax.axis_index("wg")
    if cta.schedule.overlap == "blocks":
        pl.when(wg < MULTIPLIER)(lambda: score_items(tiles_gmem, wg, cta))
        pl.when(wg == MULTIPLIER)(
            lambda: finish_items(tiles_gmem, outs, I32(0), multiply_item, cta)
        )
        return
    pl.when(wg == 1)(lambda: pass_turn(wg, cta))  # warpgroup 0 goes first
    finish_items(tiles_gmem, outs, wg, attend_item, cta)
    pl.when(wg == 0)(lambda: await_turn(wg, cta))


def finish_items(tiles_gmem, outs, wg, attend, cta: Cta):
    """Attends each item and writes its outputs."""

    def finish_item(turn, step):
        item = read_item(tiles_gmem, turn, cta)
        (acc, m, total), step = attend(item, step, wg, cta)
        if cta.schedule.turned:
            o = divide_columns(acc, total, cta)
        else:
            o = own_rows(acc, cta) * rows_to_tile(1.0 / total, cta.columns, layout=cta.tile)
        o = o.astype(cta.problem.out_dtype)
        store_rows(outs, item, wg, o, (m + jnp.log2(total)) * LN_2, cta)
        return step

    lax.fori_loop(I32(0), count_rounds(tiles_gmem, cta), finish_item, I32(0))
    plgpu.wait_smem_to_gmem(0)


def for_fitting(tiles_gmem, ctas: list[Cta], call):
    """Calls call(n), n the last of ctas whose items all find a CTA of the grid, or else 0."""
    if len(ctas) == 1:
        call(0)
        return
    most = ctas[1].schedule
    few = tiles_gmem[0, work.COUNT] * (ctas[1].problem.kv_heads * most.columns) <= most.ctas
    pl.when(few)(lambda: call(1))
    pl.when(jnp.logical_not(few))(lambda: call(0))


def launch(q, k_pages, v_pages, tiles, page_table, problem: Problem, schedule: Schedule, splits=1):
    """Runs the kernel: o like q [T, Nkv, G, Dh], lse float32 [tiles, Nkv, consumers, 64].

    With split keys o is float32 [splits, T, Nkv, G, LINE or more], and lse without the last axis.
    """
    items = tiles.shape[0] * problem.kv_heads * schedule.widths[-1].columns
    schedule = dataclasses.replace(schedule, ctas=min(schedule.ctas, items))
    two = schedule.consumers > 1  # one consumer and the loader fit without trading registers

    def attention_hopper_kernel(q, k, v, tiles, pages, o, lse, **scratch):
        ctas = make_ctas(problem, schedule, scratch)
        wg = lax.axis_index("wg")

        @pl.when(wg < schedule.computing)
        def _consume():
            if two:
                plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            for_fitting(tiles, ctas, lambda n: compute_items(tiles, (o, lse), ctas[n]))

        @pl.when(wg == schedule.computing)
        def _load():
            if two:
                plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
            refs = q, k, v, tiles, pages
            for_fitting(tiles, ctas, lambda n: load_items(refs, ctas[n]))

    rows = Cta(problem, schedule, types.SimpleNamespace()).rows
    lse_shape = (tiles.shape[0], problem.kv_heads, schedule.consumers, rows)
    o_shape = q.shape
    if schedule.turned:
        q = q.reshape(-1, problem.head_dim)
    if problem.kv_split is not None:
        lse_shape = (splits, *o_shape[:3])
        o_shape = (*lse_shape, max(problem.head_dim, LINE))
    out_type = (
        jax.ShapeDtypeStruct(o_shape, problem.out_dtype),
        jax.ShapeDtypeStruct(lse_shape, jnp.float32),
    )
    return plgpu.kernel(
        attention_hopper_kernel,
        out_type=out_type,
        scratch_types=scratch_types(problem, schedule),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        grid=(schedule.ctas,),
        grid_names=("cta",),
        num_threads=schedule.computing + 1,
        thread_name="wg",
        interpret=problem.interpret,
    )(q, k_pages, v_pages, tiles, page_table)


@functools.partial(
    jax.jit,
    static_argnames=(
        "scale",
        "window",
        "kv_block",
        "kv_split",
        "schedule",
        "out_dtype",
        "interpret",
    ),
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
    kv_split: int | None = None,
    out_dtype: DTypeLike | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
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
      kv_split: keys of a range whose result is merged with the others' (topology), a multiple of
        kv_block; None: no ranges. Takes memory for a float32 o of every range.
      out_dtype: q's dtype, or float32 for proofs: o before its last rounding.
      interpret: run in the GPU interpret mode, for tests; it does not give the GPU's bits.

    Returns:
      o [T, Nkv, G, Dh] in out_dtype, and the log-sum-exp of the scaled scores, float32
      [T, Nkv, G]. Rows from num_tokens on are undefined.

    Raises:
      NotImplementedError: a shape or dtype that this kernel does not serve.
      ValueError: a scale that is not positive, or a schedule that does not fit the chip.

    Invariance: a token's o and lse depend on its own query, its request's keys and values up to its
    position, scale, window, kv_block and kv_split; not on the other rows, the chunk it came in,
    page ids, the page size, or the schedule.
    """
    tokens, kv_heads, group, head_dim = q.shape
    _check(q, k_pages, scale, kv_block, schedule)
    padded = -(-tokens // work.ALIGN) * work.ALIGN
    problem = Problem(
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        page_size=k_pages.shape[2],
        dtype=jnp.dtype(q.dtype),
        out_dtype=jnp.dtype(out_dtype or q.dtype if kv_split is None else jnp.float32),
        scale=float(scale),
        window=window,
        kv_block=kv_block,
        kv_split=kv_split,
        interpret=interpret,
    )
    if (needed := shared_bytes(problem, schedule)) > CTA_BYTES:
        raise ValueError(f"{schedule} needs {needed} bytes of shared memory, over {CTA_BYTES}")
    tile_tokens = warpgroup_tokens(group) * schedule.consumers
    if schedule.turned or schedule.half_rows:
        tile_tokens = 1 if schedule.turned else 8
    tiles = work.make_tiles(batch, tokens=tokens, tile_tokens=tile_tokens)
    if padded != tokens:
        q = jnp.pad(q, ((0, padded - tokens), (0, 0), (0, 0), (0, 0)))
    if kv_split is not None:
        operands = q, k_pages, v_pages, tiles
        o, lse = _in_ranges(*operands, batch, problem, schedule)
        return merge_splits(
            o,
            lse,
            batch.positions,
            batch.num_tokens,
            kv_split=kv_split,
            window=window,
            head_dim=head_dim,
            out_dtype=jnp.dtype(out_dtype or q.dtype),
            interpret=interpret,
        )
    o, lse_tiles = launch(q, k_pages, v_pages, tiles, batch.page_table, problem, schedule)
    return o[:tokens], _untile_lse(lse_tiles, tiles, tokens, problem, schedule)


def _in_ranges(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    tiles: jax.Array,
    batch: RaggedBatch,
    problem: Problem,
    schedule: Schedule,
) -> tuple[jax.Array, jax.Array]:
    """o float32 [splits, T, Nkv, G, width] and lse, one number a line, of every range of keys."""
    assert problem.kv_split is not None
    splits = -(-batch.page_table.shape[1] * problem.page_size // problem.kv_split)
    table = work.split_tiles(tiles, kv_split=problem.kv_split, splits=splits, window=problem.window)
    return launch(q, k_pages, v_pages, table, batch.page_table, problem, schedule, splits)


def attention_hopper_op(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    positions: jax.Array,
    request: jax.Array,
    query_start: jax.Array,
    page_table: jax.Array,
    num_tokens: jax.Array,
    *,
    scale: float,
    window: int | None,
    topology: AttentionTopology,
) -> tuple[jax.Array, jax.Array]:
    """`attention_hopper` as an implementation of the attention primitive, schedule by the table."""
    batch = RaggedBatch(
        positions=positions,
        request=request,
        query_start=query_start,
        page_table=page_table,
        num_tokens=num_tokens,
    )
    tokens, kv_heads, group, head_dim = q.shape
    schedule = schedule_for(
        tokens=tokens,
        requests=page_table.shape[0],
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        split=topology.kv_split is not None,
    )
    return attention_hopper(
        q,
        k_pages,
        v_pages,
        batch,
        scale=scale,
        window=window,
        kv_block=topology.kv_block,
        kv_split=topology.kv_split,
        schedule=schedule,
    )


def _untile_lse(
    lse_tiles: jax.Array, tiles: jax.Array, tokens: int, problem: Problem, schedule: Schedule
) -> jax.Array:
    """lse float32 [tiles, Nkv, consumers, rows] -> [T, Nkv, G]; dropped if nobody asks for it."""
    tile, place = work.token_places(tiles, tokens=tokens)
    wg, place = (x[:, None, None] for x in (place // problem.tokens, place % problem.tokens))
    head = jnp.arange(lse_tiles.shape[1], dtype=jnp.int32)[None, :, None]
    cta = Cta(problem, schedule, types.SimpleNamespace())
    row = cta.row_of(1, 0) * jnp.arange(problem.group)[None, None, :] + place
    if schedule.turned:
        row += cta.first_head(jnp.arange(tokens, dtype=jnp.int32)[:, None, None], head)[1]
    return lse_tiles[tile[:, None, None], head, wg, row]


def _check(
    q: jax.Array, k_pages: jax.Array, scale: float, kv_block: int, schedule: Schedule
) -> None:
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
    if schedule.half_rows and q.shape[2] > MOST_HALF:
        raise ValueError(f"half_rows serves up to {MOST_HALF} query heads a KV head, {q.shape[2]}")
    if schedule.turned and HEADS % q.shape[2]:
        raise ValueError(f"turned serves groups that divide {HEADS}, got {q.shape[2]}")
    if schedule.turned and q.shape[3] // schedule.columns < WARPGROUP_ROWS:
        raise ValueError(f"turned needs {WARPGROUP_ROWS} columns a part, got {schedule}")
    if scale <= 0:
        raise ValueError(f"scale={scale} must be positive")
