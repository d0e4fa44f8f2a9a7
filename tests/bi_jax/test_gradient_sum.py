"""One tree of additions for every micro-batch size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.gradient_sum import accumulate, clip_by_global_norm, global_norm, sum_over
from bi_jax.pallas_kernels.gradients import sum_of_squares
from bi_jax.testing import assert_same_bits, bit_difference, operands

LEAVES = operands.spread((16, 40), seed=1, powers=(-6, 6))


def _in_micro_batches(sizes: list[int], leaves: np.ndarray = LEAVES) -> np.ndarray:
    total, start = None, 0
    for size in sizes:
        part = jnp.asarray(leaves[start : start + size])
        total = accumulate(total, {"w": sum_over(lambda x: x, part)}, sequences=size)
        start += size
    assert total is not None
    return np.asarray(total.result()["w"])


def _tree(leaves: np.ndarray) -> np.ndarray:
    nodes = list(leaves)
    while len(nodes) > 1:
        nodes = [nodes[i] + nodes[i + 1] for i in range(0, len(nodes), 2)]
    return nodes[0]


def test_the_sum_is_the_stated_tree():
    assert_same_bits(_in_micro_batches([1] * 16), _tree(LEAVES))
    one_after_the_other = np.zeros_like(LEAVES[0])
    for leaf in LEAVES:
        one_after_the_other = one_after_the_other + leaf
    assert bit_difference(one_after_the_other, _tree(LEAVES)) is not None


@pytest.mark.parametrize("sizes", [[2] * 8, [4] * 4, [16], [8, 4, 2, 1, 1], [4, 4, 2, 2, 4]])
def test_micro_batches_change_no_bit(sizes):
    assert_same_bits(_in_micro_batches(sizes), _tree(LEAVES))


def test_numbers_that_are_no_power_of_two():
    six = LEAVES[:6]
    expected = _tree(six[:4]) + _tree(six[4:])
    assert_same_bits(_in_micro_batches([1] * 6, six), expected)
    assert_same_bits(_in_micro_batches([4, 2], six), expected)
    assert_same_bits(sum_over(lambda x: x, jnp.asarray(six)), expected)
    # Rows of zeros, of either sign, fill a micro-batch up.
    padded = np.concatenate([six, np.zeros_like(six[:1]), -np.zeros_like(six[:1])])
    assert_same_bits(_in_micro_batches([4, 4], padded), expected)
    assert_same_bits(_in_micro_batches([4], -np.zeros_like(LEAVES[:4])), np.zeros(40, np.float32))


def test_leaves_are_added_in_a_wider_dtype():
    leaves = jnp.asarray(LEAVES[:12], jnp.bfloat16)
    wide = np.asarray(leaves.astype(jnp.float32))
    like = jax.ShapeDtypeStruct(leaves.shape[1:], jnp.float32)
    for count in (1, 2, 4, 8):
        assert_same_bits(sum_over(lambda x: x, leaves[:count], like=like), _tree(wide[:count]))
    expected = _tree(wide[:8]) + _tree(wide[8:])
    assert_same_bits(sum_over(lambda x: x, leaves, like=like), expected)


def test_a_sum_survives_a_jit():
    add = jax.jit(lambda total, g: accumulate(total, g, sequences=1))
    total = None
    for leaf in LEAVES[:4]:
        total = add(total, jnp.asarray(leaf))
    assert_same_bits(total.result(), _tree(LEAVES[:4]))


def test_misfits_are_refused():
    with pytest.raises(ValueError, match="sequences=3 must be a power of two"):
        accumulate(None, jnp.zeros(1), sequences=3)
    total = accumulate(None, jnp.zeros(1), sequences=1)
    with pytest.raises(ValueError, match="2 sequences must start at a multiple of 2, and 1 came"):
        accumulate(total, jnp.zeros(1), sequences=2)


def test_clipping():
    gradients = {"a": jnp.asarray(LEAVES), "b": jnp.asarray(LEAVES[0, :7], jnp.bfloat16)}
    exact = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in gradients.values()))
    norm = global_norm(gradients)
    assert abs(norm - exact) < 1e-6 * exact
    clipped, before = jax.jit(lambda g: clip_by_global_norm(g, 0.5))(gradients)
    assert_same_bits(before, norm)
    assert abs(global_norm(clipped) - 0.5) < 1e-3
    untouched, _ = clip_by_global_norm(gradients, 1e9)
    assert_same_bits(untouched["a"], gradients["a"])
    with pytest.raises(ValueError, match="max_norm=0 must be above 0"):
        clip_by_global_norm(gradients, 0)


def test_squares_are_added_lane_by_lane():
    """Lanes of 4096, ascending over 150 strips, then by halves."""
    values = operands.spread((150 * 4096 - 7,), seed=3, powers=(-6, 6))
    lanes = np.zeros(4096, np.float32)
    for strip in np.append(values, np.zeros(7, np.float32)).reshape(150, 4096):
        lanes = lanes + strip * strip
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    assert_same_bits(sum_of_squares(jnp.asarray(values)), lanes[0])
