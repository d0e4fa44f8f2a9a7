"""The loader warpgroup of the Hopper attention kernel: TMA copies of queries and pages."""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from . import hopper_work as work
from .hopper_problem import I32, Cta, Item, block_range, count_rounds, key_phase, read_item
from .schedule import HEADS


def load_items(refs, cta: Cta):
    """Loads each item's queries, then its keys and values block by block, as room comes free.

    refs = (q [T, Nkv, G, Dh], turned [T Nkv G, Dh], k and v pages [P, Nkv, Tp, Dh], tiles [N, 8],
    page table [B, Mp]), all in global memory.
    """
    q_gmem, k_gmem, v_gmem, tiles_gmem, pages_gmem = refs
    mem, stages = cta.memory, cta.schedule.stages
    decode = cta.schedule.consumers == 1
    keys_first = cta.schedule.overlap == "blocks"  # values are met a softmax later
    first = read_item(tiles_gmem, I32(0), cta)

    def load_item(turn, item, step):
        lo, hi = block_range(item, cta.problem)

        def load(step, pages, *, keys: bool):
            slot = lax.rem(step, I32(stages))
            consumed = (mem.k_consumed if keys else mem.v_consumed).at[slot]
            pl.when(step >= stages)(lambda: plgpu.barrier_wait(consumed))
            if keys:
                loaded = mem.k_loaded.at[key_phase(step, cta)]
                load_pages(k_gmem, pages, mem.k_smem.at[slot], loaded, None, item, cta)
                return
            columns = None
            if cta.schedule.columns > 1:
                start = pl.multiple_of(item.part * cta.columns, cta.columns)
                columns = pl.ds(start, cta.columns)
            target, loaded = mem.v_smem.at[slot], mem.v_loaded.at[slot]
            load_pages(v_gmem, pages, target, loaded, columns, item, cta)

        def load_block(block, carry):
            step, pages = carry
            # Read before waiting for the slot, for decode a block ahead.
            here = pages if decode else find_pages(pages_gmem, item, block, cta)
            pages = find_pages(pages_gmem, item, block + 1, cta) if decode else pages
            if keys_first:
                pl.when(block + 1 < hi)(lambda: load(step + 1, pages, keys=True))
            else:
                load(step, here, keys=True)
            load(step, here, keys=False)
            return step + 1, pages

        rest, carry = lo, (step, find_pages(pages_gmem, item, lo, cta) if decode else ())
        if keys_first:
            load(step, carry[1], keys=True)
        if decode:
            # A later item's first blocks come before its queries, whose room is taken until the
            # item before is nearly done, so that the memory never idles between items. One slot
            # is left: the queries must not wait for the last block of the item before.
            rest = jnp.where(turn > 0, jnp.minimum(lo + (stages - 1), hi), lo)
            carry = lax.fori_loop(lo, rest, load_block, carry)

        @pl.when(turn > 0)
        def _():
            plgpu.barrier_wait(mem.q_consumed)

        load_queries(q_gmem, item, cta)
        step, _ = lax.fori_loop(rest, hi, load_block, carry)
        return step

    def load_turn(turn, carry):
        item, step = carry
        if decode:
            following = read_item(tiles_gmem, turn + 1, cta)
            return following, load_item(turn, item, step)
        return item, load_item(turn, read_item(tiles_gmem, turn, cta), step)

    rounds = count_rounds(tiles_gmem, cta)
    if decode:
        # Zero, but no compiler knows: so the item's loads and the count's are under way together,
        # where they would be moved behind the question whether there is an item.
        rounds += jnp.minimum(first.end, 0)
    _, steps = lax.fori_loop(I32(0), rounds, load_turn, (first, I32(0)))

    @pl.loop(I32(0), jnp.minimum(steps, stages))
    def _drain(slot):  # every completed phase is seen before the barriers go
        plgpu.barrier_wait(mem.k_consumed.at[slot])
        plgpu.barrier_wait(mem.v_consumed.at[slot])

    @pl.when(rounds > 0)
    def _():
        plgpu.barrier_wait(mem.q_consumed)


def load_queries(q_gmem, item: Item, cta: Cta):
    """Each head's rows of each warpgroup; other requests' rows come along and are never stored."""
    if cta.schedule.turned:
        first, _ = cta.first_head(item.first, item.head)
        rows = q_gmem.at[pl.ds(pl.multiple_of(first, HEADS), HEADS)]
        plgpu.copy_gmem_to_smem(rows, cta.memory.q_smem.at[0], cta.memory.q_loaded.at[0])
        return
    tokens = cta.problem.tokens
    for wg in range(cta.schedule.consumers):
        first = pl.multiple_of(item.first + wg * tokens, work.ALIGN)
        for g in range(cta.problem.group):
            plgpu.copy_gmem_to_smem(
                q_gmem.at[pl.ds(first, tokens), item.head, g],
                cta.memory.q_smem.at[wg, pl.ds(g * tokens, tokens)],
                cta.memory.q_loaded.at[wg],
            )


def find_pages(pages_gmem, item: Item, block, cta: Cta):
    """(page, first row in it) of each copy of a KV block.

    Behind the context the last page stands in: entries of the page table that hold nothing are
    never followed.
    """
    problem, found = cta.problem, []
    for i in range(problem.copies_a_block):
        key = block * problem.kv_block + i * problem.rows_a_copy
        column = lax.div(jnp.minimum(key, item.context - 1), I32(problem.page_size))
        found.append((pages_gmem[item.request, column], lax.rem(key, I32(problem.page_size))))
    return found


def load_pages(source, pages, target, loaded, columns, item: Item, cta: Cta):
    """Copies one KV block's keys or values, all columns or a slice of them."""
    rows = cta.problem.rows_a_copy
    for i, (page, row) in enumerate(pages):
        place = source.at[page, item.head]
        if cta.problem.page_size > rows:
            place = place.at[pl.ds(pl.multiple_of(row, rows), rows)]
        if columns is not None:
            place = place.at[:, columns]
        plgpu.copy_gmem_to_smem(place, target.at[pl.ds(i * rows, rows)], loaded)
