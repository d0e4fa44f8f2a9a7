"""The policy loss: right, and the same for every row whatever surrounds it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.policy_loss import policy_loss
from bi_jax.testing import assert_same_bits, bit_difference

B, T = 8, 21
SETTINGS = dict(clip_low=0.2, clip_high=0.3, kl_coef=0.1)


def _arrays(seed: int = 0) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    new = rng.uniform(-6, 0, (B, T)).astype(np.float32)
    old, ref = (new + rng.normal(0, 0.4, (B, T)).astype(np.float32) for _ in range(2))
    advantages = rng.standard_normal(B).astype(np.float32)
    mask = rng.uniform(size=(B, T)) < 0.7
    return tuple(map(jnp.asarray, (new, old, ref, advantages, mask)))


def _loss(new, old, ref, advantages, mask):
    size = jnp.float32(64)
    return policy_loss(new, old, advantages, mask, normaliser=size, reference=ref, **SETTINGS)


@jax.jit
def _both(new, *others):
    rows, pull, terms = jax.vjp(lambda n: ((t := _loss(n, *others)).loss, t), new, has_aux=True)
    return rows, pull(jnp.ones_like(rows))[0], terms.ratio, terms.kl


def _stock(new, old, ref, advantages, mask):
    ratio = jnp.exp(new - old)
    a = advantages[:, None]
    inner = jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.3) * a)
    kl = jnp.exp(ref - new) - (ref - new) - 1
    return jnp.sum(jnp.where(mask, 0.1 * kl - inner, 0.0), 1) / 64


def test_agrees_with_autodiff():
    arrays = _arrays()
    rows, slope, ratio, kl = _both(*arrays)
    expected = _stock(*arrays)
    np.testing.assert_allclose(rows, expected, rtol=2e-5, atol=1e-6)
    pulled = jax.grad(lambda n: jnp.sum(_stock(n, *arrays[1:])))(arrays[0])
    np.testing.assert_allclose(slope, pulled, rtol=2e-5, atol=1e-6)
    outside = ~arrays[4]
    assert (np.asarray(ratio)[outside] == 1).all() and not np.asarray(kl)[outside].any()


@pytest.mark.parametrize("size", [1, 2, 8])
def test_rows_do_not_see_the_micro_batch(size):
    arrays = _arrays()
    whole = _both(*arrays)
    for start in range(0, B, size):
        part = _both(*(a[start : start + size] for a in arrays))
        for got, expected in zip(part, whole, strict=True):
            assert_same_bits(got, expected[start : start + size])


def test_padding_may_hold_anything_and_stand_anywhere():
    new, old, ref, advantages, mask = _arrays()
    rows, slope, *_ = _both(new, old, ref, advantages, mask)
    dirty = [jnp.where(mask, a, jnp.nan) for a in (new, old, ref)]
    moved = [jnp.pad(a, ((0, 0), (5, 2)), constant_values=jnp.nan) for a in dirty]
    shifted = jnp.pad(mask, ((0, 0), (5, 2)))
    again, pushed, *_ = _both(*moved, advantages, shifted)
    assert_same_bits(again, rows)
    assert_same_bits(pushed[:, 5:-2], slope)


def test_on_policy_the_ratio_is_one_and_the_kl_zero():
    new, _, _, advantages, mask = _arrays()
    _, slope, ratio, kl = _both(new, new, new, advantages, mask)
    assert (np.asarray(ratio) == 1).all() and not np.asarray(kl).any()
    expected = jnp.where(mask, -advantages[:, None] / 64, 0.0)
    assert_same_bits(np.asarray(slope), np.asarray(expected))


def test_stock_sums_do_see_their_order():
    """The control: tokens in another order give other bits."""
    arrays = _arrays()
    order = np.random.default_rng(1).permutation(T)
    turned = [a[:, order] if a.ndim == 2 else a for a in arrays]
    assert bit_difference(_both(*turned)[0], _both(*arrays)[0]) is not None
