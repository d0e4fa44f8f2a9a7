"""Sums over eight virtual devices: the stated order at every message size, forwards and back."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from bi_jax import collectives
from bi_jax.audit_program import audit
from bi_jax.pallas_kernels.matmul import matmul
from bi_jax.testing import assert_same_bits, bit_difference, operands

KIB = 1 << 10
SLOW = pytest.mark.slow
OURS = {"backend": "reference"}


def over_ranks(fn, ranks):
    """A function of arrays [ranks, ...] whose row r is rank r's."""
    mesh = jax.make_mesh((ranks,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    body = jax.shard_map(
        lambda *xs: fn(*(x[0] for x in xs)),
        mesh=mesh, in_specs=P("tp"), out_specs=P(), check_vma=False,
    )  # fmt: skip
    return jax.jit(body)


def ordered(ranks, **options):
    fn = functools.partial(collectives.ordered_psum, axis_name="tp", backend="reference", **options)
    return over_ranks(fn, ranks)


def tree(ranks, **options):
    fn = functools.partial(collectives.tree_psum, axis_name="tp", backend="reference", **options)
    return over_ranks(fn, ranks)


def ascending(terms):
    return functools.reduce(np.add, list(terms))


def balanced(terms):
    terms = list(terms)
    while len(terms) > 1:
        terms = [terms[i] + terms[i + 1] for i in range(0, len(terms), 2)]
    return terms[0]


@functools.cache
def terms(count, *shape):
    return operands.spread((count, *shape), seed=count)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_terms_are_added_in_rank_order(ranks):
    x = terms(ranks, 5, 96)
    assert_same_bits(ordered(ranks)(x), ascending(x))
    rounded = jnp.asarray(ascending(x)).astype(jnp.bfloat16)
    assert_same_bits(ordered(ranks, out_dtype="bfloat16")(x), rounded)
    shuffled = np.roll(x, 1, axis=0)
    # Two terms have one sum whichever comes first.
    assert (bit_difference(ordered(ranks)(shuffled), ascending(x)) is not None) == (ranks > 2)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=SLOW), 4, 8])
def test_the_tree_does_not_follow_the_number_of_ranks(ranks):
    x = terms(8, 3, 80)
    parts = x.reshape(ranks, 8 // ranks, *x.shape[1:])
    for dtype in ("float32", "bfloat16"):
        expected = jnp.asarray(balanced(x)).astype(dtype)
        assert_same_bits(tree(ranks, out_dtype=dtype)(parts), expected)
        at_home = collectives.tree_psum(x, None, out_dtype=dtype, backend="reference")
        assert_same_bits(at_home, expected)
    assert bit_difference(ordered(8)(x), balanced(x)) is not None


@pytest.mark.parametrize(
    "rows, ranks", [pytest.param(1, 8, marks=SLOW), pytest.param(7, 4, marks=SLOW), (33, 8)]
)
def test_the_two_forms_have_one_result(rows, ranks):
    """Also where neither the rows nor the elements divide by the ranks."""
    x = terms(ranks, rows, 73)
    for make, expected in ((ordered, ascending(x)), (tree, balanced(x))):
        x_in = x[:, None] if make is tree else x
        assert_same_bits(make(ranks, one_shot_bytes=1 << 30)(x_in), expected)
        assert_same_bits(make(ranks, one_shot_bytes=0)(x_in), expected)


def test_a_row_does_not_follow_its_place_or_the_rows_beside_it():
    x = terms(8, 40, 64)
    whole = ordered(8, one_shot_bytes=0)(x)
    poisoned = x.copy()
    poisoned[:, 5] = np.nan
    moved = np.roll(poisoned, 3, axis=1)
    assert_same_bits(np.roll(ordered(8)(moved), -3, axis=0)[6:], whole[6:])
    assert_same_bits(ordered(8)(x[:, 17:18]), whole[17:18])


def check_message(kib, forms):
    """One message of random rows against the order, in both forms."""
    ranks, shape = 8, (kib, 256)
    x = np.broadcast_to(terms(ranks, 8, 256)[:, None], (ranks, -(-kib // 8), 8, 256))
    x = x.reshape(ranks, -1, 256)[:, :kib]
    assert x[0].nbytes == kib * KIB and x.shape[1:] == shape
    expected = ascending(x)
    for form in forms:
        assert_same_bits(ordered(ranks, **form)(x), expected, context=f"{kib} KiB")


@pytest.mark.parametrize("kib", [2, 256, 1025])
def test_message_sizes(kib):
    check_message(kib, [{}])


@pytest.mark.slow
@pytest.mark.parametrize("kib", [2, 100, 255, 257, 1024, 2048, 2049, 16384, 65536])
def test_message_sizes_to_64_mib(kib):
    check_message(kib, [{}, {"one_shot_bytes": 0}, {"one_shot_bytes": 1 << 40}])


def test_the_form_follows_the_documented_size():
    at, above = (terms(2, collectives.ONE_SHOT_BYTES // 1024 + more, 256) for more in (0, 1))
    text = str(jax.make_jaxpr(ordered(2))(at))
    assert "all_to_all" not in text and "all_gather" in text
    assert "all_to_all" in str(jax.make_jaxpr(ordered(2))(above))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_rank_has_the_value_and_all_get_its_bits(dtype):
    values = operands.spread((7, 9), dtype, seed=6)
    for place, kind in enumerate(("nan", "inf", "-zero", "zero", "subnormal")):
        values[place, 0] = operands.poison((), dtype, kind)
    values.view(np.uint8)[6, -1] = 0xFF  # a NaN with a payload, of either sign
    owner = np.arange(7) % 4
    x = np.stack([np.where((owner == r)[:, None], values, np.zeros((), dtype)) for r in range(4)])
    run = over_ranks(lambda a: collectives.exact_psum_of_one(a, "tp"), 4)
    assert_same_bits(run(x), values)
    assert audit(run, x).passed


def test_gathering_moves():
    x = np.asarray(terms(4, 3, 10), jnp.bfloat16)
    run = over_ranks(lambda a: collectives.gather_along(a, "tp", axis=-1), 4)
    assert_same_bits(run(x), np.concatenate(list(x), axis=-1))


def layer_pair(form):
    """A layer that is sharded by outputs, then one by inputs, and what jax.vjp makes of them."""

    def body(x, cotangent, into, out):
        def fn(x, into, out):
            hidden = matmul(collectives.enter(x, "tp", backend="reference"), into, **OURS)
            partial = matmul(hidden, out, out_dtype="float32", **OURS)
            return collectives.ordered_psum(
                partial, "tp", out_dtype="bfloat16", backend="reference", **form
            )

        total, pull = jax.vjp(fn, x, into, out)
        dx, d_into, d_out = pull(cotangent)
        return total, dx, d_into, d_out

    return body


def terms_of_pair(x, cotangent, into, out):
    """The same for one rank, with nothing moved: the terms of the two sums."""

    def fn(x):
        hidden = matmul(x, into, **OURS)
        return matmul(hidden, out, out_dtype="float32", **OURS)

    partial, pull = jax.vjp(fn, x)
    return partial, pull(cotangent.astype(jnp.float32))[0].astype(jnp.float32)


@pytest.mark.parametrize("form", [{}, pytest.param({"one_shot_bytes": 0}, marks=SLOW)])
def test_derivatives_add_nothing_of_their_own(form):
    ranks = 4
    x, g = (operands.spread((3, 64), "bfloat16", seed=s, powers=(-2, 2)) for s in (1, 2))
    x, g = (np.broadcast_to(a, (ranks, 3, 64)) for a in (x, g))
    into = operands.spread((ranks, 16, 64), "bfloat16", seed=3, powers=(-6, 6))
    out = operands.spread((ranks, 64, 16), "bfloat16", seed=4, powers=(-6, 6))
    run = over_ranks(layer_pair(form), ranks)
    total, dx, _, _ = run(x, g, into, out)
    each = [terms_of_pair(*(jnp.asarray(a[r]) for a in (x, g, into, out))) for r in range(ranks)]
    for got, parts in zip((total, dx), zip(*each, strict=True), strict=True):
        expected = jnp.asarray(ascending(map(np.asarray, parts)))
        assert_same_bits(got, expected.astype(jnp.bfloat16))
    assert audit(run, x, g, into, out).collectives["all-gather"] >= 2
    assert float_collectives(run.lower(x, g, into, out).compile().as_text()) == []


def float_collectives(text):
    pattern = r"= \(?(?:bf16|f16|f32)\[.* (all-reduce|reduce-scatter)(?:-start)?\("
    return re.findall(pattern, text)


def test_a_float_psum_would_be_seen():
    run = over_ranks(lambda x: lax.psum(x, "tp"), 4)
    text = run.lower(terms(4, 3, 64)).compile().as_text()
    assert float_collectives(text) == ["all-reduce"]


def test_they_lower_for_sm90():
    x = jax.ShapeDtypeStruct((4, 2, 33, 4096), jnp.float32)
    for limit in (0, 1 << 30):

        def fn(parts, limit=limit):
            options = dict(out_dtype="bfloat16", backend="hopper", one_shot_bytes=limit)
            total = collectives.tree_psum(parts, "tp", **options)
            return total, collectives.ordered_psum(parts[0], "tp", **options)

        lowered = over_ranks(fn, 4).trace(x).lower(lowering_platforms=("cuda",)).as_text()
        assert lowered.count("mosaic_gpu") >= 3 and "all_reduce" not in lowered


def test_misfits_are_refused():
    with pytest.raises(ValueError, match="parts must be float32"):
        ordered(2)(np.zeros((2, 3), jnp.bfloat16))
    with pytest.raises(ValueError, match="the ranks must be a power of two, got 3"):
        tree(3)(np.zeros((3, 2, 3), np.float32))
    with pytest.raises(ValueError, match="x must be float32, bfloat16 or float16, got int32"):
        over_ranks(lambda a: collectives.exact_psum_of_one(a, "tp"), 2)(np.zeros((2, 3), np.int32))
