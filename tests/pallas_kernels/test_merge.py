"""Sums of partial results: the stated order, one rounding, and the same bits for every schedule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.merge import MergeTopology, ordered_sum, tree_sum
from bi_jax.pallas_kernels.merge.kernel_hopper import merge_hopper
from bi_jax.pallas_kernels.merge.schedule import MergeSchedule, pick_schedule
from bi_jax.testing import assert_same_bits, bit_difference, operands

PARTS = operands.spread((8, 5, 77), seed=4)
ordered = functools.partial(ordered_sum, backend="reference")
tree = functools.partial(tree_sum, backend="reference")


def ascending(parts):
    return functools.reduce(lambda a, b: a + b, list(parts))


def balanced(parts):
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    return parts[0]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_the_order_is_the_stated_one(count, jit):
    parts = PARTS[:count]
    wrap = jax.jit if jit else (lambda fn: fn)
    assert_same_bits(wrap(ordered)(parts), ascending(parts))
    assert_same_bits(wrap(tree)(parts), balanced(parts))


def test_another_order_has_other_bits():
    assert bit_difference(ordered(PARTS[::-1].copy()), ordered(PARTS)) is not None
    assert bit_difference(tree(PARTS), ordered(PARTS)) is not None
    # Backwards a tree pairs the same terms, so it is shuffled.
    assert bit_difference(tree(PARTS[[0, 2, 4, 6, 1, 3, 5, 7]]), tree(PARTS)) is not None


def test_five_terms_in_order():
    assert_same_bits(ordered(PARTS[:5]), ascending(PARTS[:5]))
    with pytest.raises(ValueError, match="must be a power of two, got 5"):
        tree(PARTS[:5])


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_trees_of_trees_are_the_tree(ranks):
    lower = jnp.stack([tree(part) for part in np.split(PARTS, ranks)])
    for dtype in ("float32", "bfloat16", "float16"):
        assert_same_bits(tree(lower, out_dtype=dtype), tree(PARTS, out_dtype=dtype))
    early = jnp.stack([tree(part, out_dtype="bfloat16") for part in np.split(PARTS, ranks)])
    twice = tree(early.astype(jnp.float32), out_dtype="bfloat16")
    assert bit_difference(twice, tree(PARTS, out_dtype="bfloat16")) is not None


def test_it_is_rounded_once():
    exact = jnp.asarray(balanced(PARTS)).astype(jnp.bfloat16)
    assert_same_bits(jax.jit(functools.partial(tree, out_dtype="bfloat16"))(PARTS), exact)


def test_special_values():
    zeros = -np.zeros((4, 3), np.float32)
    assert_same_bits(ordered(zeros), zeros[0])
    assert_same_bits(tree(zeros), zeros[0])
    poisoned = PARTS.copy()
    poisoned[2, 0] = np.nan
    assert_same_bits(ordered(poisoned)[1:], ordered(PARTS)[1:])
    assert np.isnan(np.asarray(ordered(poisoned)[0])).all()


def test_the_gradient_is_the_cotangent_of_every_term():
    out, pull = jax.vjp(functools.partial(tree, out_dtype="bfloat16"), jnp.asarray(PARTS))
    cotangent = jnp.asarray(operands.spread(out.shape, "bfloat16", seed=1))
    (gradient,) = pull(cotangent)
    expected = np.broadcast_to(np.asarray(cotangent.astype(jnp.float32)), PARTS.shape)
    assert_same_bits(gradient, expected)


def test_misfits_are_refused():
    with pytest.raises(ValueError, match="parts must be float32, got bfloat16"):
        tree(jnp.zeros((2, 3), jnp.bfloat16))
    with pytest.raises(ValueError, match="out_dtype must be one of"):
        ordered(PARTS, out_dtype="int32")
    with pytest.raises(ValueError, match="at least one term"):
        ordered(np.zeros((0, 3), np.float32))


@pytest.mark.parametrize("order", ["ascending", "tree"])
@pytest.mark.parametrize("shape", [(1,), (5, 77), (3, 576)])
def test_the_interpreted_kernel_has_the_order(shape, order):
    parts = jnp.asarray(operands.spread((4, *shape), seed=2))
    topology = MergeTopology(order=order)
    expected = (ordered if order == "ascending" else tree)(parts, out_dtype="bfloat16")
    got = merge_hopper(parts, out_dtype="bfloat16", topology=topology, interpret=True)
    assert_same_bits(got, expected)


def test_schedules_change_no_bit_in_the_interpreter():
    parts = jnp.asarray(operands.spread((4, 3, 512), seed=3))
    topology = MergeTopology(order="tree")
    run = functools.partial(merge_hopper, out_dtype="float32", topology=topology, interpret=True)
    for vec, repeats in ((1, 1), (4, 1), (4, 2)):
        schedule = MergeSchedule(vec=vec, repeats=repeats)
        assert_same_bits(run(parts, schedule=schedule), tree(parts))


@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize("shape", [(1,), (3, 77), (2, 576), (64, 4096)])
def test_it_lowers_for_sm90(shape, count):
    parts = jax.ShapeDtypeStruct((count, *shape), jnp.float32)
    run = functools.partial(ordered_sum, out_dtype="bfloat16", backend="hopper")
    text = jax.jit(run).trace(parts).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 1


def test_schedules_keep_loads_aligned():
    for elements in (128, 129, 130, 640, 576 * 3, 4096 * 64, 4096 * 4096):
        for terms in (2, 4, 8):
            schedule = pick_schedule(terms=terms, elements=elements)
            assert elements % schedule.vec == 0 and elements >= schedule.tile
