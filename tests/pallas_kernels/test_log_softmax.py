"""Log-probabilities: row-invariant, in the stated order, and close to float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.float_order import LOWEST, order_key
from bi_jax.pallas_kernels.log_softmax import LogSoftmaxTopology, target_logprobs, topology_for
from bi_jax.pallas_kernels.log_softmax.cases import SMALL_VOCABULARY, VOCABULARIES
from bi_jax.pallas_kernels.primitive import REFERENCE
from bi_jax.testing import assert_batch_invariant, assert_same_bits, bit_difference

V = SMALL_VOCABULARY
TARGETS = 3


def _score(logits, target, inverse, cut_key, cut_id, **options):
    return target_logprobs(logits, target, inverse, cut_key, cut_id, backend=REFERENCE, **options)


_jitted = jax.jit(_score)


def _everything(rows, vocab=V):
    return np.full(rows, LOWEST, np.int32), np.full(rows, vocab, np.int32)


def _fixture(rows, *, seed=0, vocab=V, inverse=None):
    """Logits spread as a model's and wider, targets, temperatures and a cut in every other row."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, vocab)) * rng.choice([0.5, 2.5, 12.0], (rows, 1)) + 7
    logits = logits.astype(np.float32)
    target = rng.integers(0, vocab, (rows, TARGETS)).astype(np.int32)
    target[:, 0] = logits.argmax(1)
    scales = rng.choice([1.0, 1 / 0.7, 2.0], rows) if inverse is None else np.full(rows, inverse)
    cut_key, cut_id = _everything(rows, vocab)
    for r in range(0, rows, 2):
        last = np.argsort(-logits[r], kind="stable")[min(20 + 30 * (r % 4), vocab - 1)]
        cut_key[r], cut_id[r] = order_key(logits[r, last : last + 1])[0], last
    return logits, target, scales.astype(np.float32), cut_key, cut_id


def _exact(logits, target, inverse, cut_key, cut_id):
    """In float64 -> (logprob, log_sum_exp)."""
    keys, ids = np.asarray(order_key(logits)), np.arange(logits.shape[1])
    cut_key, cut_id = cut_key[:, None], cut_id[:, None]
    kept = (keys > cut_key) | ((keys == cut_key) & (ids <= cut_id))
    scaled = logits.astype(np.float64) * inverse.astype(np.float64)[:, None]
    scaled[~kept] = -np.inf
    top = scaled.max(1, keepdims=True)
    lse = top + np.log(np.exp(scaled - top).sum(1, keepdims=True))
    return np.take_along_axis(scaled, target, 1) - lse, lse[:, 0]


SIZES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33)


@pytest.mark.parametrize(
    "sizes", [(1, 2, 9), pytest.param(SIZES, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_a_row_does_not_depend_on_the_batch(sizes):
    @jax.jit
    def other_order(logits, target, inverse, cut_key, cut_id):
        blocks = LogSoftmaxTopology(block=1024, lanes=128)
        return _score(logits, target, inverse, cut_key, cut_id, topology=blocks)

    assert_batch_invariant(_jitted, _fixture(33), sizes=sizes, control=other_order)


def test_jax_own_log_softmax_fails_the_same_check():
    """So the fixture can show a row that follows its batch."""
    logits = jnp.asarray(_fixture(33)[0])
    softmax = jax.jit(lambda x: jax.nn.log_softmax(x, axis=-1))
    whole = softmax(logits)
    differing = [n for n in SIZES if bit_difference(softmax(logits[:n]), whole[:n]) is not None]
    assert differing, "XLA's own reduction agreed at every size; choose another fixture"


def test_the_sum_is_in_the_stated_order():
    """NumPy float32 additions in the topology's order give the log-sum-exp, whatever exp is."""
    rng = np.random.default_rng(5)
    # Two values a block, so that every exp is exp(0) = 1 or one other number.
    logits = np.where(rng.random((1, V)) < 0.5, 0.0, -1.375).astype(np.float32)
    ones = np.ones(1, np.float32)
    two = np.full((1, V), -1e30, np.float32)
    two[0, :2] = 0.0, -1.375
    small = np.float32(np.expm1(np.float64(_jitted(two, _first(1), ones, *_everything(1))[1][0])))
    terms = np.where(logits[0] == 0, np.float32(1), small)
    _, lse = _jitted(logits, _first(1), ones, *_everything(1))

    def lanes_then_halves(terms):
        strips = np.pad(terms, (0, -len(terms) % 2048)).reshape(-1, 16, 128)
        total = strips[:, 0].copy()
        for i in range(1, 16):
            total += strips[:, i]
        while total.shape[1] > 1:
            half = total.shape[1] // 2
            total = total[:, :half] + total[:, half:]
        return total[:, 0]

    length = np.float32(0)
    for part in lanes_then_halves(terms):
        length = np.float32(length + part)
    assert abs(float(lse[0]) - np.log(np.float64(length))) <= np.spacing(np.float32(lse[0]))


def _first(rows):
    return np.zeros((rows, 1), np.int32)


@pytest.mark.parametrize("vocab", [V, VOCABULARIES["smollm2"]])
def test_close_to_float64(vocab):
    arguments = _fixture(8, seed=1, vocab=vocab)
    logprob, lse = _jitted(*arguments)
    exact, exact_lse = _exact(*arguments)
    inside = np.isfinite(exact)
    assert (np.isneginf(logprob) == ~inside).all()
    # A few roundings of numbers as large as the result and one of log(sum), at most 13.
    error = np.abs(np.asarray(logprob)[inside] - exact[inside])
    assert (error <= 4 * 2.0**-24 * (np.abs(exact[inside]) + 13)).all()
    assert (np.abs(np.asarray(lse) - exact_lse) <= 4 * 2.0**-24 * (np.abs(exact_lse) + 13)).all()


def test_near_zero_and_below_minus_fifty():
    logits = np.zeros((3, V), np.float32)
    logits[0, 5000] = 40.0  # nearly certain
    logits[1, 5000] = 40.0
    logits[1, 7] = -90.0
    logits[2, 5000], logits[2, 1:5000] = 0.0, -np.inf
    target = np.array([[5000], [7], [5000]], np.int32)
    arguments = (logits, target, np.ones(3, np.float32), *_everything(3))
    logprob = np.asarray(_jitted(*arguments)[0])
    exact = _exact(*arguments)[0]
    assert abs(logprob[0, 0] - exact[0, 0]) < 2.0**-23 and logprob[0, 0] <= 0
    assert exact[1, 0] < -129 and abs(logprob[1, 0] - exact[1, 0]) <= np.spacing(np.float32(130))
    assert abs(logprob[2, 0] - exact[2, 0]) < 1e-6


def test_a_certain_token_has_logprob_zero():
    """Columns at -inf and cut columns add exact zeros."""
    logits = np.full((2, V), -np.inf, np.float32)
    logits[0, 3000] = -17.0
    logits[1] = np.linspace(-1, 1, V, dtype=np.float32)
    cut_key, cut_id = _everything(2)
    cut_key[1], cut_id[1] = order_key(logits[1, -1:])[0], V - 1
    target = np.array([[3000, 0], [V - 1, V - 2]], np.int32)
    logprob, lse = _jitted(logits, target, np.ones(2, np.float32), cut_key, cut_id)
    assert_same_bits(np.asarray(logprob), np.array([[0, -np.inf], [0, -np.inf]], np.float32))
    assert_same_bits(np.asarray(lse), np.array([-17.0, 1.0], np.float32))


def test_ties_at_the_cut_keep_the_lowest_ids():
    logits = np.zeros((1, V), np.float32)
    logits[0, 10] = -0.0  # ties with 0.0
    cut_key, cut_id = np.zeros(1, np.int32), np.array([10], np.int32)
    target = np.array([[10, 11, 0]], np.int32)
    logprob, _ = _jitted(logits, target, np.ones(1, np.float32), cut_key, cut_id)
    assert list(np.isneginf(logprob)[0]) == [False, True, False]
    assert abs(float(logprob[0, 0]) + np.log(11)) < 1e-6


def test_an_extreme_temperature_stays_finite():
    logits, target, *_ = _fixture(4)
    for inverse in (np.finfo(np.float32).max, np.finfo(np.float32).tiny):
        arguments = (logits, target, np.full(4, inverse, np.float32), *_everything(4))
        logprob = np.asarray(_jitted(*arguments)[0])
        assert not np.isnan(logprob).any() and np.isfinite(logprob[:, 0]).all()


def test_a_row_that_is_no_distribution_is_nan_alone():
    logits, target, inverse, cut_key, cut_id = _fixture(7)
    clean, _ = _jitted(logits, target, inverse, cut_key, cut_id)
    broken = logits.copy()
    broken[0, 40] = np.nan  # a row with a cut
    broken[1, V - 1] = -np.float32(np.nan)
    broken[3, 9] = np.inf
    broken[4, :] = -np.inf
    logprob, _ = _jitted(broken, target, inverse, cut_key, cut_id)
    assert np.isnan(logprob[np.array([0, 1, 3, 4])]).all()
    good = np.array([2, 5, 6])
    assert_same_bits(np.asarray(logprob)[good], np.asarray(clean)[good])


def test_bits_do_not_depend_on_how_many_targets_are_asked():
    logits, target, inverse, cut_key, cut_id = _fixture(7)
    few, lse = _jitted(logits, target, inverse, cut_key, cut_id)
    many = np.concatenate([target] * 31, axis=1)
    more, same_lse = _jitted(logits, many, inverse, cut_key, cut_id)
    assert_same_bits(np.asarray(more), np.tile(np.asarray(few), (1, 31)))
    assert_same_bits(same_lse, lse)


def test_an_id_outside_the_vocabulary_is_nan():
    logits, target, inverse, *_ = _fixture(7)
    target[1, 0], target[2, 1], target[3, 2] = -1, V, 2**31 - 1
    logprob, _ = _jitted(logits, target, inverse, *_everything(7))
    assert list(zip(*np.nonzero(np.isnan(logprob)), strict=True)) == [(1, 0), (2, 1), (3, 2)]


def test_padding_rows_may_hold_anything():
    logits, target, inverse, cut_key, cut_id = _fixture(7)
    some = jax.jit(lambda n, *arrays: _score(*arrays, num_rows=n))
    whole, _ = some(jnp.int32(7), logits, target, inverse, cut_key, cut_id)
    for count in (1, 6):
        # New arrays: JAX may still read those that it was given before.
        poisoned = [a.copy() for a in (logits, target, inverse)]
        for array, poison in zip(poisoned, (np.nan, -5, np.nan), strict=True):
            array[count:] = poison
        part, _ = some(jnp.int32(count), *poisoned, cut_key, cut_id)
        assert_same_bits(part[:count], whole[:count])


def test_what_does_not_fit_is_refused():
    logits, target, inverse, cut_key, cut_id = (jnp.asarray(a) for a in _fixture(2, vocab=8))
    with pytest.raises(ValueError, match="logits must be float32, got bfloat16"):
        _score(logits.astype(jnp.bfloat16), target, inverse, cut_key, cut_id)
    with pytest.raises(ValueError, match=r"target must have shape \[2, \?\], got \[2\]"):
        _score(logits, target[:, 0], inverse, cut_key, cut_id)
    with pytest.raises(ValueError, match="cut_id must be int32, got float32"):
        _score(logits, target, inverse, cut_key, inverse)
    with pytest.raises(NotImplementedError, match="backend"):
        target_logprobs(logits, target, inverse, cut_key, cut_id, backend="nothing")
    with pytest.raises(NotImplementedError, match="vmap"):
        jax.vmap(lambda x: _score(x, target, inverse, cut_key, cut_id)[0])(logits[None])
    with pytest.raises(ValueError, match="block=100"):
        LogSoftmaxTopology(block=100, lanes=64)
    assert topology_for(vocab_size=7) == topology_for(vocab_size=200000)
