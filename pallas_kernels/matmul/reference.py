"""The matrix product on a CPU: one dot of fixed shape, looped over blocks of rows.

The weights are the left operand, so that the few token rows are the narrow side: the CPU's dot
then streams the weights once a block without re-packing them. The dot's own order along K is the
library's; it is the same for every row because the library only ever sees this one shape.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ..fixed_rows import for_row_blocks
from .topology import MatmulTopology

ROWS = 4  # rows a block; part of the reference's bits


def matmul_reference(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array,
    num_rows: jax.Array,
    *,
    out_dtype: str,
    topology: MatmulTopology,
) -> tuple[jax.Array]:
    """x [M, K], w [N, K], bias [N] or [0] -> [M, N]; see `api.matmul`."""
    _require_one_segment(topology)

    def body(rows: jax.Array) -> tuple[jax.Array]:
        acc = _dot(w, rows)
        if bias.size:
            acc = acc + bias.astype(jnp.float32)[:, None]
        return (acc.astype(out_dtype).T,)

    return (for_row_blocks(body, x, rows=ROWS, num_rows=num_rows)[0],)


def swiglu_reference(
    x: jax.Array,
    gate_up: jax.Array,
    num_rows: jax.Array,
    *,
    out_dtype: str,
    topology: MatmulTopology,
) -> tuple[jax.Array]:
    """x [M, K], gate_up [2, F, K] -> [M, F]; see `api.swiglu_matmul`."""
    _require_one_segment(topology)
    width, depth = gate_up.shape[1:]
    w = gate_up.reshape(2 * width, depth)

    def body(rows: jax.Array) -> tuple[jax.Array]:
        acc = _dot(w, rows)
        gate, up = acc[:width], acc[width:]
        return ((gate / (1.0 + jnp.exp(-gate)) * up).astype(out_dtype).T,)

    return (for_row_blocks(body, x, rows=ROWS, num_rows=num_rows)[0],)


def _dot(w: jax.Array, rows: jax.Array) -> jax.Array:
    """w [N, K] . rows [ROWS, K] -> float32 [N, ROWS], kept apart from what follows it."""
    dims = (((1,), (1,)), ((), ()))
    return lax.optimization_barrier(
        lax.dot_general(w, rows, dims, preferred_element_type=jnp.float32)
    )


def _require_one_segment(topology: MatmulTopology) -> None:
    if topology.k_segments != 1:
        raise NotImplementedError(
            f"matmul: the reference runs k_segments=1, got k_segments={topology.k_segments}"
        )
