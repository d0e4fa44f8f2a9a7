"""Which loop computes a row on a CPU, and the proof that all of them give the same bits.

The order of additions is the topology's: one float32 accumulator per output that walks K upwards
with fused multiply-adds, restarted at every multiple of CHUNK and added to the sum so far. Two
kinds of loop run it.

- `wide_dot`: one library dot of fixed shape, w [N, K] as the left operand and WIDE_ROWS rows of x.
  jaxlib's CPU dots are YNNPACK's. It looks at the right operand's shape only (K and the number of
  rows) and takes the kernel with the lowest estimated cost. With AVX2 that is, for float32:
      1 to 5, 9 and 10 rows   8 interleaved accumulators along K, one row of x at a time
      6 to 8 and 17 to 24     2 interleaved accumulators along K
      11 to 16 and 25 to 32   1 accumulator, 6 rows of w by 16 rows of x: the order above
  so a dot's bits do follow its row count, and only this one shape is ever used. Chunks are 128 KiB
  of the right operand: 2048 steps of K at 16 rows. It runs near the arithmetic peak, and costs the
  same for one row as for 16.
- `narrow_dot`: one or two rows. A variadic reduction walks K once for several groups of rows of w;
  it is a loop of scalar fused multiply-adds, fast enough to wait for memory alone. Nobody
  re-associates: XLA reduces in index order on a CPU and allows contraction, not reordering.

The two are equal where the library picks that kernel. On another CPU it may not. So nothing rests
on the table above: `prove_schedules` compares the loops on the machine that runs them, on operands
where another order shows, and a weight shape whose proof fails runs `wide_dot` at every row count.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WIDE_ROWS = 16
CHUNK = 2048  # steps of K
NARROW_GROUPS = {1: 8, 2: 6}  # rows of x to groups of rows of w: 8 and 12 accumulators in registers
NARROW_LIMIT = 4  # rows up to which narrow blocks of two cost less than one wide block
NARROW_DTYPES = ("float32", "float16")  # the library's bfloat16 dot adds in another order
MIN_WIDTH = 16  # a narrower weight is a vector to the compiler, which has other loops for it

SPREAD = 10  # powers of two by which the operands of the proof are scaled, up and down


def block_rows(
    total: int, shape: tuple[int, int], dtype: str, *, one_schedule: bool = False
) -> int:
    """Rows a block for a product of `total` rows with a weight [N, K]; cannot change a bit."""
    if one_schedule or total > NARROW_LIMIT or not _proven(shape, dtype):
        return WIDE_ROWS
    return min(total, 2)


def dot(w: jax.Array, rows: jax.Array) -> jax.Array:
    """w [N, K] . rows [R, K] -> float32 [N, R], R one of 1, 2 and WIDE_ROWS.

    Invariance: column r depends on w and rows[r] alone, and not on R where the proof holds.
    """
    w, rows = lax.optimization_barrier((w, rows))  # nothing before it may fuse into a loop
    return narrow_dot(w, rows) if rows.shape[0] in NARROW_GROUPS else wide_dot(w, rows)


def wide_dot(w: jax.Array, rows: jax.Array) -> jax.Array:
    """w [N, K] . rows [WIDE_ROWS, K] -> float32 [N, WIDE_ROWS]."""
    assert rows.shape[0] == WIDE_ROWS
    dims = (((1,), (1,)), ((), ()))
    return lax.optimization_barrier(
        lax.dot_general(w, rows, dims, preferred_element_type=jnp.float32)
    )


def narrow_dot(w: jax.Array, rows: jax.Array) -> jax.Array:
    """w [N, K] . rows [1 or 2, K] -> float32 [N, 1 or 2]."""
    count, depth = rows.shape
    starts, size = _groups(w.shape[0], NARROW_GROUPS[count])
    total = None
    for k in range(0, depth, CHUNK):
        parts = _chains(w, rows, starts, size, slice(k, min(k + CHUNK, depth)))
        total = parts if total is None else [t + p for t, p in zip(total, parts, strict=True)]
    assert total is not None
    total = lax.optimization_barrier(total)
    # Groups overlap where they do not divide N: of each only what the one before left is kept.
    fresh = [i * size - start for i, start in enumerate(starts)]
    columns = [
        jnp.concatenate([total[i * count + r][skip:] for i, skip in enumerate(fresh)])
        for r in range(count)
    ]
    return jnp.stack(columns, axis=1)


def _groups(width: int, groups: int) -> tuple[list[int], int]:
    """Starts and size of `groups` equal ranges that cover [0, width), the last ones overlapping."""
    size = -(-width // groups)
    used = -(-width // size)
    return [min(i * size, width - size) for i in range(used)], size


def _chains(
    w: jax.Array, rows: jax.Array, starts: Sequence[int], size: int, ks: slice
) -> list[jax.Array]:
    """One accumulator for every row of every group and row of x: [size] each, group-major."""
    columns = [row[ks].astype(jnp.float32)[None] for row in rows]
    products = [
        w[start : start + size, ks].astype(jnp.float32) * column
        for start in starts
        for column in columns
    ]
    zeros = [np.float32(0)] * len(products)
    sums = lax.reduce(
        products, zeros, lambda a, b: [s + t for s, t in zip(a, b, strict=True)], (1,)
    )
    return list(lax.optimization_barrier(sums))


def prove_schedules(shapes: Sequence[tuple[int, int]], dtype: str = "float32") -> list[str]:
    """Compares every loop with every other, byte by byte, on this machine's CPU.

    Args:
      shapes: (N, K) of weights; gate and up of a SwiGLU count as one of [2 F, K].
      dtype: of the operands.

    Returns:
      One sentence for each weight whose narrow products were not proven equal to the wide ones;
      they run wide at every row count, to the same bits and about three times slower at one row.
      Cost: about a third of a second a shape, once a process; a shape is also proven, unasked,
      when the first narrow product with it is compiled.
    """
    if dtype not in NARROW_DTYPES:
        return [f"matmul: {dtype} products have one schedule, {WIDE_ROWS} rows"]
    return [text for shape in shapes if (text := _failure(shape, dtype))]


def _proven(shape: tuple[int, int], dtype: str) -> bool:
    return dtype in NARROW_DTYPES and not _failure(shape, dtype)


@functools.cache
def _failure(shape: tuple[int, int], dtype: str) -> str:
    """Why narrow and wide products with a weight [N, K] may differ; empty where they do not."""
    width, depth = shape
    name = f"matmul: {dtype} products with a weight [{width}, {depth}]"
    if width < MIN_WIDTH:
        return f"{name} have one schedule, which needs at least {MIN_WIDTH} rows of the weight"
    if not _cpus():
        return f"{name} have one schedule, as this process has no CPU backend to prove others on"
    w, x = _proof_operands(_proof_width(width), depth, dtype)
    wide = _run(wide_dot, w, x)
    for count in NARROW_GROUPS:
        for first in range(0, WIDE_ROWS, count):
            narrow = _run(narrow_dot, w, x[first : first + count])
            if narrow.tobytes() != wide[:, first : first + count].tobytes():
                return f"{name} differ between {count} and {WIDE_ROWS} rows on this CPU"
    backwards = _run(narrow_dot, w[:, ::-1].copy(), x[:1, ::-1].copy())
    if depth >= 8 and np.mean(backwards == wide[:, :1]) > 0.9:
        return f"{name}: the operands of the proof would not show another order of additions"
    return ""


def _proof_width(width: int) -> int:
    """Rows of w for the proof: fewer, but cut up like all of them.

    The library splits N into ranges of 16 times a power of two, up to 256 here, and each range into
    blocks of 6 rows; 768 is a multiple of both.
    """
    return width if width <= 1536 else 768 + width % 768


def _proof_operands(width: int, depth: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """w [width, depth] and x [WIDE_ROWS, depth] over 2^-SPREAD to 2^SPREAD, both signs."""
    random = np.random.default_rng(width * 1_000_003 + depth)

    def spread(rows: int, largest: int) -> np.ndarray:
        mantissa = random.uniform(-1, 1, (rows, depth)).astype(np.float32)
        exponents = random.integers(-SPREAD, largest, (rows, depth), dtype=np.int32)
        return np.ldexp(mantissa, exponents).astype(dtype)

    return spread(width, 0 if dtype == "float16" else SPREAD), spread(WIDE_ROWS, 0)


def _cpus() -> list[Any]:
    try:
        return jax.local_devices(backend="cpu")
    except RuntimeError:  # JAX was told to use other platforms only
        return []


def _run(loop: Callable[..., jax.Array], *arrays: np.ndarray) -> np.ndarray:
    """Runs one loop on the CPU, also while another program is being traced."""
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    with jax.default_device(_cpus()[0]):
        return np.asarray(_compiled(loop, *structs)(*arrays))


@functools.lru_cache(maxsize=8)
def _compiled(loop: Callable[..., jax.Array], *structs: jax.ShapeDtypeStruct) -> Any:
    return jax.jit(loop).lower(*structs).compile()
