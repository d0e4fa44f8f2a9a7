"""The integers under token choice: threefry words, pairs of uint32 and keys of floats."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from bi_jax.pallas_kernels.float_order import NEG_INF, POS_INF, from_order_key, order_key
from bi_jax.pallas_kernels.sampling import fold_in, threefry2x32, wide
from bi_jax.testing import assert_same_bits


def _words(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, (count, 2), dtype=np.uint32)


def _word(words):
    zero = np.zeros(1, np.uint32)
    high, low = threefry2x32(words[:1], words[1:], zero, zero)
    return (int(high[0]) << 32) + int(low[0])


def test_threefry_is_that_of_jax():
    words = _words(6)
    data = np.array([0, 1, 2, 77, 2**31, 2**32 - 1], np.uint32)
    folded = np.stack(fold_in(words, data), axis=1)
    for word, number, result in zip(words, data, folded, strict=True):
        key = jax.random.wrap_key_data(jnp.asarray(word), impl="threefry2x32")
        assert_same_bits(jax.random.key_data(jax.random.fold_in(key, number)), result)
        with jax.enable_x64(True):
            assert int(jax.random.bits(key, (), "uint64")) == _word(word)
    assert_same_bits(np.stack(jax.jit(fold_in)(words, data), axis=1), folded)


def test_wide_integers_are_exact():
    rng = np.random.default_rng(0)
    edges = [0, 1, 2**16 - 1, 2**16, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
    numbers = edges + [
        int(x) >> int(s)
        for x, s in zip(rng.integers(0, 2**63, 60), rng.integers(0, 60, 60), strict=True)
    ]
    a, b = (list(x) for x in zip(*itertools.product(numbers, numbers), strict=True))

    def split(values):
        high = np.array([v >> 32 for v in values], np.uint32)
        return high, np.array([v & 0xFFFFFFFF for v in values], np.uint32)

    def joined(pair):
        high, low = (np.asarray(x).tolist() for x in pair)
        return [(h << 32) + x for h, x in zip(high, low, strict=True)]

    x, y = split(a), split(b)
    pairs = list(zip(a, b, strict=True))
    m = 2**64
    assert joined(jax.jit(wide.add)(x, y)) == [(p + q) % m for p, q in pairs]
    assert joined(jax.jit(wide.subtract)(x, y)) == [(p - q) % m for p, q in pairs]
    assert jax.jit(wide.less_equal)(x, y).tolist() == [p <= q for p, q in pairs]
    assert joined(jax.jit(wide.multiply_high)(x, y)) == [p * q >> 64 for p, q in pairs]
    fraction = split(b)[1]
    up = joined(jax.jit(wide.multiply_fraction_up)(x, fraction))
    assert up == [-(-p * (q % 2**32) // 2**32) for p, q in pairs]

    limbs = [p >> 1 for p in x[1].tolist()], [p >> 1 for p in fraction.tolist()]
    digits = jax.jit(wide.to_digits)(*(np.array(limb, np.uint32) for limb in limbs))
    whole = [(p << 20) + q for p, q in zip(*limbs, strict=True)]
    assert joined(jax.jit(wide.from_digits)(digits)) == whole
    sums = np.cumsum(digits[:, : 2**12], axis=1, dtype=np.uint32)
    assert joined(wide.from_digits(sums)) == list(itertools.accumulate(whole[: 2**12]))


def test_order_keys_follow_the_floats():
    values = [-np.inf, -3e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3e38, np.inf]
    keys = np.asarray(order_key(np.array(values, np.float32)))
    assert (np.diff(keys.astype(np.int64)) > 0).all()
    assert keys[0] == NEG_INF and keys[-1] == POS_INF
    assert_same_bits(from_order_key(keys), np.array(values, np.float32))
    odd = np.asarray(order_key(np.array([-0.0, np.nan, -np.float32(np.nan)], np.float32)))
    assert odd[0] == 0 and (odd[1:] > POS_INF).all()
