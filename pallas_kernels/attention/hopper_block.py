"""One KV block of the Hopper attention kernel: the arithmetic that every query row goes through."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .hopper_math import (
    TILE,
    both_halves,
    first_half,
    fused_multiply_add,
    joined,
    rows_to_tile,
    sum_rows,
)
from .hopper_problem import I32, Cta, key_phase
from .hopper_product import IN_FLIGHT, awaited, start_product
from .hopper_turned import add_turned_product, factor_columns, keep_weights, keys_to_columns
from .schedule import WARPGROUP_ROWS


def await_turn(wg, cta: Cta):
    """Waits until the other warpgroup has started its products."""
    if cta.takes_turns:
        plgpu.barrier_wait(cta.memory.turn.at[wg])


def pass_turn(wg, cta: Cta):
    """Lets the other warpgroup start its products."""
    if cta.takes_turns:
        plgpu.barrier_arrive(cta.memory.turn.at[1 - wg])


def slot_of(step, cta: Cta):
    """Where in shared memory the block of a step lies; steps count over all items of the CTA."""
    return lax.rem(step, I32(cta.schedule.stages))


def start_scores(step, wg, cta: Cta):
    """Starts s = q k^T, [64, kv_block], for the block of a step; see `awaited`.

    Turned, s^T [kv_block, 8].
    """
    mem = cta.memory
    plgpu.barrier_wait(mem.k_loaded.at[key_phase(step, cta)])
    operands = mem.q_smem.at[wg], mem.k_smem.at[slot_of(step, cta)]
    if cta.schedule.turned:
        operands = operands[::-1]
    return start_product(*operands, interpret=cta.interpret)


def first_scores(step, wg, cta: Cta):
    """s = q k^T float32[64, kv_block], or turned, of an item's first block."""
    await_turn(wg, cta)
    s = start_scores(step, wg, cta)
    pass_turn(wg, cta)
    s = awaited(s, interpret=cta.interpret)
    plgpu.barrier_arrive(cta.memory.k_consumed.at[slot_of(step, cta)])
    return s


def own_rows(x, cta: Cta, side=0):
    """The rows of a [64, n] accumulator that the softmax is done for, turned back where they were.

    With half the rows, the registers of the others stay in use until here: where parts of an
    accumulator are dead from the product on, ptxas finds no registers for products in flight and
    lets each wait for the one before (its remark C7511), which costs more than the rows.
    """
    if x.shape[0] == cta.rows:
        return x
    if cta.schedule.turned:
        return keys_to_columns(x, side, cta)
    return first_half(lax.optimization_barrier(x), interpret=cta.interpret)


def scale_rows(acc, factor, cta: Cta, side=0):
    """acc [64, n] times float32[rows]; also the rows that hold no query, see `own_rows`.

    Turned, the factors are what `keep_weights` kept.
    """
    if cta.schedule.turned:
        return factor_columns(acc, cta.memory.alpha_smem.at[side])
    if cta.schedule.half_rows:
        factor = both_halves(factor, interpret=cta.interpret)
    return acc * rows_to_tile(factor, acc.shape[1])


def row_operand(p, cta: Cta, zeros=None):
    """p [rows, n] as the left operand [64, n] of a product.

    Rows that hold no query are `zeros` [rows, n], or without them copies: ptxas makes constants
    between the products, which then wait for one another.
    """
    if zeros is not None:
        return joined(p, zeros, interpret=cta.interpret)
    return both_halves(p, interpret=cta.interpret) if cta.schedule.half_rows else p


def mask_scores(s, block, position, cta: Cta, side=0):
    """-inf where a key lies behind its query or before the window; row 0 stands at `position`."""
    problem, s = cta.problem, own_rows(s, cta, side)
    row = plgpu.broadcasted_iota(I32, s.shape, 0, layout=cta.tile)
    column = plgpu.broadcasted_iota(I32, s.shape, 1, layout=cta.tile)
    query = position + (row & (cta.row_of(1, 0) - 1))
    key = block * problem.kv_block + column
    seen = key <= query
    if problem.window is not None:
        seen &= key > query - problem.window
    return jnp.where(seen, s, -jnp.inf)


def softmax_step(s, state, cta: Cta):
    """The online softmax of one block: (p in the value dtype, (rescaled acc, m, l)).

    Turned, p goes to shared memory.
    """
    acc, m, total = state
    s = own_rows(s, cta)
    new_m = jnp.maximum(m, block_maximum(s, cta))
    p, alpha, row_sum = exponentials(s, m, new_m, cta)
    if cta.schedule.turned:
        keep_weights(p, alpha, 0, cta)
        p = None
    acc, total = scale_rows(acc, alpha, cta), add_to_total(total, alpha, row_sum, cta)
    acc, total, new_m, p = lax.optimization_barrier((acc, total, new_m, p))
    return p, (acc, new_m, total)


def block_maximum(s, cta: Cta):
    """The largest scaled score float32[rows] of a block of scores s."""
    return s.max(axis=1) * cta.problem.log2_scale


def exponentials(s, m, new_m, cta: Cta):
    """(p in the value dtype, the factor of what was summed before, the sum of the block's e)."""
    problem = cta.problem
    alpha = jnp.exp2(m - new_m)
    least = rows_to_tile(-new_m, problem.kv_block, layout=cta.tile)
    exponents = fused_multiply_add(
        s, problem.log2_scale, least, layout=cta.tile, interpret=cta.interpret
    )
    e = jnp.exp2(exponents)
    row_sum = sum_rows(e, layout=cta.tile, interpret=cta.interpret)
    return e.astype(problem.dtype), alpha, row_sum


def add_to_total(total, alpha, row_sum, cta: Cta):
    """l float32[rows] after a block."""
    return fused_multiply_add(total, alpha, row_sum, layout=cta.row, interpret=cta.interpret)


def zero_values_behind(context, block, slot, wg, cta: Cta):
    """Zeroes the block's value rows behind the context, for both warpgroups."""
    valid, v_ref = context - block * cta.problem.kv_block, cta.memory.v_smem.at[slot]

    @pl.when(valid < cta.problem.kv_block)
    def _():
        pl.when(wg == 0)(lambda: zero_tail(v_ref, valid))
        if cta.schedule.consumers > 1 and not cta.takes_turns:  # warpgroup 1's turn comes later
            plgpu.barrier_arrive(cta.memory.tail_zeroed)
            plgpu.barrier_wait(cta.memory.tail_zeroed)


def zero_tail(v_ref, valid):
    """Zeroes the value rows from `valid` on: a page never written may hold NaN."""
    for start in range(0, v_ref.shape[0], WARPGROUP_ROWS):
        rows = v_ref.at[pl.ds(start, WARPGROUP_ROWS)]
        values = plgpu.load(rows, layout=TILE)
        row = plgpu.broadcasted_iota(I32, values.shape, 0, layout=TILE)
        rows[...] = jnp.where(row + start < valid, values, jnp.zeros_like(values))
    plgpu.commit_smem()


def accumulate(acc, p, step, wg, cta: Cta, *, zeros=None, zero_tail_of=None):
    """acc + p v, waited for; zero_tail_of = (context, block) for an item's last block."""
    mem, slot = cta.memory, slot_of(step, cta)
    p = None if cta.schedule.turned else row_operand(p, cta, zeros)
    plgpu.barrier_wait(mem.v_loaded.at[slot])
    await_turn(wg, cta)
    if zero_tail_of is not None:
        zero_values_behind(*zero_tail_of, slot, wg, cta)
    if cta.schedule.turned:
        p_ref = mem.p_smem.at[lax.rem(step, I32(cta.schedule.sides))]
        acc = add_turned_product(acc, p_ref, mem.v_smem.at[slot], cta)
    elif cta.problem.interpret:
        mem.p_smem[wg] = p
        acc = acc + interpreted_product(mem.p_smem.at[wg], mem.v_smem.at[slot])
        pass_turn(wg, cta)
    else:

        def issue(acc_ref):
            plgpu.wgmma(acc_ref, p, mem.v_smem.at[slot])
            pass_turn(wg, cta)

        acc = pl.run_state(issue)(plgpu.ACC.init(acc))
    plgpu.barrier_arrive(mem.v_consumed.at[slot])
    return acc


def accumulate_and_score(acc, p, step, wg, cta: Cta):
    """(acc + p v, the next block's scores), started together and waited for."""
    if cta.problem.interpret:
        return accumulate(acc, p, step, wg, cta), first_scores(step + 1, wg, cta)
    mem, slot, p = cta.memory, slot_of(step, cta), row_operand(p, cta)

    def issue(refs):
        acc_ref, s_ref = refs
        plgpu.wgmma(acc_ref, p, mem.v_smem.at[slot])
        s_ref[...] = start_scores(step + 1, wg, cta)
        pass_turn(wg, cta)

    plgpu.barrier_wait(mem.v_loaded.at[slot])
    await_turn(wg, cta)
    empty = jnp.zeros((WARPGROUP_ROWS, cta.problem.kv_block), jnp.float32)
    acc, s = pl.run_state(issue)((plgpu.ACC.init(acc), plgpu.layout_cast(empty, IN_FLIGHT)))
    s = awaited(s, interpret=None)
    plgpu.barrier_arrive(mem.v_consumed.at[slot])
    plgpu.barrier_arrive(mem.k_consumed.at[slot_of(step + 1, cta)])
    return acc, s


def softmax_under_scores(s, state, step, wg, cta: Cta):
    """softmax_step of the block's own rows, while the tensor cores make the next block's scores.

    Returns (p, state, next scores).
    """
    scores = start_scores(step + 1, wg, cta)
    p, new_state = softmax_step(s, state, cta)
    scores = awaited(scores, interpret=cta.interpret)
    plgpu.barrier_arrive(cta.memory.k_consumed.at[slot_of(step + 1, cta)])
    return p, new_state, scores


def interpreted_product(p_ref, v_ref) -> jax.Array:
    """p v; the interpret mode has neither run_state nor an operand in registers."""

    def product(acc_ref):
        plgpu.wgmma(acc_ref, p_ref, v_ref)
        return acc_ref[...]

    return pl.run_scoped(product, plgpu.ACC((p_ref.shape[0], v_ref.shape[1]), jnp.float32))
