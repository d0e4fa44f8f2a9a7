"""QK-norm and rotation references: row-invariant and accurate."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.attention import write_pages
from bi_jax.pallas_kernels.primitive import REFERENCE
from bi_jax.pallas_kernels.ragged import RaggedBatch
from bi_jax.pallas_kernels.rope import rope, rope_into_pages
from bi_jax.testing import assert_batch_invariant, assert_same_bits, operands


def _fixture(tokens=33, kv_heads=2, group=3, width=64, dtype="float32"):
    shape = (tokens, kv_heads, group + 2, width)
    qkv = jnp.asarray(operands.spread(shape, dtype, seed=1, powers=(-3, 3)))
    angles = np.random.default_rng(2).uniform(0, 6.28, (tokens, width // 2))
    scale = jnp.asarray(operands.spread((width,), dtype, seed=3, powers=(-1, 1)))
    cos, sin = (jnp.asarray(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
    return qkv, cos, sin, scale


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("normed", [False, True])
def test_a_token_has_the_same_bits_in_every_batch(dtype, normed):
    qkv, cos, sin, scale = _fixture(dtype=dtype)

    def run(qkv, cos, sin, scale):
        scales = {"q_scale": scale, "k_scale": scale} if normed else {}
        return rope(qkv, cos, sin, backend=REFERENCE, **scales)

    assert_batch_invariant(
        jax.jit(run),
        (qkv, cos, sin, scale),
        batch_axis=(0, 0, 0, None),
        out_axis=(0, 0, 0),
        sizes=(1, 2, 8, 17),
        neighbours=("nan", "inf", "huge"),
        control=None,  # rotation adds two terms; the norm's order is tested with the norms
    )


def test_values_against_float64():
    qkv, cos, sin, scale = _fixture()
    q, k, v = rope(qkv, cos, sin, backend=REFERENCE, q_scale=scale, k_scale=scale, eps=1e-6)
    wide, wide_scale = (np.asarray(a, np.float64) for a in (qkv, scale))
    wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * wide_scale
    low, high = np.split(wide, 2, axis=-1)
    c, s = (np.asarray(a, np.float64)[:, None, None] for a in (cos, sin))
    turned = np.concatenate([low * c - high * s, high * c + low * s], -1)
    np.testing.assert_allclose(q, turned[:, :, :-2], rtol=0, atol=2e-6)
    np.testing.assert_allclose(k, turned[:, :, -2], rtol=0, atol=2e-6)
    assert_same_bits(v, qkv[:, :, -1])


def test_tables_that_are_not_float32_are_refused():
    qkv, cos, sin, _ = _fixture()
    with pytest.raises(ValueError, match="cos must be float32, got bfloat16"):
        rope(qkv, jnp.asarray(cos, jnp.bfloat16), sin, backend=REFERENCE)
    with pytest.raises(ValueError, match="q_scale and k_scale together"):
        rope(qkv, cos, sin, backend=REFERENCE, q_scale=jnp.ones(64, jnp.float32))


def _into_pages(qkv, cos, sin, scale, pages, batch):
    options = {"backend": REFERENCE, "q_scale": scale, "k_scale": scale}
    return rope_into_pages(qkv, cos, sin, pages, pages + 1, batch, **options)


def _apart(qkv, cos, sin, scale, pages, batch):
    options = {"backend": REFERENCE, "q_scale": scale, "k_scale": scale}
    q, k, v = rope(qkv, cos, sin, num_rows=batch.num_tokens, **options)
    return q, *write_pages(pages, pages + 1, k, v, batch)


def _paged(tokens=9, real=7):
    qkv, cos, sin, scale = _fixture(tokens=tokens)
    batch = RaggedBatch(
        positions=jnp.asarray([3, 4, 5, 0, 1, 8, 9, 0, 0], jnp.int32),
        request=jnp.asarray([0, 0, 0, 1, 1, 2, 2, 0, 0], jnp.int32),
        query_start=jnp.asarray([0, 3, 5, 7], jnp.int32),
        page_table=jnp.asarray([[4, 1, 0], [0, 0, 0], [5, 5, 3]], jnp.int32),
        num_tokens=jnp.asarray(real, jnp.int32),
    )
    return qkv, cos, sin, scale, jnp.zeros((6, 2, 4, 64), jnp.float32), batch


def test_storing_at_once_is_rotating_and_storing():
    *arrays, batch = _paged()
    arrays[0] = arrays[0].at[7:].set(jnp.nan)  # padding
    got = jax.jit(_into_pages)(*arrays, batch)
    for a, b in zip(got, jax.jit(_apart)(*arrays, batch), strict=True):
        assert_same_bits(a[:7], b[:7])
    assert not np.isnan(got[1]).any() and not np.isnan(got[2]).any()


@pytest.mark.slow
def test_storing_at_once_has_the_gradient_of_rotating_and_storing():
    *arrays, batch = _paged()
    cotangents = [
        jnp.asarray(operands.spread(out.shape, "float32", seed=7, powers=(-3, 3)))
        for out in jax.eval_shape(_apart, *arrays, batch)
    ]

    @functools.partial(jax.jit, static_argnums=0)
    def pulled(op, arrays):
        return jax.vjp(lambda *xs: op(*xs, batch), *arrays)[1](tuple(cotangents))

    for a, b in zip(pulled(_into_pages, arrays), pulled(_apart, arrays), strict=True):
        assert_same_bits(a, b)


def test_pages_that_do_not_fit_are_refused():
    qkv, cos, sin, _, pages, batch = _paged()
    with pytest.raises(ValueError, match="qkv and v_pages must have one dtype"):
        rope_into_pages(qkv, cos, sin, pages, pages.astype("bfloat16"), batch, backend=REFERENCE)
    with pytest.raises(ValueError, match=r"k_pages must have shape \[\?, 2, \?, 64\]"):
        rope_into_pages(qkv, cos, sin, pages[:, :1], pages, batch, backend=REFERENCE)
