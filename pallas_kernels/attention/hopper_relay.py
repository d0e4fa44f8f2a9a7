"""Overlap "blocks": three warpgroups pass the KV blocks of an item along.

Two of them make scores and softmax, each of every other block; the running maximum goes to and fro
between them. The third adds p v to one accumulator, block after block. All go through the
same functions as a warpgroup that does everything, so that a row's numbers are the same.
"""

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .hopper_block import (
    add_to_total,
    block_maximum,
    exponentials,
    first_scores,
    interpreted_product,
    mask_scores,
    own_rows,
    row_operand,
    scale_rows,
    slot_of,
    start_scores,
    zero_values_behind,
)
from .hopper_item import empty_state, plain_blocks
from .hopper_math import LOWEST, store_plain, store_swizzled
from .hopper_problem import I32, Cta, Item, block_range, count_rounds, read_item
from .hopper_product import awaited
from .hopper_turned import add_turned_product, keep_weights

MULTIPLIER = 2  # the warpgroup behind the two of the softmax


def score_items(tiles_gmem, wg, cta: Cta):
    """Warpgroup 0 or 1: p of every other block, counted over all items of the CTA."""
    mem = cta.memory

    def score_item(turn, step):
        item = read_item(tiles_gmem, turn, cta)
        lo, hi = block_range(item, cta.problem)
        plain_start, plain_end = plain_blocks(item, lo, hi, I32(0), cta.problem)
        plgpu.barrier_wait(mem.q_loaded.at[0])

        def soften(s, block):
            """The softmax of the scores of an own block, as the product gave them."""
            plain = (block >= plain_start) & (block < plain_end)
            s = lax.cond(
                plain,
                lambda s: own_rows(s, cta, wg),
                lambda s: mask_scores(s, block, item.position, cta, wg),
                s,
            )
            hand_over(s, step + block - lo, block == lo, wg, cta)

        first = lo + lax.rem(step + wg, I32(2))  # the first own block
        score = score_ahead if cta.schedule.turned else score_in_turn
        score(soften, first, hi, step - lo, cta)
        plgpu.barrier_arrive(mem.q_consumed)
        return step + hi - lo

    steps = lax.fori_loop(I32(0), count_rounds(tiles_gmem, cta), score_item, I32(0))

    # Every completed phase is seen before the barriers go.
    @pl.when((steps > 0) & (lax.rem(steps, I32(2)) == wg))
    def _():
        plgpu.barrier_wait(mem.m_ready.at[wg])

    @pl.when(steps > wg)
    def _():
        plgpu.barrier_wait(mem.p_consumed.at[wg])


def score_in_turn(soften, first, hi, shift, cta: Cta):
    """Every other block from `first` on; `shift`: from a block to its number in the CTA."""

    def own_block(n, _):
        block = first + 2 * n
        soften(first_scores(block + shift, I32(0), cta), block)

    lax.fori_loop(I32(0), lax.div(hi - first + 1, I32(2)), own_block, None)


def score_ahead(soften, first, hi, shift, cta: Cta):
    """`score_in_turn` with the scores of the next own block under the softmax; they are few."""
    count = lax.div(hi - first + 1, I32(2))

    def own_block(n, s):
        block = first + 2 * n
        following = start_scores(block + 2 + shift, I32(0), cta)
        soften(s, block)
        following = awaited(following, interpret=cta.interpret)
        plgpu.barrier_arrive(cta.memory.k_consumed.at[slot_of(block + 2 + shift, cta)])
        return following

    @pl.when(count > 0)
    def _():
        s = first_scores(first + shift, I32(0), cta)
        s = lax.fori_loop(I32(0), count - 1, own_block, s)
        soften(s, first + 2 * (count - 1))


def hand_over(s, at, first, wg, cta: Cta):
    """The softmax of one block, number `at` of the CTA; `first`: of an item."""
    mem = cta.memory
    keep = functools.partial(store_plain, layout=cta.row, interpret=cta.interpret)
    top = block_maximum(s, cta)  # before the other warpgroup is waited for

    @pl.when(at > 0)
    def _():
        plgpu.barrier_wait(mem.m_ready.at[wg])

    lowest = plgpu.layout_cast(jnp.full((cta.rows,), LOWEST, jnp.float32), cta.row)
    before = plgpu.load(mem.m_smem.at[1 - wg], layout=cta.row)
    m = lax.cond(first, lambda: lowest, lambda: before)
    new_m = jnp.maximum(m, top)
    keep(mem.m_smem.at[wg], new_m)
    plgpu.barrier_arrive(mem.m_ready.at[1 - wg])
    p, alpha, row_sum = exponentials(s, m, new_m, cta)

    @pl.when(at > 1)
    def _():
        plgpu.barrier_wait(mem.p_consumed.at[wg])

    keep(mem.sum_smem.at[wg], row_sum)
    keep(mem.top_smem.at[wg], new_m)
    if cta.schedule.turned:
        keep_weights(p, alpha, wg, cta)
    else:
        p = row_operand(p, cta)
        store_swizzled(mem.p_smem.at[wg], p, line=cta.line, interpret=cta.interpret)
        keep(mem.alpha_smem.at[wg], alpha)
        plgpu.commit_smem()
    plgpu.barrier_arrive(mem.p_ready.at[wg])


def multiply_item(item: Item, step, wg, cta: Cta):
    """All KV blocks of one item; returns (acc, m, l) and the next step."""
    mem = cta.memory
    lo, hi = block_range(item, cta.problem)

    def add_block(block, state):
        acc, _, total = state
        at = step + block - lo
        slot, side = lax.rem(at, I32(cta.schedule.stages)), lax.rem(at, I32(2))
        plgpu.barrier_wait(mem.v_loaded.at[slot])
        zero_values_behind(item.context, block, slot, wg, cta)
        plgpu.barrier_wait(mem.p_ready.at[side])
        alpha, row_sum, m = (
            plgpu.load(ref.at[side], layout=cta.row)
            for ref in (mem.alpha_smem, mem.sum_smem, mem.top_smem)
        )
        acc, total = scale_rows(acc, alpha, cta, side), add_to_total(total, alpha, row_sum, cta)
        acc = add_product(acc, mem.p_smem.at[side], mem.v_smem.at[slot], cta)
        plgpu.barrier_arrive(mem.v_consumed.at[slot])
        plgpu.barrier_arrive(mem.p_consumed.at[side])
        return acc, m, total

    return lax.fori_loop(lo, hi, add_block, empty_state(cta)), step + hi - lo


def add_product(acc, p_ref, v_ref, cta: Cta):
    """acc + p v, both operands in shared memory; waited for."""
    if cta.schedule.turned:
        return add_turned_product(acc, p_ref, v_ref, cta)
    if cta.interpret:
        return acc + interpreted_product(p_ref, v_ref)

    def issue(acc_ref):
        plgpu.wgmma(acc_ref, p_ref, v_ref)

    return pl.run_state(issue)(plgpu.ACC.init(acc))
