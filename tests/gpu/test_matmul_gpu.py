"""The Hopper matmul's bits on the chip: every schedule, every row count, every row's place."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.matmul import kernel_hopper, segmented_matmul
from bi_jax.pallas_kernels.matmul.schedule import (
    FIXED,
    Schedule,
    schedule_for,
    schedules,
    with_room,
)
from bi_jax.pallas_kernels.merge import ordered_sum, tree_sum
from bi_jax.pallas_kernels.primitive import HOPPER

pytestmark = pytest.mark.gpu

N, K = 1024, 2048
ROWS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 2048)
SEGMENT_ROWS, SEGMENT_K = (1, 33, 65, 129, 264, 600, 8192), 4096
SWAPPED = Schedule(tile_m=16, tile_n=64, stages=8, swap=True)


def spread(seed: int, *shape: int, dtype=jnp.bfloat16) -> jax.Array:
    """Both signs over 2^-20..2^20 (2^-6..2^6 in float16): another order of additions shows."""
    rng = np.random.default_rng(seed)
    most = 6 if dtype == jnp.float16 else 20
    values = rng.standard_normal(shape) * np.exp2(rng.uniform(-most, most, shape))
    return jnp.asarray(values, dtype)


def product(x, w, schedule, out_dtype="float32") -> np.ndarray:
    """With the stages that results of this dtype leave room for, as the op does."""
    schedule = with_room(schedule, 2 if w.ndim == 3 else 1, out_dtype)
    if w.ndim == 3:
        y = kernel_hopper.swiglu_matmul_hopper(x, w, out_dtype=out_dtype, schedule=schedule)
    else:
        y = kernel_hopper.matmul_hopper(x, w, out_dtype=out_dtype, schedule=schedule)
    return np.asarray(y)


def side_by_side(work, items) -> list:
    """work(item) for each, because most of it is compilation."""
    with ThreadPoolExecutor(12) as pool:
        return list(pool.map(work, items))


def products(x, w, found) -> list[np.ndarray]:
    """One for each schedule."""
    return side_by_side(lambda schedule: product(x, w, schedule), found)


def places(row_counts) -> list[tuple[int, int]]:
    """(rows, first row): at the beginning and at the end of the largest batch."""
    most = max(row_counts)
    return sorted({(rows, start) for rows in row_counts for start in (0, most - rows)})


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("parts", [1, 2])
def test_every_schedule_gives_the_same_float32_bits(dtype, parts):
    x = spread(0, 200, K, dtype=dtype)
    w = spread(1, *((2,) if parts == 2 else ()), N, K, dtype=dtype)
    found = sorted((s for p, s in schedules() if p == parts), key=repr)
    found += [SWAPPED] if parts == 1 else []
    first, *others = products(x, w, found)
    for schedule, other in zip(found[1:], others, strict=True):
        assert other.tobytes() == first.tobytes(), schedule
    # Controls: the other direction along K, and K in two halves, are seen on this very fixture.
    assert product(x[:, ::-1], w[..., ::-1], found[0]).tobytes() != first.tobytes()
    if parts == 1:
        half = K // 2
        split = product(x[:, :half], w[:, :half], found[0])
        split = split + product(x[:, half:], w[:, half:], found[0])
        assert split.tobytes() != first.tobytes()


def test_a_row_has_the_same_bits_in_every_batch():
    x, w = spread(2, max(ROWS), K), spread(3, N, K)
    whole = product(x, w, schedule_for(max(ROWS), N, K))

    def check(place):
        rows, start = place
        part = product(x[start : start + rows], w, schedule_for(rows, N, K))
        assert part.tobytes() == whole[start : start + rows].tobytes(), place

    side_by_side(check, places(ROWS))


@pytest.mark.parametrize("segments", [2, 4, 8])
def test_segments_have_the_bits_of_separate_products_in_every_batch(segments):
    """Whatever rows and schedule: the float32 products added by one tree, rounded once."""
    x, w = spread(2, max(SEGMENT_ROWS), SEGMENT_K), spread(3, N, SEGMENT_K)
    pairs = zip(*(jnp.split(a, segments, axis=1) for a in (x, w)), strict=True)
    parts = jnp.stack([jnp.asarray(product(a, b, FIXED)) for a, b in pairs])
    stacked = jnp.stack(jnp.split(w, segments, axis=1))
    for out_dtype in ("float32", "bfloat16"):
        whole = np.asarray(tree_sum(parts, out_dtype=out_dtype, backend=HOPPER))

        def check(place, whole=whole, out_dtype=out_dtype):
            rows, start = place
            here = slice(start, start + rows)
            part = segmented_matmul(x[here], stacked, backend=HOPPER, out_dtype=out_dtype)
            assert np.asarray(part).tobytes() == whole[here].tobytes(), (place, out_dtype)

        side_by_side(check, places(SEGMENT_ROWS))
        # Controls: another order of the same sums, and one accumulator, are seen.
        other = np.asarray(ordered_sum(parts[::-1], out_dtype=out_dtype, backend=HOPPER))
        assert segments == 2 or other.tobytes() != whole.tobytes()
        assert product(x, w, FIXED, out_dtype).tobytes() != whole.tobytes()


def test_padding_rows_may_hold_anything():
    x, w = spread(4, 64, K), spread(5, N, K)
    clean = product(x, w, schedule_for(64, N, K))
    poison = jnp.asarray([np.nan, np.inf, -np.inf, 3e38], x.dtype)[:, None]
    poisoned = product(x.at[40:44].set(poison), w, schedule_for(64, N, K))
    keep = np.r_[0:40, 44:64]
    assert poisoned[keep].tobytes() == clean[keep].tobytes()
    assert poisoned[40:44].tobytes() != clean[40:44].tobytes()


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_error_is_no_larger_than_the_library_s(out_dtype):
    """At a size that cuBLAS computes with one accumulator, as we do."""
    rng = np.random.default_rng(6)
    x = jnp.asarray(rng.standard_normal((1024, 4096)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((4096, 4096)), jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T

    def library(x, w):
        dims = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x, w, dims, preferred_element_type=jnp.dtype(out_dtype))

    only_cublas = {"xla_gpu_enable_triton_gemm": False}
    peer = jax.jit(library).lower(x, w).compile(compiler_options=only_cublas)(x, w)
    ours = product(x, w, schedule_for(1024, 4096, 4096, out_dtype=out_dtype), out_dtype)
    error = np.linalg.norm(ours.astype(np.float64) - exact)
    assert error <= 1.5 * np.linalg.norm(np.asarray(peer, np.float64) - exact)
