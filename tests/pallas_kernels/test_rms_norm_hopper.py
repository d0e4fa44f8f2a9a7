"""The Hopper RMS norm in the interpreter on a CPU, and lowered for sm90 without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.rms_norm.kernel_hopper import (
    add_rms_norm_hopper,
    pieces_of,
    rms_norm_hopper,
)
from bi_jax.testing import assert_same_bits, operands

EPS = 1e-5
SIZES = (64, 576, 960, 1024, 4096)


def _arrays(rows, width, dtype="bfloat16"):
    x, residual = (operands.spread((rows, width), dtype, seed=s, powers=(-3, 3)) for s in (1, 2))
    scale = operands.spread((width,), dtype, seed=3, powers=(-1, 1))
    return jnp.asarray(x), jnp.asarray(residual), jnp.asarray(scale)


def _exact(total, scale):
    total = np.asarray(total, np.float64)
    mean = (total * total).mean(-1, keepdims=True)
    return total / np.sqrt(mean + EPS) * np.asarray(scale, np.float64)


@pytest.mark.parametrize("width", [64, 576, 1024])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_interpreted_kernel_against_float64(width, dtype):
    x, residual, scale = _arrays(3, width, dtype)
    normed, stream = add_rms_norm_hopper(x, residual, scale, eps=EPS, interpret=True)
    rounded = (x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(dtype)
    assert_same_bits(stream, rounded)
    exact = _exact(rounded, scale)
    step = 2.0**-8 if dtype == "bfloat16" else 2.0**-22
    assert np.abs(np.asarray(normed, np.float64) - exact).max() <= step * np.abs(exact).max()
    assert_same_bits(rms_norm_hopper(stream, scale, eps=EPS, interpret=True), normed)


def test_a_row_does_not_follow_its_batch_in_the_interpreter():
    x, residual, scale = _arrays(3, 576)
    whole = add_rms_norm_hopper(x, residual, scale, eps=EPS, interpret=True)
    poisoned = x.at[0].set(jnp.nan)
    beside = add_rms_norm_hopper(poisoned, residual, scale, eps=EPS, interpret=True)
    alone = add_rms_norm_hopper(x[2:], residual[2:], scale, eps=EPS, interpret=True)
    for a, b, c in zip(whole, beside, alone, strict=True):
        assert_same_bits(b[1:], a[1:])
        assert_same_bits(c[0], a[2])


@pytest.mark.parametrize("width", SIZES)
@pytest.mark.parametrize("rows", [1, 33])
def test_it_lowers_for_sm90(width, rows):
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((width,), jnp.bfloat16)

    def run(x, residual, scale):
        normed, stream = add_rms_norm_hopper(x, residual, scale, eps=EPS)
        return rms_norm_hopper(normed, scale, eps=EPS), stream

    text = jax.jit(run).trace(x, x, scale).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 2


def test_the_pieces_hold_every_column_once():
    for width in (256, 576, 960, 1024, 4096, 5120):
        own = [c for p in pieces_of(width) for c in range(p.start + p.foreign, p.start + p.size)]
        assert own == list(range(width))


def test_what_does_not_fit_is_refused_by_name():
    x = jnp.zeros((2, 100), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="multiple of 64 up to 16384, got 100"):
        rms_norm_hopper(x, x[0], eps=EPS)
