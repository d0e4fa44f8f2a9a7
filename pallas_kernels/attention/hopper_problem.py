"""What a launch of the Hopper attention kernel works on: static facts, memory, items."""

import dataclasses
import types
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import hopper_work as work
from .hopper_math import EIGHTS, EIGHTS_ROW, HALF_ROW, HALF_TILE, LOG2_E, ROW, TILE
from .schedule import HEADS, WARPGROUP_ROWS, Schedule, warpgroup_tokens

I32 = jnp.int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Static facts of one call: shapes, and what fixes its bits."""

    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    dtype: Any
    out_dtype: Any
    scale: float
    window: int | None
    kv_block: int
    kv_split: int | None
    interpret: plgpu.InterpretGPUParams | None

    @property
    def log2_scale(self) -> float:
        """scale * log2(e): scores times this are exponents of two."""
        return float(np.float32(self.scale * LOG2_E))

    @property
    def rows_a_copy(self) -> int:
        """Keys that one copy brings: a page, or the part of a larger page that a block covers."""
        return min(self.page_size, self.kv_block)

    @property
    def copies_a_block(self) -> int:
        return self.kv_block // self.rows_a_copy

    @property
    def tokens(self) -> int:
        """Query tokens of one warpgroup."""
        return warpgroup_tokens(self.group)

    @property
    def stores_tiles(self) -> bool:
        """Whole tiles leave in one copy a head; float32 outputs, for proofs, find no room."""
        return self.out_dtype == self.dtype


@dataclasses.dataclass(frozen=True)
class Cta:
    """What the roles of one CTA share; `memory` holds the refs of `scratch_types` by name."""

    problem: Problem
    schedule: Schedule
    memory: types.SimpleNamespace

    @property
    def interpret(self) -> plgpu.InterpretGPUParams | None:
        return self.problem.interpret

    @property
    def rows(self) -> int:
        """Rows of a warpgroup that the softmax is done for."""
        if self.schedule.turned:
            return HEADS
        return WARPGROUP_ROWS // 2 if self.schedule.half_rows else WARPGROUP_ROWS

    @property
    def tile(self):
        """Layout of [rows, n]."""
        if self.schedule.turned:
            return EIGHTS
        return HALF_TILE if self.schedule.half_rows else TILE

    @property
    def row(self):
        """Layout of [rows]."""
        if self.schedule.turned:
            return EIGHTS_ROW
        return HALF_ROW if self.schedule.half_rows else ROW

    @property
    def columns(self) -> int:
        """Value columns that this CTA accumulates."""
        return self.problem.head_dim // self.schedule.columns

    @property
    def line(self) -> int:
        """Columns of a line of the values in shared memory, and of p, which meets them there."""
        return min(self.columns, 64)

    def row_of(self, head: int, token):
        """Row, of those the softmax is done for, of a query head's token.

        Turned, the rows are query heads from `first_head` on.
        """
        if self.schedule.turned:
            return head
        stride = self.problem.tokens
        return head * (stride // 2 if self.schedule.half_rows else stride) + token

    def first_head(self, token, head):
        """(first flat query head of the eight that a turned item loads, its own first of them)."""
        own = (token * self.problem.kv_heads + head) * self.problem.group
        place = lax.rem(own, I32(HEADS))
        return own - place, place

    @property
    def accumulator(self) -> tuple[int, int]:
        """Shape of the accumulator of the outputs."""
        turned = self.columns, HEADS
        return turned if self.schedule.turned else (WARPGROUP_ROWS, self.columns)

    @property
    def takes_turns(self) -> bool:
        """Two warpgroups start their products by turns, each under the other's softmax."""
        return self.schedule.consumers > 1 and self.schedule.overlap == "turns"


def scratch_types(problem: Problem, schedule: Schedule) -> dict[str, Any]:
    """Shared memory and barriers of a CTA; the launch and the does-it-fit check both read this."""
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    wgs, stages, dim = schedule.consumers, schedule.stages, problem.head_dim
    rows, block, dtype = WARPGROUP_ROWS, problem.kv_block, problem.dtype
    cta = Cta(problem, schedule, types.SimpleNamespace())
    turned, queries = schedule.turned, HEADS if schedule.turned else rows
    scratch = dict(
        q_smem=plgpu.SMEM((wgs, queries, dim), dtype, transforms=swizzled),
        k_smem=plgpu.SMEM((stages, block, dim), dtype, transforms=swizzled),
        lse_smem=plgpu.SMEM((wgs, cta.rows), jnp.float32),
        q_loaded=plgpu.Barrier(num_arrivals=1 if turned else problem.group, num_barriers=wgs),
        q_consumed=plgpu.Barrier(num_arrivals=2 if schedule.overlap == "blocks" else wgs),
        k_loaded=plgpu.Barrier(
            num_arrivals=problem.copies_a_block, num_barriers=schedule.key_phases
        ),
        v_loaded=plgpu.Barrier(num_arrivals=problem.copies_a_block, num_barriers=stages),
        k_consumed=plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
        v_consumed=plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
        turn=plgpu.Barrier(num_barriers=2),  # of warpgroup 0, of warpgroup 1
        tail_zeroed=plgpu.Barrier(num_arrivals=wgs),
    )
    if wgs > 1 and problem.stores_tiles:  # decode has only partial tiles
        scratch["o_tile_smem"] = plgpu.SMEM((wgs, rows, dim), dtype, transforms=swizzled)
    if turned:
        scratch |= dict(
            # Padded: rows begin in different banks.
            s_smem=plgpu.SMEM((schedule.sides, HEADS, block + 4), jnp.float32),
            p_smem=plgpu.SMEM((schedule.sides, HEADS, block), dtype, transforms=swizzled),
            alpha_smem=plgpu.SMEM((schedule.sides, HEADS), jnp.float32),
            inverse_smem=plgpu.SMEM((1, HEADS), jnp.float32),
        )
    if schedule.overlap == "blocks":
        vector = plgpu.SMEM((2, cta.rows), jnp.float32)
        scratch |= dict(
            m_smem=vector,  # from one softmax to the next
            top_smem=vector,
            alpha_smem=vector,
            sum_smem=vector,
            m_ready=plgpu.Barrier(num_barriers=2),  # for warpgroup 0, for warpgroup 1
            p_ready=plgpu.Barrier(num_barriers=2),
            p_consumed=plgpu.Barrier(num_barriers=2),
        )
    views = [column_types(problem, each) for each in schedule.widths]
    if len(views) == 1:
        scratch |= views[0]
    elif problem.interpret:  # which has no unions
        scratch |= {f"{name}_{n}": view[name] for n, view in enumerate(views) for name in view}
    else:
        scratch["by_width"] = plgpu.RefUnion(*views)
    return scratch


def column_types(problem: Problem, schedule: Schedule) -> dict[str, Any]:
    """The part of a CTA's shared memory whose shape follows the columns of the values."""
    cta = Cta(problem, schedule, types.SimpleNamespace())
    swizzled = (plgpu.TilingTransform((8, cta.line)), plgpu.SwizzleTransform(2 * cta.line))
    wgs, block, dtype = schedule.consumers, problem.kv_block, problem.dtype
    blocks, sides = schedule.overlap == "blocks", 2 if schedule.overlap == "blocks" else wgs
    view = dict(
        v_smem=plgpu.SMEM((schedule.stages, block, cta.columns), dtype, transforms=swizzled),
        # Plain rows, for single tokens.
        o_smem=plgpu.SMEM((wgs, cta.rows, cta.columns), problem.out_dtype),
    )
    if blocks and not schedule.turned:
        view["p_smem"] = plgpu.SMEM((sides, WARPGROUP_ROWS, block), dtype, transforms=swizzled)
    elif problem.interpret and not schedule.turned:
        view["p_smem"] = plgpu.SMEM((sides, WARPGROUP_ROWS, block), dtype)
    return view


def make_ctas(problem: Problem, schedule: Schedule, scratch: dict[str, Any]) -> list[Cta]:
    """The CTA as it works with each of the schedule's widths; `scratch` as `scratch_types` says."""
    widths = schedule.widths
    if len(widths) == 1:
        return [Cta(problem, schedule, types.SimpleNamespace(**scratch))]
    if problem.interpret:
        names = column_types(problem, schedule)
        views = [{name: scratch[f"{name}_{n}"] for name in names} for n in range(len(widths))]
    else:
        views = list(scratch["by_width"])
    return [
        Cta(problem, each, types.SimpleNamespace(**(scratch | view)))
        for each, view in zip(widths, views, strict=True)
    ]


def shared_bytes(problem: Problem, schedule: Schedule) -> int:
    """Shared memory that `scratch_types` asks for, barriers and alignment excluded."""
    compiled = dataclasses.replace(problem, interpret=None)
    refs = scratch_types(compiled, schedule).values()
    avals = [ref.get_array_aval() for ref in refs if not isinstance(ref, plgpu.Barrier)]
    return sum(aval.size * aval.dtype.itemsize for aval in avals)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Item:
    """One (tile, KV head) of the work list, as traced scalars; see `hopper_work.make_tiles`.

    `part` is which of the schedule's parts of the value columns, and `split` the range of keys, 0
    where they are not split.
    """

    tile: jax.Array
    head: jax.Array
    part: jax.Array
    request: jax.Array
    first: jax.Array
    begin: jax.Array
    end: jax.Array
    position: jax.Array
    context: jax.Array
    split: jax.Array


def read_item(tiles_gmem, turn, cta: Cta) -> Item:
    """This CTA's item of round `turn`; odd rounds run backwards to even out a falling list.

    Behind the CTA's last round any item comes.
    """
    index = turn * cta.schedule.ctas + _place(turn, cta.schedule.ctas)
    heads, columns = I32(cta.problem.kv_heads), I32(cta.schedule.columns)
    part, index = lax.rem(index, columns), lax.div(index, columns)
    if cta.schedule.order == "heads":
        count = tiles_gmem[0, work.COUNT]
        head, tile = lax.div(index, count), lax.rem(index, count)
        # Every other head's tiles come shortest first, so that neighbours in the list are alike.
        tile = jnp.where(lax.rem(heads - head, I32(2)) == 0, count - 1 - tile, tile)
    else:
        head, tile = lax.rem(index, heads), lax.div(index, heads)
    tile = jnp.minimum(tile, tiles_gmem.shape[0] - 1)
    fields = [tiles_gmem[tile, field] for field in range(work.CONTEXT + 1)]
    split = I32(0) if cta.problem.kv_split is None else tiles_gmem[tile, work.SPLIT]
    return Item(tile, head, part, *fields, split)


def count_rounds(tiles_gmem, cta: Cta):
    """How many items this CTA has."""
    items = tiles_gmem[0, work.COUNT] * (cta.problem.kv_heads * cta.schedule.columns)
    ctas = I32(cta.schedule.ctas)
    full = lax.div(items, ctas)
    last = _place(full, cta.schedule.ctas) < lax.rem(items, ctas)
    return full + jnp.where(last, 1, 0).astype(I32)


def _place(turn, ctas: int):
    cta = lax.axis_index("cta")
    return jnp.where(lax.rem(turn, I32(2)) == 0, cta, ctas - 1 - cta)


def key_phase(step, cta: Cta):
    """Which of the barriers `k_loaded` tells of the keys of step `step`."""
    return lax.rem(step, I32(cta.schedule.key_phases))


def block_range(item: Item, problem: Problem):
    """First and one-past-last KV block, of the item's range, that any of its queries sees."""
    last = lax.div(item.position + item.end - 1, I32(problem.kv_block)) + 1
    first = I32(0)
    if problem.window is not None:
        first_key = jnp.maximum(item.position + item.begin - (problem.window - 1), 0)
        first = lax.div(first_key, I32(problem.kv_block))
    if problem.kv_split is not None:
        blocks = problem.kv_split // problem.kv_block
        begin = item.split * blocks
        first, last = jnp.maximum(first, begin), jnp.minimum(last, begin + blocks)
    return first, last
