"""RMS norm references: row-invariant, accurate, and in the stated order of additions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.lanes import sum_over_lanes
from bi_jax.pallas_kernels.primitive import REFERENCE
from bi_jax.pallas_kernels.rms_norm import add_rms_norm, rms_norm, topology_for
from bi_jax.testing import assert_batch_invariant, assert_same_bits, bit_difference, operands

EPS = 1e-5
SIZES = (1, 2, 8, 17)


def _spread(*args, **options):
    return jnp.asarray(operands.spread(*args, **options))


def _norm(x, scale):
    return rms_norm(x, scale, eps=EPS, backend=REFERENCE)


def _add_norm(x, residual, scale):
    return add_rms_norm(x, residual, scale, eps=EPS, backend=REFERENCE)


def _shuffle(width):
    """Columns in another order; a reversed or rotated row would be added in the same pairs."""
    order = np.random.default_rng(0).permutation(width)
    return order, np.argsort(order)


def _shuffled_norm(x, scale):
    order, back = _shuffle(x.shape[1])
    return _norm(x[:, order], scale[order])[:, back]


def _shuffled_add_norm(x, residual, scale):
    order, back = _shuffle(x.shape[1])
    normed, stream = _add_norm(x[:, order], residual[:, order], scale[order])
    return normed[:, back], stream[:, back]


def _exact(x, scale):
    x = np.asarray(x, np.float64)
    mean = (x * x).mean(-1, keepdims=True)
    return x / np.sqrt(mean + EPS) * np.asarray(scale, np.float64)


@pytest.mark.parametrize("width", [64, 576, 960, 4096])
def test_a_row_has_the_same_bits_in_every_batch(width):
    x = _spread((33, width), seed=width, powers=(-3, 3))
    scale = _spread((width,), seed=1, powers=(-2, 2))
    assert_batch_invariant(
        jax.jit(_norm),
        (x, scale),
        batch_axis=(0, None),
        sizes=SIZES,
        control=jax.jit(_shuffled_norm),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_fused_residual_add_is_batch_invariant(dtype):
    x, residual = (_spread((33, 576), dtype, seed=s, powers=(-4, 4)) for s in (2, 3))
    scale = jnp.ones((576,), x.dtype)
    assert_batch_invariant(
        jax.jit(_add_norm),
        (x, residual, scale),
        batch_axis=(0, 0, None),
        out_axis=(0, 0),
        sizes=SIZES,
        # Rounding to 16 bits hides the order; float32 shows it for all three.
        control=jax.jit(_shuffled_add_norm) if dtype == "float32" else None,
    )


def test_stock_xla_depends_on_the_number_of_rows():
    """The control: the same fixture through jnp changes, so the tests above could have failed."""
    x = _spread((65, 960), seed=960)

    def stock(rows):
        return rows * jax.lax.rsqrt(jnp.mean(rows * rows, -1, keepdims=True) + EPS)

    with pytest.raises(AssertionError, match="not batch-invariant"):
        assert_batch_invariant(jax.jit(stock), (x,), sizes=(1, 2, 3, 5), control=None)


@pytest.mark.parametrize("width", [64, 576, 4096])
def test_accuracy_against_float64(width):
    x = _spread((9, width), seed=4, powers=(-3, 3))
    scale = _spread((width,), seed=5, powers=(-2, 2))
    exact = _exact(x, scale)
    got = np.asarray(_norm(x, scale), np.float64)
    assert np.abs(got - exact).max() / np.abs(exact).max() < 4e-7


def test_the_stream_is_rounded_before_it_is_normed():
    x, residual = (_spread((7, 64), "bfloat16", seed=s, powers=(-3, 3)) for s in (6, 7))
    scale = jnp.ones((64,), x.dtype)
    normed, stream = _add_norm(x, residual, scale)
    rounded = (x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(x.dtype)
    assert_same_bits(stream, rounded)
    assert_same_bits(normed, _norm(rounded, scale))


@pytest.mark.parametrize("width", [3, 64, 576, 960, 4096])
def test_the_sum_follows_the_stated_order(width):
    lanes = topology_for(hidden_size=width).lanes
    row = np.asarray(_spread((width,), seed=8, powers=(-3, 3)))
    padded = np.zeros(-(-width // lanes) * lanes, np.float32)
    padded[:width] = row
    total = np.zeros(lanes, np.float32)
    for i, strip in enumerate(padded.reshape(-1, lanes)):
        total = strip if i == 0 else total + strip
    while len(total) > 1:
        total = total[: len(total) // 2] + total[len(total) // 2 :]
    assert_same_bits(jax.jit(lambda v: sum_over_lanes(v, lanes))(row), total[0])
    if width > 3:  # one other order may round to the same sum, several do not
        add = jax.jit(lambda v: sum_over_lanes(v, lanes))
        orders = [np.random.default_rng(seed).permutation(width) for seed in range(8)]
        assert any(bit_difference(add(row[order]), total[0]) is not None for order in orders)


def test_refusals_name_what_came():
    x = jnp.zeros((2, 8), jnp.float32)
    with pytest.raises(ValueError, match=r"scale must have shape \[8\], got \[7\]"):
        _norm(x, jnp.zeros((7,), jnp.float32))
    with pytest.raises(ValueError, match="one dtype, got float32 and bfloat16"):
        _norm(x, jnp.zeros((8,), jnp.bfloat16))
    with pytest.raises(NotImplementedError, match="got 'warp'"):
        rms_norm(x, jnp.zeros((8,), jnp.float32), eps=EPS, backend="warp")
