"""An independent matrix product in Triton, reached through jax_triton: our rule of the sum's order.

One float32 accumulator per output element, K ascending, rounded once. It shares no code with
the Mosaic GPU kernel, so equal float32 bits say that the order follows from the rule alone.
"""

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl


@triton.jit
def _kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows[:, None] * K + depth[None, :]
    w_ptrs = w_ptr + columns[None, :] * K + depth[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, K, BLOCK_K):
        x = tl.load(x_ptrs, mask=rows[:, None] < M, other=0.0)
        w = tl.load(w_ptrs, mask=columns[None, :] < N, other=0.0)
        acc = tl.dot(x, w, acc)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    places = out_ptr + rows[:, None] * N + columns[None, :]
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=inside)


def triton_matmul(
    x: jax.Array, w: jax.Array, *, out_dtype, block_m: int, block_n: int, block_k: int, warps: int
) -> jax.Array:
    """x [M, K], w [N, K] -> [M, N]; K a multiple of block_k."""
    (m, k), n = x.shape, w.shape[0]
    if k % block_k:
        raise ValueError(f"K={k} must be a multiple of block_k={block_k}")
    return jax_triton.triton_call(
        x,
        w,
        kernel=_kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.dtype(out_dtype)),
        grid=(-(-m // block_m), -(-n // block_n)),
        num_warps=warps,
        num_stages=3,
        M=m,
        N=n,
        K=k,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
    )
