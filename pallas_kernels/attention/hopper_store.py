"""How the Hopper attention kernel writes a warpgroup's outputs."""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from . import hopper_work as work
from .hopper_math import store_plain
from .hopper_problem import Cta, Item
from .hopper_turned import store_turned


def store_rows(outs, item: Item, wg, o, lse, cta: Cta):
    """Writes o [rows, columns], or turned [columns, rows], and lse [rows] of one warpgroup.

    A whole tile leaves in one copy a head. A partial one leaves token by token, since its other
    rows belong to other requests. The log-sum-exp goes out tile by tile. Of split keys, each range
    has an o and a log-sum-exp of its own, both token by token.
    """
    o_gmem, lse_gmem = outs
    split = cta.problem.kv_split is not None
    if split:
        o_gmem = o_gmem.at[item.split]
    mem, tokens = cta.memory, cta.problem.tokens
    first, first_head = item.first + wg * tokens, 0
    if cta.schedule.turned:
        _, first_head = cta.first_head(first, item.head)
    else:
        first = pl.multiple_of(first, work.ALIGN)
    begin = jnp.clip(item.begin - wg * tokens, 0, tokens)
    end = jnp.clip(item.end - wg * tokens, 0, tokens)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the staging buffers are free again
    mem.lse_smem[wg] = lse

    def store_tile():
        staged = mem.o_tile_smem.at[wg]
        staged[...] = o
        plgpu.commit_smem()
        for g in range(cta.problem.group):
            rows = staged.at[pl.ds(g * tokens, tokens)]
            plgpu.copy_smem_to_gmem(rows, o_gmem.at[pl.ds(first, tokens), item.head, g])

    def store_tokens():
        staged = mem.o_smem.at[wg]
        if cta.schedule.turned:
            store_turned(staged, o, interpret=cta.interpret)
        else:
            store_plain(staged, o, layout=cta.tile, interpret=cta.interpret)
        plgpu.commit_smem()

        @pl.loop(begin, end)
        def _(t):
            for g in range(cta.problem.group):
                target = o_gmem.at[first + t, item.head, g]
                if cta.schedule.columns > 1 or split:  # longer lines
                    first_column = pl.multiple_of(item.part * cta.columns, cta.columns)
                    target = target.at[pl.ds(first_column, cta.columns)]
                row = first_head + cta.row_of(g, t)
                plgpu.copy_smem_to_gmem(staged.at[row], target)
                if split:
                    lse_gmem[item.split, first + t, item.head, g] = mem.lse_smem[wg, row]

    if cta.schedule.consumers > 1 and cta.problem.stores_tiles:
        whole = end - begin == tokens
        pl.when(whole)(store_tile)
        pl.when(jnp.logical_not(whole))(store_tokens)
    else:
        store_tokens()

    if not split:

        @pl.when(item.part == 0)
        def _():
            plgpu.copy_smem_to_gmem(mem.lse_smem.at[wg], lse_gmem.at[item.tile, item.head, wg])
