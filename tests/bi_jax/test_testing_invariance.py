"""assert_batch_invariant finds what stock XLA does on a CPU, and its report is held true."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.log_softmax import target_logprobs
from bi_jax.pallas_kernels.matmul import matmul, segmented_matmul
from bi_jax.pallas_kernels.rms_norm import rms_norm
from bi_jax.testing import Inconclusive, assert_batch_invariant, operands, reordered
from bi_jax.testing.reorder import NothingToReorder

SIZES = (1, 3)
X = operands.spread((6, 160))
W = operands.spread((24, 160), seed=1)


@jax.jit
def row_sum(x):
    return jnp.sum(x, axis=-1)


@jax.jit
def our_matmul(x, w):
    return matmul(x, w, backend="reference")


@jax.jit
def one_row_apart(x):
    """What a library does that takes another path for one row."""
    order = -1 if x.shape[0] == 1 else 1
    return jax.lax.fori_loop(0, 160, lambda i, s: s + x[:, ::order][:, i], jnp.zeros(x.shape[0]))


def test_the_variance_of_stock_xla_is_found():
    """One row takes another path than two in a dot wide enough for a matrix-vector product."""
    x, w = operands.spread((4, 4096)), operands.spread((512, 4096), seed=1)
    dot = jax.jit(lambda x, w: x @ w.T)
    even = operands.spread((9, 1024), powers=(-3, 3))
    for fn, args, axes in ((dot, (x, w), (0, None)), (row_sum, (even,), 0)):
        with pytest.raises(AssertionError, match="not batch-invariant"):
            assert_batch_invariant(fn, args, batch_axis=axes, sizes=(1, 2, 3, 5))


def test_the_report_says_which_batch_and_row():
    with pytest.raises(AssertionError) as caught:
        assert_batch_invariant(one_row_apart, [X], sizes=(2, 1))
    assert re.fullmatch(
        r"not batch-invariant: result 0 \(float32\) changes with the batch\.\n"
        r"  batch: 1 rows from row 0 on, compared with the 6 rows given\n"
        r"  row: 0, which stands at place 0 of that batch\n"
        r"  1 of 1 elements differ \(100 %\); first at \[0\]: actual \S+ \(0x[0-9a-f]{8}\), "
        r"expected \S+ \(0x[0-9a-f]{8}\), \d+ ULP apart; largest distance \d+ ULP at \[0\]\n"
        r"  \(coordinates: rows compared first, then the result's other axes\)",
        str(caught.value),
    )


def test_our_ops_pass():
    assert_batch_invariant(our_matmul, [X, W], batch_axis=(0, None), sizes=SIZES)
    norm = jax.jit(lambda x, s: rms_norm(x, s, eps=1e-6, backend="reference"))
    x, scale = operands.spread((6, 1500), powers=(-3, 3)), operands.spread((1500,))
    assert_batch_invariant(norm, [x, scale], batch_axis=(0, None), sizes=SIZES)


@pytest.mark.parametrize(
    "leak, name",
    [
        (lambda x: x + x[:1], "rows from row"),
        (lambda x: x * jnp.arange(1.0, x.shape[0] + 1)[:, None], "rows from row"),
        (lambda x: x + 0 * jnp.sum(x, axis=0, keepdims=True), "among rows of"),
    ],
    ids=["first row", "place", "nan"],
)
def test_leaks_between_rows_are_found(leak, name):
    with pytest.raises(AssertionError, match=name):
        assert_batch_invariant(jax.jit(leak), [X], sizes=(6,))


def test_rows_on_another_axis_and_pytrees():
    tree = {"a": X.T.copy(), "b": np.arange(6, dtype=np.int32)[None]}
    fn = jax.jit(lambda t: (t["a"] * 2, t["b"] + 1))
    assert_batch_invariant(fn, [tree], batch_axis=1, out_axis=(1, 1), sizes=SIZES)


def test_on_a_mesh():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x = jax.device_put(X, place)
    assert_batch_invariant(jax.jit(lambda x: x * 2), [x], sizes=(2, 4))
    mix = jax.shard_map(lambda x: x + jax.lax.psum(x, "x"), mesh=mesh, in_specs=place.spec,
                        out_specs=place.spec)  # fmt: skip
    with pytest.raises(AssertionError, match="not batch-invariant"):
        assert_batch_invariant(jax.jit(mix), [x], sizes=(2, 4))


@pytest.mark.parametrize(
    "fn, args, message",
    [
        (our_matmul, (np.arange(6.0, dtype=np.float32)[:, None] * np.ones((1, 160), np.float32),
                      np.ones((24, 160), np.float32)), "another order"),
        (our_matmul, (np.ones((6, 160), np.float32), W), "all rows of the result are equal"),
        (our_matmul, (X * np.float32(np.nan), W), "finite"),
    ],
    ids=["exact", "equal rows", "nan"],
)  # fmt: skip
def test_tame_operands_are_inconclusive(fn, args, message):
    with pytest.raises(Inconclusive, match=message):
        assert_batch_invariant(fn, args, batch_axis=(0, None), sizes=(2,))


def test_one_batch_only_is_inconclusive():
    with pytest.raises(Inconclusive, match="only the given batch"):
        assert_batch_invariant(jnp.negative, [X[:1]], sizes=(), neighbours=())


def test_inconclusive_is_no_finding():
    assert not issubclass(Inconclusive, AssertionError)


def test_a_control_of_ones_own():
    assert_batch_invariant(jnp.negative, [X], sizes=(2,), control=lambda x: -x * 3)
    with pytest.raises(Inconclusive):
        assert_batch_invariant(jnp.negative, [X], sizes=(2,), control=jnp.negative)


def test_bad_calls_are_refused():
    with pytest.raises(ValueError, match="share one batch size"):
        assert_batch_invariant(jnp.add, [X, X[:2]])
    with pytest.raises(ValueError, match="out_axis"):
        assert_batch_invariant(lambda x: x.T, [X])
    with pytest.raises(ValueError, match="control="):
        assert_batch_invariant(jnp.negative, [X], sizes=(2,), control="backwards")
    with pytest.raises(ValueError, match="args must be a sequence of arguments, got a ndarray"):
        assert_batch_invariant(jnp.negative, X)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one row, got 0"):
        assert_batch_invariant(jnp.negative, [X[:0]])
    with pytest.raises(ValueError, match=r"argument 1 has shape \[\], and so no batch axis 0"):
        assert_batch_invariant(jnp.add, [X, np.float32(1)])


def test_random_keys_are_rows_too():
    def draw(x, keys):
        return x + jax.vmap(lambda key: jax.random.bits(key, dtype=jnp.uint16))(keys)[:, None]

    keys = jax.random.split(jax.random.key(0), len(X))
    ids = np.arange(len(X), dtype=np.uint16)[:, None]
    assert_batch_invariant(jax.jit(draw), [ids, keys], sizes=(1, 3), control=None)
    with pytest.raises(AssertionError, match="not batch-invariant"):
        one_key = jax.jit(lambda x, keys: draw(x, keys[::-1]))
        assert_batch_invariant(one_key, [ids, keys], sizes=(1, 3), control=None)


def test_numpy_arguments_stay_numpy():
    """A function of NumPy sees the dtype that it was given, wide ones too."""
    wide = np.asarray(X, np.float64)
    assert_batch_invariant(lambda x: x * 2, [wide], sizes=(1, 3), control=None)


def test_the_control_shuffles_a_vocabulary_with_its_targets():
    logits = operands.spread((32, 300), powers=(-3, 1))
    target = np.random.default_rng(0).integers(0, 300, (32, 2), np.int32)

    @jax.jit
    def score(logits, target):
        rows = logits.shape[0]
        ones, all_ids = jnp.ones(rows), jnp.full(rows, 300, jnp.int32)
        lowest = jnp.full(rows, -(2**31), jnp.int32)
        return target_logprobs(logits, target, ones, lowest, all_ids, backend="reference")[0]

    plain, other = score(logits, target), reordered(score)(logits, target)
    assert np.asarray(plain).tobytes() != np.asarray(other).tobytes()
    np.testing.assert_allclose(other, plain, rtol=1e-5, atol=1e-5)
    assert_batch_invariant(score, [logits, target], sizes=(2,), neighbours=("nan",))


def test_the_control_reorders_within_segments():
    x, w = operands.spread((3, 128), seed=1), operands.spread((8, 24, 16), seed=2)

    def product(x, w):
        return segmented_matmul(x, w, backend="reference")

    plain, other = product(x, w), reordered(product)(x, w)
    assert np.asarray(other).tobytes() != np.asarray(plain).tobytes()
    scale = np.abs(np.asarray(plain)).max()
    np.testing.assert_allclose(other / scale, plain / scale, atol=1e-5)


def test_the_control_reaches_into_loops_and_branches():
    def nested(x):
        def body(total, row):
            return jax.lax.cond(row[0] > 0, lambda: total + row.sum(), lambda: total), None

        return jax.lax.scan(jax.checkpoint(body), jnp.float32(0), x)[0]

    plain = jax.jit(nested)(X)
    assert np.asarray(reordered(nested)(X)).tobytes() != np.asarray(plain).tobytes()
    np.testing.assert_allclose(reordered(nested)(X), plain, rtol=1e-4)
    with pytest.raises(NothingToReorder):
        reordered(jnp.exp)(X)
