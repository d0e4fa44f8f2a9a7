"""On a Hopper card the test kit finds what stock XLA does there, and our ops pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.matmul import matmul
from bi_jax.pallas_kernels.rms_norm import rms_norm
from bi_jax.testing import assert_batch_invariant, operands

pytestmark = pytest.mark.gpu

X = operands.spread((512, 4096), "bfloat16", powers=(-6, 6))
W = operands.spread((1024, 4096), "bfloat16", seed=1, powers=(-6, 6))


@jax.jit
def dot(x, w):
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


@jax.jit
def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def test_a_stock_dot_is_caught():
    with pytest.raises(AssertionError, match="not batch-invariant"):
        assert_batch_invariant(dot, (X, W), batch_axis=(0, None), sizes=(1, 8, 64), neighbours=())


def test_stock_norms_are_caught():
    """XLA picks a norm's tiles by timing, anew in each process: no one shape always differs."""
    caught = []
    for rows, hidden in ((64, 4096), (256, 1024), (512, 8192), (4096, 2048)):
        x = operands.spread((rows, hidden), powers=(-3, 3))
        try:
            assert_batch_invariant(norm, (x,), sizes=(1, 2, 8, 16, 64, 100), neighbours=())
        except AssertionError as error:
            assert "not batch-invariant" in str(error)
            caught.append((rows, hidden))
    print("caught:", caught)
    assert caught


def test_a_stock_log_softmax_is_caught():
    logits = operands.spread((256, 151936), powers=(-3, 3))
    fn = jax.jit(functools.partial(jax.nn.log_softmax, axis=-1))
    with pytest.raises(AssertionError, match="not batch-invariant"):
        assert_batch_invariant(fn, [logits], sizes=(100, 1, 16), neighbours=())


def test_cudnn_decode_is_caught():
    rng = np.random.default_rng(0)
    shapes = ((64, 1, 32, 128), (64, 4096, 8, 128), (64, 4096, 8, 128))
    q, k, v = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in shapes)
    fn = jax.jit(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"))
    with pytest.raises(AssertionError, match="not batch-invariant"):
        assert_batch_invariant(fn, [q, k, v], sizes=(1,), neighbours=(), control=None)


def test_our_ops_pass():
    product = jax.jit(functools.partial(matmul, backend="hopper", out_dtype="float32"))
    assert_batch_invariant(
        product, [X, W], batch_axis=(0, None), sizes=(1, 8, 17, 64, 257), neighbours=("nan",)
    )
    normed = jax.jit(functools.partial(rms_norm, eps=1e-6, backend="hopper"))
    rows = jnp.asarray(operands.spread((64, 4096), powers=(-3, 3)), jnp.bfloat16)
    scale = jnp.ones((4096,), jnp.bfloat16)
    assert_batch_invariant(
        normed, [rows, scale], batch_axis=(0, None), sizes=(1, 17), neighbours=("inf",),
        control=None,  # one rounding to bfloat16 may hide a change of order
    )  # fmt: skip
