"""The matrix product on a CPU: blocks of rows, each by a loop whose bits do not follow its size.

The loops, their one order of additions and its proof are in `reference_loops`. Elsewhere than on
a CPU the proof says nothing, so there one shape serves every row count.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ..fixed_rows import for_row_blocks
from .reference_loops import block_rows, dot
from .topology import MatmulTopology

EPILOGUE_ROWS = 4  # rows at which SwiGLU's element-wise part runs; part of the reference's bits


def matmul_reference(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array,
    num_rows: jax.Array,
    *,
    out_dtype: str,
    topology: MatmulTopology,
    one_schedule: bool = False,
) -> tuple[jax.Array]:
    """x [M, K], w [N, K], bias [N] or [0] -> [M, N]; see `api.matmul`."""
    _require_one_segment(topology)

    def finish(acc: jax.Array, bias: jax.Array) -> jax.Array:
        # One addition and one rounding an element: nothing that a compiler could contract.
        return (acc + bias.astype(jnp.float32)[:, None] if bias.size else acc).astype(out_dtype)

    return (_by_blocks(x, w, bias, num_rows, finish=finish, one_schedule=one_schedule),)


def swiglu_reference(
    x: jax.Array,
    gate_up: jax.Array,
    num_rows: jax.Array,
    *,
    out_dtype: str,
    topology: MatmulTopology,
    one_schedule: bool = False,
) -> tuple[jax.Array]:
    """x [M, K], gate_up [2, F, K] -> [M, F]; see `api.swiglu_matmul`."""
    _require_one_segment(topology)
    width, depth = gate_up.shape[1:]
    w = gate_up.reshape(2 * width, depth)

    def finish(acc: jax.Array, _: jax.Array) -> jax.Array:
        # exp may differ between a vector body and a scalar tail: always the same shape.
        rows = acc.shape[1]
        acc = jnp.pad(acc, ((0, 0), (0, -rows % EPILOGUE_ROWS)))
        blocks = [acc[:, i : i + EPILOGUE_ROWS] for i in range(0, rows, EPILOGUE_ROWS)]
        return jnp.concatenate([silu_times(block) for block in blocks], axis=1)[:, :rows]

    def silu_times(acc: jax.Array) -> jax.Array:
        acc = lax.optimization_barrier(acc)
        gate, up = acc[:width], acc[width:]
        out = (gate / (1.0 + jnp.exp(-gate)) * up).astype(out_dtype)
        return lax.optimization_barrier(out)

    no_bias = jnp.zeros((0,), x.dtype)
    return (_by_blocks(x, w, no_bias, num_rows, finish=finish, one_schedule=one_schedule),)


def _by_blocks(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array,
    num_rows: jax.Array,
    *,
    finish: Callable[[jax.Array, jax.Array], jax.Array],
    one_schedule: bool,
) -> jax.Array:
    """finish(w . block^T, bias) [N, R] of every block of R rows, as [M, N]."""

    def with_blocks(one: bool) -> Callable[..., jax.Array]:
        def run(x: jax.Array, w: jax.Array, bias: jax.Array, num_rows: jax.Array) -> jax.Array:
            shape = (w.shape[0], w.shape[1])
            rows = block_rows(x.shape[0], shape, x.dtype.name, one_schedule=one)
            w = lax.optimization_barrier(w)

            def body(block: jax.Array) -> tuple[jax.Array]:
                return (finish(dot(w, block), bias).T,)

            if x.shape[0] <= rows:  # one block: no loop around it
                block = jnp.pad(x, ((0, rows - x.shape[0]), (0, 0)))
                return lax.optimization_barrier(body(block)[0])[: x.shape[0]]
            return for_row_blocks(body, x, rows=rows, num_rows=num_rows)[0]

        return run

    return lax.platform_dependent(
        x, w, bias, num_rows, cpu=with_blocks(one_schedule), default=with_blocks(True)
    )


def _require_one_segment(topology: MatmulTopology) -> None:
    if topology.k_segments != 1:
        raise NotImplementedError(
            f"matmul: the reference runs k_segments=1, got k_segments={topology.k_segments}"
        )
