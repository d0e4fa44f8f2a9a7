"""Matrix products on a CPU: one order of additions at every row count, and its proof."""

import hashlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.matmul import MatmulTopology, matmul, reference_loops, swiglu_matmul
from bi_jax.pallas_kernels.matmul.cases import SMOLLM2_135M
from bi_jax.pallas_kernels.matmul.reference import matmul_reference
from bi_jax.pallas_kernels.matmul.reference_loops import CHUNK, WIDE_ROWS, prove_schedules
from bi_jax.pallas_kernels.primitive import REFERENCE
from bi_jax.testing import assert_batch_invariant, assert_same_bits, bit_difference, operands

SIZES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
LARGE = (255, 256, 257)
FEW = (1, 2, 3, 16, 17)
# (N, K) and row counts: K is no multiple of anything; three chunks of K; one column; columns that
# no group divides.
WEIGHTS = [((96, 577), SIZES), ((40, 2 * CHUNK + 77), FEW), ((1, 300), FEW), ((101, 64), FEW)]
DTYPES = ("float32", "bfloat16", "float16")


def _spread(*args, **options):
    return jnp.asarray(operands.spread(*args, **options))


def _product(rows, weight, dtype="float32"):
    width, depth = weight
    x = _spread((rows, depth), dtype, seed=1)
    # float16 sums have to stay finite.
    powers = (-8, 1) if dtype == "float16" else None
    return x, _spread((width, depth), dtype, seed=2, powers=powers)


def _matmul(x, w, *bias, **options):
    return matmul(x, w, *bias, backend=REFERENCE, **options)


def _swiglu(x, gate_up, **options):
    return swiglu_matmul(x, gate_up, backend=REFERENCE, **options)


def _rows_from(fn, x, rows, first):
    """Row 0's result when it stands at place `first` among `rows` rows."""
    return np.asarray(fn(np.roll(x[:rows], first, axis=0)))[first]


@pytest.mark.parametrize(("weight", "sizes"), WEIGHTS, ids=str)
def test_rows_do_not_depend_on_their_batch(weight, sizes):
    x, w = _product(max(sizes), weight)
    assert_batch_invariant(lambda x: _matmul(x, w), (x,), sizes=sizes)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_half_precision_rows_do_not_depend_on_their_batch(dtype):
    x, w = _product(33, (96, 577), dtype)
    control = lambda x: _matmul(x[:, ::-1], w[:, ::-1], out_dtype="float32")  # noqa: E731
    same = lambda x: _matmul(x, w, out_dtype="float32")  # noqa: E731
    assert_batch_invariant(same, (x,), sizes=FEW, control=control)


@pytest.mark.parametrize("width", [96, 101])
def test_swiglu_rows_do_not_depend_on_their_batch(width):
    x = _spread((33, 577), seed=1, powers=(-6, 2))
    gate_up = _spread((2, width, 577), seed=2, powers=(-6, -2))
    sizes = (1, 2, 3, 5, 16, 33)
    assert_batch_invariant(lambda x: _swiglu(x, gate_up), (x,), sizes=sizes)


def test_large_batches():
    x, w = _product(max(LARGE), (96, 577))
    alone = jax.jit(_matmul)
    for rows in LARGE:
        together = np.asarray(alone(x[:rows], w))
        for row in (0, 15, 16, rows - 2, rows - 1):
            assert_same_bits(together[row : row + 1], alone(x[row : row + 1], w))


def test_every_place_of_a_block():
    x, w = _product(WIDE_ROWS + 3, (96, 577))
    x = np.asarray(x)
    fn = jax.jit(lambda x: _matmul(x, w))
    expected = np.asarray(fn(x[:1]))[0]
    for rows in (2, 4, WIDE_ROWS, WIDE_ROWS + 3):
        for place in range(rows):
            assert_same_bits(_rows_from(fn, x, rows, place), expected)


def test_the_compilers_dot_would_fail():
    x, w = _product(33, (96, 577))
    plain = lambda x: jnp.dot(x, w.T)  # noqa: E731
    with pytest.raises(AssertionError):
        assert_batch_invariant(plain, (x,), sizes=(1, 2, 8, 16, 33))


def test_the_librarys_dot_follows_the_row_count(proven):
    x, w = _product(4, (96, 577))
    wide = jax.jit(lambda x: jax.lax.optimization_barrier(jnp.dot(w, x.T)).T)
    padded = jnp.zeros((WIDE_ROWS, 577), x.dtype).at[:4].set(x[:4])
    assert bit_difference(wide(x[:4]), wide(padded)[:4]) is not None


@pytest.mark.parametrize("kind", operands.NEIGHBOURS)
def test_own_special_values_have_the_same_bits_alone_and_among_others(kind):
    x, w = _product(WIDE_ROWS, (96, 577))
    special = jnp.asarray(operands.poison((1, 20), "float32", kind))
    x = x.at[5:6, 40:60].set(special)
    together = np.asarray(jax.jit(_matmul)(x, w))
    assert_same_bits(jax.jit(_matmul)(x[5:6], w), together[5:6])
    assert_same_bits(jax.jit(_matmul)(x[5:7], w), together[5:7])


@pytest.mark.parametrize("scale", [2.0**-66, 2.0**-75])
def test_products_that_underflow(scale):
    x, w = _product(WIDE_ROWS, (96, 577))
    x, w = x * scale, w * scale
    together = np.asarray(jax.jit(_matmul)(x, w))
    for row in range(4):
        assert_same_bits(jax.jit(_matmul)(x[row : row + 1], w), together[row : row + 1])


def test_padding_rows_are_not_read():
    x, w = _product(40, (96, 577))
    fn = jax.jit(lambda x, n: _matmul(x, w, num_rows=n))
    expected = np.asarray(fn(x, jnp.int32(40)))
    for rows in (1, 2, 15, 16, 17, 33):
        poisoned = x.at[rows:].set(jnp.nan)
        assert_same_bits(fn(poisoned, jnp.int32(rows))[:rows], expected[:rows])


@pytest.mark.parametrize("rows", [1, 2, 5, 17])
def test_strided_and_transposed_operands(rows):
    x, w = _product(rows, (96, 577))
    expected = np.asarray(jax.jit(_matmul)(x, w))
    assert_same_bits(jax.jit(lambda x, w: _matmul(x, w.T))(x, w.T), expected)
    assert_same_bits(jax.jit(lambda x, w: _matmul(x.T, w))(x.T, w), expected)
    twice = jnp.repeat(w, 2, axis=1)
    assert_same_bits(jax.jit(lambda x, w: _matmul(x, w[:, ::2]))(x, twice), expected)


@pytest.mark.parametrize("rows", [1, 2, 16, 17])
def test_the_program_around_it_does_not_matter(rows):
    x, w = _product(rows, (96, 96))
    w = w * 2.0**-20
    first = jax.jit(_matmul)(x, w)
    alone = jax.jit(_matmul)(jax.jit(lambda y: y * 0.5 + 1.0)(first), w)

    def step(x, w):
        y = _matmul(x, w)
        other = _matmul(x, w + 1.0)  # shares an operand
        z = _matmul(y * 0.5 + 1.0, w)
        return z, jnp.tanh(z) * other + y

    assert_same_bits(jax.jit(step)(x, w)[0], alone)


def test_bias_and_rounding():
    x, w = _product(5, (96, 577))
    bias = _spread((96,), seed=3)
    acc = _matmul(x, w)
    assert_same_bits(_matmul(x, w, bias), acc + bias[None])
    assert_same_bits(
        _matmul(x, w, bias, out_dtype="bfloat16"), (acc + bias[None]).astype("bfloat16")
    )
    assert bit_difference(_matmul(x, w, bias), acc) is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 16])
def test_accuracy(rows, dtype):
    x, w = _product(rows, (96, 577), dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    terms = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w, np.float64)).T
    error = np.abs(np.asarray(_matmul(x, w, out_dtype="float32"), np.float64) - exact)
    assert (error <= 577 * 2.0**-24 * terms).all()
    assert error.max() > 0 or dtype != "float32"  # the operands are not trivially exact


@pytest.mark.parametrize("rows", [1, 16])
def test_swiglu_accuracy(rows):
    x = _spread((rows, 577), seed=1, powers=(-6, 0))
    gate_up = _spread((2, 64, 577), seed=2, powers=(-6, -3))
    gate, up = np.einsum("mk,pfk->pmf", np.asarray(x, np.float64), np.asarray(gate_up, np.float64))
    exact = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(np.asarray(_swiglu(x, gate_up)), exact, rtol=2e-4, atol=1e-6)


@pytest.fixture
def proven():
    """Skips where the library's dot adds in another order, so that there is one schedule only."""
    failures = prove_schedules(list(SMOLLM2_135M.values()))
    if failures:
        pytest.skip(f"this CPU has one schedule: {failures[0]}")


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_the_order_of_additions_is_the_stated_one(rows, proven):
    depth = CHUNK + 52
    x, w = _product(rows, (16, depth))
    actual = np.asarray(_matmul(x, w))
    assert_same_bits(actual, _one_ascending_accumulator(x, w, chunk=CHUNK))
    assert bit_difference(actual, _one_ascending_accumulator(x, w, chunk=depth)) is not None


def _one_ascending_accumulator(x, w, *, chunk):
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    total = None
    for start in range(0, x.shape[1], chunk):
        acc = np.zeros((x.shape[0], w.shape[0]), np.float32)
        for k in range(start, min(start + chunk, x.shape[1])):
            # The product of two float32 is exact in float64: this is a fused multiply-add.
            acc = (x[:, k : k + 1] * w[:, k][None] + acc.astype(np.float64)).astype(np.float32)
        total = acc if total is None else total + acc
    return total


def test_the_intended_loops_run(proven):
    def program(rows, dtype="float32", weight=(96, 577)):
        x, w = _product(rows, weight, dtype)
        return jax.jit(_matmul).lower(x, w).compile().as_text()

    for rows in (1, 2, 3, 4):
        assert " dot(" not in program(rows) and " reduce(" in program(rows)
    for rows in (5, 16, 17):
        assert " dot(" in program(rows) and " reduce(" not in program(rows)
    assert " dot(" in program(1, "bfloat16")
    assert " while(" not in program(1) + program(2) + program(16)


def test_what_is_proven(proven):
    assert prove_schedules([(960, 576)], "float16") == []
    assert "one schedule" in prove_schedules([(960, 576)], "bfloat16")[0]
    assert "at least" in prove_schedules([(1, 576)])[0]


@pytest.fixture
def fresh_proofs():
    reference_loops._failure.cache_clear()
    yield
    reference_loops._failure.cache_clear()


def test_a_wrong_loop_fails_its_proof_and_does_not_run(proven, monkeypatch, fresh_proofs):
    narrow = reference_loops.narrow_dot
    x, w = _product(WIDE_ROWS, (96, 577))
    expected = np.asarray(jax.jit(lambda x: _matmul(x, w))(x))
    backwards = lambda w, rows: narrow(w[:, ::-1], rows[:, ::-1])  # noqa: E731
    monkeypatch.setattr(reference_loops, "narrow_dot", backwards)
    [failure] = prove_schedules([(96, 577)])
    assert "differ between 1 and 16 rows" in failure
    assert_same_bits(jax.jit(lambda x: _matmul(x, w))(x[:1]), expected[:1])


def test_one_schedule_gives_the_same_bits():
    x, w = _product(WIDE_ROWS + 1, (96, 577))

    def fixed(x, w):
        options = {"out_dtype": "float32", "topology": MatmulTopology(), "one_schedule": True}
        return matmul_reference(x, w, jnp.zeros((0,)), jnp.int32(x.shape[0]), **options)[0]

    for rows in (1, 2, 4, 16, 17):
        assert_same_bits(jax.jit(fixed)(x[:rows], w), jax.jit(_matmul)(x[:rows], w))
    assert " dot(" in jax.jit(fixed).lower(x[:1], w).compile().as_text()


def _digest():
    text = hashlib.sha256()
    for rows in (1, 2, 16, 33):
        x, w = _product(rows, (96, 577))
        text.update(np.asarray(jax.jit(_matmul)(x, w)).tobytes())
        text.update(np.asarray(jax.jit(_swiglu)(x * 2.0**-20, w.reshape(2, 48, 577))).tobytes())
    return text.hexdigest()


def test_a_new_process_gives_the_same_bits(pytestconfig):
    code = "from tests.pallas_kernels.test_matmul import _digest; print(_digest())"
    command = [sys.executable, "-c", code]
    run = subprocess.run(
        command, cwd=pytestconfig.rootpath, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == _digest()
