"""The comparison of bits, and what it says when they differ."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from bi_jax.testing import assert_same_bits, bit_difference, operands


def test_equal_arrays_pass_in_every_dtype():
    for dtype in ("float32", "float16", ml_dtypes.bfloat16, "float64", "int8", "uint32", "bool"):
        array = np.arange(12).reshape(3, 4).astype(dtype)
        assert_same_bits(array, array.copy())


def test_the_report_names_count_place_values_bits_and_distance():
    expected = np.linspace(1.0, 2.0, 24, dtype=np.float32).reshape(4, 6)
    actual = expected.copy()
    actual[1, 2] = np.nextafter(actual[1, 2], np.float32(9))
    actual[3, 5] = np.float32(2.0 + 2.0**-20)
    difference = bit_difference(actual, expected)
    assert difference is not None
    assert (difference.count, difference.total, difference.first) == (2, 24, (1, 2))
    assert difference.ulps == 1
    assert (difference.largest_ulps, difference.largest_at) == (4, (3, 5))
    with pytest.raises(AssertionError) as caught:
        assert_same_bits({"a": actual}, {"a": expected}, context="step 3")
    assert str(caught.value) == (
        "step 3: at ['a']: bits differ, float32[4, 6]: 2 of 24 elements differ (8.33 %); first at "
        "[1, 2]: actual 1.3478262 (0x3fac8592), expected 1.3478261 (0x3fac8591), 1 ULP apart; "
        "largest distance 4 ULP at [3, 5]"
    )


def test_signed_zeros_and_nan_payloads_are_different_bits():
    zero = bit_difference(np.float32([0.0]), np.float32([-0.0]))
    assert zero is not None and zero.ulps == 0 and zero.expected_bits == "0x80000000"
    nans = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert bit_difference(nans[:1], nans[:1]) is None
    payload = bit_difference(nans[:1], nans[1:])
    assert payload is not None and payload.ulps is None


def test_distance_counts_across_zero_and_in_half_precision():
    low, high = np.float16([-6e-8]), np.float16([6e-8])  # the smallest subnormals
    difference = bit_difference(low, high)
    assert difference is not None and difference.ulps == 2
    ones = np.array([1.0], ml_dtypes.bfloat16)
    next_one = np.array([1.0078125], ml_dtypes.bfloat16)
    difference = bit_difference(ones, next_one)
    assert difference is not None and difference.ulps == 1 and difference.actual_bits == "0x3f80"


def test_keys_integers_and_scalars_are_compared():
    assert_same_bits(jax.random.key(3), jax.random.key(3))
    with pytest.raises(AssertionError, match="1 of 2 elements"):
        assert_same_bits(jax.random.key(3), jax.random.key(4))
    difference = bit_difference(jnp.int32(5), jnp.int32(7))
    assert difference is not None and difference.first == () and difference.ulps is None


@pytest.mark.parametrize(
    "actual, expected, message",
    [
        (np.zeros(3, np.float32), np.zeros(3, np.float16), "dtypes differ"),
        (np.zeros(3, np.float32), np.zeros((3, 1), np.float32), "shapes differ"),
        ((np.zeros(3),), [np.zeros(3)], "structures differ"),
    ],
)
def test_what_cannot_be_compared_is_no_pass(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_same_bits(actual, expected)


def test_sharded_arrays_are_compared():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    host = operands.spread((4, 6))
    assert_same_bits(jax.device_put(host, place), host)


def test_spread_operands_are_hard_to_add():
    values = operands.spread((64, 256), seed=1)
    backwards = np.add.accumulate(values[:, ::-1], axis=1)[:, -1]
    assert (np.add.accumulate(values, axis=1)[:, -1] != backwards).mean() > 0.5
    powers = np.log2(np.abs(values))
    assert powers.min() < -15 and powers.max() > 15
    assert np.isfinite(operands.spread((64, 256), "float16").astype(np.float32)).all()


def test_poison_is_what_it_says():
    for kind in operands.NEIGHBOURS:
        values = operands.poison((2, 2), "float16", kind).astype(np.float64)
        assert not np.any((np.abs(values) > 1e-4) & (np.abs(values) < 1e4))
    assert np.signbit(operands.poison((1,), "float32", "-zero")).all()
    with pytest.raises(ValueError, match="kind='big'"):
        operands.poison((1,), "float32", "big")


def test_ties_and_lengths():
    logits = operands.tied_logits((4, 100))
    assert len(np.unique(logits)) == 7 and np.signbit(logits[logits == 0]).any()
    assert operands.lengths_around(1, 64) == (1, 2, 63, 64, 65)
