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
    softmax_under_scores,
)
from .hopper_math import LOWEST, TILE
from .hopper_problem import I32, Cta, Item, Problem, block_range
from .hopper_quiet import empty_rows, first_maxima


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
    of the block after it.
    """
    problem = cta.problem
    lo, hi = block_range(item, problem)
    last, position = hi - 1, item.position + wg * problem.tokens

    def attend_block(block, carry, *, masked: bool):
        s, state = carry
        now = step + block - lo
        if masked:
            s = mask_scores(s, block, position, cta)
        if cta.schedule.overlap == "scores":
            p, (acc, m, total), s = softmax_under_scores(s, state, now, wg, cta)
            acc = accumulate(acc, p, now, wg, cta, zeros=zeros)
        else:
            p, (acc, m, total) = softmax_step(s, state, cta)
            acc, s = accumulate_and_score(acc, p, now, wg, cta)
        return s, (acc, m, total)

    masked_block = functools.partial(attend_block, masked=True)
    plain_block = functools.partial(attend_block, masked=False)
    plain_start, plain_end = plain_blocks(item, lo, hi, wg, problem)
    plgpu.barrier_wait(cta.memory.q_loaded.at[wg])
    zeros, (acc, m, total) = None, empty_state(cta)
    if cta.schedule.quiet:
        zeros, m = empty_rows(item, wg, cta), first_maxima(item, cta)
    carry = first_scores(step, wg, cta), (acc, m, total)
    if problem.window is not None:
        carry = lax.fori_loop(lo, plain_start, masked_block, carry)
    carry = lax.fori_loop(plain_start, plain_end, plain_block, carry)
    s, state = lax.fori_loop(plain_end, last, masked_block, carry)

    plgpu.barrier_arrive(cta.memory.q_consumed)
    p, (acc, m, total) = softmax_step(mask_scores(s, last, position, cta), state, cta)
    step_of_last, tail = step + last - lo, (item.context, last)
    acc = accumulate(acc, p, step_of_last, wg, cta, zeros=zeros, zero_tail_of=tail)
    return (acc, m, total), step + hi - lo


def empty_state(cta: Cta):
    """(acc, m, l) before any key."""
    acc = jnp.zeros(cta.accumulator, jnp.float32)
    m = jnp.full((cta.rows,), LOWEST, jnp.float32)
    return (
        plgpu.layout_cast(acc, TILE),
        plgpu.layout_cast(m, cta.row),
        plgpu.layout_cast(jnp.zeros_like(m), cta.row),
    )
