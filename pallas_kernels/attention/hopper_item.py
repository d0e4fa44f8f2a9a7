"""The order in which a warpgroup goes through the KV blocks of one item."""

import functools

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .hopper_block import (
    accumulate,
    accumulate_and_score,
    first_scores,
    mask_scores,
    softmax_step,
    softmax_under_products,
    softmax_under_scores,
)
from .hopper_math import LOWEST, TILE
from .hopper_problem import I32, Cta, Item, Problem, block_range
from .schedule import WARPGROUP_ROWS


def plain_blocks(item: Item, lo, hi, wg, problem: Problem):
    """Range of blocks that every row of the warpgroup sees in full, so that they need no mask.

    The item's last block is never in it: it goes through the masked body, where the values' tail is
    zeroed and the queries are given back.
    """
    width, position = I32(problem.kv_block), item.position + wg * problem.tokens
    lowest = jnp.maximum(position, item.position + item.begin)
    end = jnp.clip(lax.div(lowest + 1, width), lo, hi - 1)
    if problem.window is None:
        return lo, end
    first_seen_by_all = jnp.maximum(position + problem.tokens - problem.window, 0)
    return jnp.clip(lax.div(first_seen_by_all + width - 1, width), lo, end), end


def attend_item(item: Item, step, wg, cta: Cta):
    """All KV blocks of one item for one warpgroup; returns (acc, m, l) and the next step.

    Every block but the last goes through a masked or an unmasked body, which also makes the scores
    of the block after it. With `overlap="products"` a body adds the block before to acc.
    """
    problem = cta.problem
    lo, hi = block_range(item, problem)
    last, position = hi - 1, item.position + wg * problem.tokens

    def slot_of(block):
        return lax.rem(step + block - lo, I32(cta.schedule.stages))

    def scores_of(s, block, *, masked: bool = True):
        return mask_scores(s, block, position, cta) if masked else s

    def attend_block(block, carry, *, masked: bool):
        s, state = carry
        slot, next_slot = slot_of(block), slot_of(block + 1)
        s = scores_of(s, block, masked=masked)
        if cta.schedule.overlap == "scores":
            p, (acc, m, total), s = softmax_under_scores(s, state, next_slot, wg, cta)
            acc = accumulate(acc, p, slot, wg, cta)
        else:
            p, (acc, m, total) = softmax_step(s, state, cta)
            acc, s = accumulate_and_score(acc, p, slot, next_slot, wg, cta)
        return s, (acc, m, total)

    def attend_block_late(block, carry, *, masked: bool):
        s, p, state = carry
        s = scores_of(s, block, masked=masked)
        slots = slot_of(block - 1), slot_of(block + 1)
        p, state, s = softmax_under_products(s, p, state, *slots, wg, cta)
        return s, p, state

    def first_block_late(_, carry):
        s, _, state = carry
        p, state, s = softmax_under_scores(scores_of(s, lo), state, slot_of(lo + 1), wg, cta)
        return s, p, state

    def add_block_before_last(_, carry):
        s, p, (acc, m, total) = carry
        return s, p, (accumulate(acc, p, slot_of(last - 1), wg, cta), m, total)

    def through_blocks(body, carry, first):
        """Blocks from `first` to the one before the last."""
        masked, plain = (functools.partial(body, masked=m) for m in (True, False))
        start, end = plain_blocks(item, lo, hi, wg, problem)
        if first is not lo:
            start = jnp.maximum(start, first)
            end = jnp.maximum(end, start)
        if problem.window is not None:
            carry = lax.fori_loop(first, start, masked, carry)
        carry = lax.fori_loop(start, end, plain, carry)
        return lax.fori_loop(end, last, masked, carry)

    plgpu.barrier_wait(cta.memory.q_loaded.at[wg])
    s, state = first_scores(slot_of(lo), wg, cta), empty_state(cta)
    if cta.schedule.overlap == "products":  # loops of one turn, or of none if there is one block
        p = plgpu.layout_cast(jnp.zeros((cta.rows, problem.kv_block), problem.dtype), cta.tile)
        carry = s, p, state
        carry = lax.fori_loop(lo, jnp.minimum(lo + 1, last), first_block_late, carry)
        carry = through_blocks(attend_block_late, carry, lo + 1)
        before = jnp.maximum(last - 1, lo)
        s, _, state = lax.fori_loop(before, last, add_block_before_last, carry)
    else:
        s, state = through_blocks(attend_block, (s, state), lo)
    plgpu.barrier_arrive(cta.memory.q_consumed)
    p, (acc, m, total) = softmax_step(scores_of(s, last), state, cta)
    acc = accumulate(acc, p, slot_of(last), wg, cta, zero_tail_of=(item.context, last))
    return (acc, m, total), step + hi - lo


def empty_state(cta: Cta):
    """(acc, m, l) before any key."""
    acc = jnp.zeros((WARPGROUP_ROWS, cta.columns), jnp.float32)
    m = jnp.full((cta.rows,), LOWEST, jnp.float32)
    return (
        plgpu.layout_cast(acc, TILE),
        plgpu.layout_cast(m, cta.row),
        plgpu.layout_cast(jnp.zeros_like(m), cta.row),
    )
