"""Token choice: equal to an oracle of Python integers, row-invariant, and fair."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.fixed_rows import for_row_blocks
from bi_jax.pallas_kernels.float_order import (
    LOWEST,
    from_order_key,
    is_kept,
    order_key,
)
from bi_jax.pallas_kernels.primitive import REFERENCE
from bi_jax.pallas_kernels.sampling import (
    choose_token,
    find_cut,
    fold_in,
    threefry2x32,
    top_tokens,
    topology_for,
)
from bi_jax.pallas_kernels.sampling.cases import SMALL_VOCABULARY, VOCABULARIES
from bi_jax.pallas_kernels.sampling.cut_reference import find_cut_reference
from bi_jax.pallas_kernels.sampling.weights import scaled_gap, weights
from bi_jax.pallas_kernels.vocab_blocks import as_blocks, token_ids
from bi_jax.testing import assert_batch_invariant, assert_same_bits

V = SMALL_VOCABULARY
ROWS = 48  # of most batches here, so that each function is compiled once
BLOCK = topology_for(vocab_size=V).block
OFF = {"top_k": 0, "top_p": 0, "log_min_p": -math.inf}


def _whole_batch(fn):
    """fn, jitted, on ROWS rows: those given and then rows of zeros."""
    jitted = jax.jit(fn)

    def call(*arrays):
        rows = len(arrays[0])
        padded = [np.pad(a, [(0, ROWS - rows)] + [(0, 0)] * (np.ndim(a) - 1)) for a in arrays]
        return tuple(np.asarray(out)[:rows] for out in jitted(*padded))

    return call


@_whole_batch
def _cut(logits, inverse, top_k, top_p, log_min_p):
    return find_cut(logits, inverse, top_k, top_p, log_min_p, backend=REFERENCE)


@_whole_batch
def _cut_by_bits(logits, inverse, top_k, top_p, log_min_p):
    """The same cut without the short list."""
    return find_cut_reference(
        *(logits, inverse, top_k, top_p, log_min_p, jnp.int32(logits.shape[0])),
        topology=topology_for(vocab_size=logits.shape[1]),
        short_list=0,
    )


@_whole_batch
def _choose(logits, words, inverse, cut_key, cut_id):
    return choose_token(logits, words, inverse, cut_key, cut_id, backend=REFERENCE)


def _step(logits, words, inverse, top_k, top_p, log_min_p, *, top=5):
    cut = find_cut(logits, inverse, top_k, top_p, log_min_p, backend=REFERENCE)
    token, bad = choose_token(logits, words, inverse, *cut, backend=REFERENCE)
    return token, bad, *cut, top_tokens(logits, top, backend=REFERENCE)


@_whole_batch
def _limbs(logits, inverse):
    """gap and the limbs of the weights, [R, V] each."""

    def body(row, scale):
        blocks = as_blocks(row[0], BLOCK)
        top = from_order_key(jnp.max(order_key(blocks)))
        gap = scaled_gap(blocks, top, scale[0])
        high, low = weights(gap, token_ids(blocks) < row.shape[1])
        return tuple(a.reshape(1, -1)[:, : row.shape[1]] for a in (gap, high, low))

    rows = jnp.int32(logits.shape[0])
    return for_row_blocks(body, logits, inverse, rows=1, num_rows=rows)


def _integers(high, low):
    return [(int(h) << 20) + int(x) for h, x in zip(high, low, strict=True)]


def _oracle(logits, weight, gap, word, inverse, top_k, top_p, log_min_p):
    """The token, the last kept one and the number kept, in Python integers."""
    # np.float32 compares exactly; sorted is stable, so the lowest id comes first on ties.
    order = sorted(range(len(logits)), key=lambda v: -logits[v])
    if inverse == 0:
        return order[0], None, len(order)
    kept = [v for v in order if gap[v] >= log_min_p]
    if 0 < top_k < len(order):
        kept = kept[:top_k]
    if top_p:
        total = sum(weight[v] for v in kept)
        sums = itertools.accumulate(weight[v] for v in kept)
        kept = kept[: next(i for i, s in enumerate(sums) if s * 2**32 >= top_p * total) + 1]
    threshold = word * sum(weight[v] for v in kept) >> 64
    for v in sorted(kept):
        threshold -= weight[v]
        if threshold < 0:
            return v, kept[-1], len(kept)
    raise AssertionError("the threshold is not below the total")


def _words(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, (count, 2), dtype=np.uint32)


def _word(words):
    zero = np.zeros(1, np.uint32)
    high, low = threefry2x32(words[:1], words[1:], zero, zero)
    return (int(high[0]) << 32) + int(low[0])


def _fixture(rows, *, seed=0, vocab=V):
    """Rows of many shapes (flat, peaked, full of ties, with -inf and both zeros) and parameters."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, vocab)).astype(np.float32)
    for r in range(rows):
        logits[r] *= (0.3, 2.5, 4.0, 8.0)[r % 4]
        if r % 3 == 0:
            logits[r] = np.round(logits[r] * 2) / 2  # ties, and zeros of both signs
        if r % 5 == 1:
            logits[r, rng.integers(0, vocab, vocab // 2)] = -np.inf
        if r % 7 == 2:
            logits[r, rng.integers(0, vocab, 9)] = logits[r].max()
    parameters = {
        "inverse": 1 / rng.choice([0.3, 0.5, 0.7, 1.0, 1.0, 1.3, 5.0], rows),
        "top_k": rng.choice([0, 0, 1, 2, 50, 255, 256, 257, 1000, vocab - 1, vocab], rows),
        "top_p": rng.choice([0, 0, 1, 2**31, *(0.95 * 2.0**32, 0.9 * 2.0**32), 2**32 - 1], rows),
        "log_min_p": np.log(rng.choice([1e-300, 1e-300, 1e-300, 0.01, 0.1, 1.0], rows)),
    }
    parameters["log_min_p"][parameters["log_min_p"] < -600] = -np.inf
    dtypes = {"top_k": np.int32, "top_p": np.uint32}
    parameters = {k: v.astype(dtypes.get(k, np.float32)) for k, v in parameters.items()}
    parameters["inverse"][rows // 2] = 0  # greedy
    return logits, parameters


def _rows(rows, **values):
    """One value for every row, as (inverse, top_k, top_p, log_min_p)."""
    values = {"inverse": 1.0, **OFF, **values}
    dtypes = {"top_k": np.int32, "top_p": np.uint32}
    return [np.full(rows, v, dtypes.get(k, np.float32)) for k, v in values.items()]


def test_weights_are_the_likelihoods_in_fixed_point():
    logits, parameters = _fixture(8)
    gap, high, low = _limbs(logits, parameters["inverse"])
    assert high.max() == 2**20 and low.max() < 2**20
    exact = np.exp(gap.astype(np.float64)) * 2.0**40
    weight = high.astype(np.float64) * 2.0**20 + low
    assert (np.abs(weight - exact) <= 1 + exact * 2.0**-21).all()
    assert (weight[gap == 0] == 2**40).all()


def test_tokens_and_cuts_are_those_of_an_oracle():
    logits, parameters = _fixture(ROWS)
    words = _words(ROWS)
    gap, high, low = _limbs(logits, parameters["inverse"])
    cut_key, cut_id = _cut(logits, *parameters.values())
    assert_same_bits(_cut_by_bits(logits, *parameters.values()), (cut_key, cut_id))
    token, bad = _choose(logits, words, parameters["inverse"], cut_key, cut_id)
    assert not bad.any()
    counts = set()
    for r in range(ROWS):
        weight = _integers(high[r], low[r])
        row = [p[r] for p in parameters.values()]
        expected, last, count = _oracle(
            logits[r],
            weight,
            gap[r],
            _word(words[r]),
            float(row[0]),
            int(row[1]),
            int(row[2]),
            row[3],
        )
        counts.add(count)
        assert token[r] == expected, f"row {r}"
        if count < V:
            assert cut_id[r] == last, f"row {r}"
            assert cut_key[r] == order_key(logits[r, last : last + 1])[0], f"row {r}"
        else:
            keys = np.asarray(order_key(logits[r]))
            assert is_kept(keys, np.arange(V), cut_key[r], cut_id[r]).all(), f"row {r}"
    assert len(counts) > 12 and max(c for c in counts if c < V) > 300  # the fixture has breadth


def test_rows_without_filters_are_drawn_as_if_there_were_none():
    """Their cut is the one that an engine without filters would pass."""
    logits, parameters = _fixture(ROWS)
    off = {name: np.full_like(p, OFF.get(name, 0)) for name, p in parameters.items()}
    off["inverse"] = parameters["inverse"]
    one_on = {name: p.copy() for name, p in off.items()}
    one_on["top_k"][3], one_on["top_p"][5] = 2, 2**31
    cut_key, cut_id = _cut(logits, *one_on.values())
    others = np.setdiff1d(np.arange(ROWS), (3, 5))
    assert (cut_key[others] == LOWEST).all() and (cut_id[others] == V).all()
    words = _words(ROWS)
    everything = np.full(ROWS, LOWEST, np.int32), np.full(ROWS, V, np.int32)
    expected = _choose(logits, words, off["inverse"], *everything)[0]
    token = _choose(logits, words, off["inverse"], cut_key, cut_id)[0]
    assert_same_bits(token[others], expected[others])
    # A search that keeps everything by its own work agrees too.
    whole = {**off, "top_k": np.full(ROWS, V - 1, np.int32)}
    searched = _cut_by_bits(logits, *whole.values())
    full = _choose(logits, words, off["inverse"], *searched)[0]
    assert_same_bits(full, expected)


def test_ties_at_the_edge_of_top_k_keep_the_lowest_ids():
    logits = np.full((2, V), -3.0, np.float32)
    logits[:, 700] = 5
    logits[:, [4, 900, 2100, 6000, 6249]] = 2
    for by in (_cut, _cut_by_bits):
        for k, last in ((1, 700), (2, 4), (3, 900), (5, 6000), (6, 6249), (7, 0), (8, 1)):
            key, cut = by(logits, *_rows(2, top_k=k))
            assert list(cut) == [last, last], k
            assert list(key) == [order_key(logits[0, last])] * 2


def test_top_p_at_the_boundary():
    """Eight equal logits: 2^29 of 2^32 is one of them exactly, one more needs the next."""
    logits = np.full((1, V), -200.0, np.float32)
    places = [3, 129, 130, 2047, 2048, 4000, 5000, 6249]
    logits[0, places] = 1.5
    for by in (_cut, _cut_by_bits):
        for count in range(1, 8):
            assert by(logits, *_rows(1, top_p=count << 29))[1] == places[count - 1]
            assert by(logits, *_rows(1, top_p=(count << 29) + 1))[1] == places[count]
            assert by(logits, *_rows(1, top_p=(count << 29) - 1))[1] == places[count - 1]
        assert by(logits, *_rows(1, top_p=1))[1] == places[0]
        # Of what top_k leaves: half of four.
        assert by(logits, *_rows(1, top_k=4, top_p=1 << 31))[1] == places[1]


def test_min_p_is_relative_to_the_largest():
    logits = np.full((1, V), -200.0, np.float32)
    logits[0, [10, 20, 30]] = 0.0, -1.0, -2.0
    for by in (_cut, _cut_by_bits):
        for log_min_p, last in ((0.0, 10), (-0.999, 10), (-1.0, 20), (-1.9, 20), (-2.0, 30)):
            assert by(logits, *_rows(1, log_min_p=log_min_p))[1] == last
        assert by(logits, *_rows(1, inverse=0.5, log_min_p=-1.0))[1] == 30


def test_greedy_takes_the_lowest_of_equal_ids():
    logits = np.full((4, V), -1.0, np.float32)
    logits[0, [77, 3000]] = 4.0
    logits[1, [5, 6]] = -0.0, 0.0
    logits[2, [5, 6]] = 0.0, -0.0
    logits[3, :] = -np.inf
    logits[3, [6000, 6249]] = np.finfo(np.float32).min
    arguments = (_words(4), np.zeros(4, np.float32), np.zeros(4, np.int32), np.zeros(4, np.int32))
    token, bad = _choose(logits, *arguments)
    assert list(token) == [77, 5, 5, 6000]
    assert not bad.any()


@pytest.mark.parametrize("inverse", [0.0, 1.0])
def test_a_row_that_is_no_distribution_is_flagged_alone(inverse):
    logits = np.random.default_rng(0).normal(size=(8, V)).astype(np.float32)
    good = _choose(logits, _words(8), np.full(8, inverse, np.float32), *_everything(8))[0]
    broken = logits.copy()
    broken[1, 40] = np.nan
    broken[2, V - 1] = -np.float32(np.nan)
    broken[4, 9] = np.inf
    broken[5, :] = -np.inf
    broken[6, 1:] = -np.inf
    token, bad = _choose(broken, _words(8), np.full(8, inverse, np.float32), *_everything(8))
    assert list(bad) == [False, True, True, False, True, True, False, False]
    assert list(token[[1, 2, 4, 5, 6]]) == [0, 0, 0, 0, 0]
    assert_same_bits(token[[0, 3, 7]], good[[0, 3, 7]])


def _everything(rows):
    return np.full(rows, LOWEST, np.int32), np.full(rows, V, np.int32)


def test_top_tokens_are_exact_with_the_lowest_id_first():
    logits, _ = _fixture(12)
    logits[0, :3] = 1e-42, 0.0, -1e-42  # subnormals are told apart
    logits[1, [8, 9, 7]] = 9e9, 9e9, -np.float32(0.0)
    got = np.asarray(jax.jit(lambda x: top_tokens(x, 300, backend=REFERENCE))(logits))
    few = np.asarray(jax.jit(lambda x: top_tokens(x, 3, backend=REFERENCE))(logits))
    assert_same_bits(few, got[:, :3])
    for r in range(12):
        assert list(got[r]) == sorted(range(V), key=lambda v: -logits[r, v])[:300], r
    tiny = np.full((1, V), -1.0, np.float32)
    tiny[0, [3, 5, 6, 9]] = 0.0, 1e-42, -0.0, -1e-42
    assert list(jax.jit(lambda x: top_tokens(x, 4, backend=REFERENCE))(tiny)[0]) == [5, 3, 6, 9]


SIZES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33)


@pytest.mark.parametrize(
    "sizes", [(1, 9), pytest.param(SIZES, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_a_row_does_not_depend_on_the_batch(sizes):
    logits, parameters = _fixture(33, seed=4)
    arguments = (logits, _words(33), *parameters.values())
    # Integers leave no order of additions to change, so the control draws with other keys.
    other = (logits, _words(33, seed=1), *parameters.values())
    step = jax.jit(_step)
    assert_batch_invariant(step, arguments, sizes=sizes, control=lambda *_: step(*other))


def test_rows_beyond_num_rows_are_left_alone():
    logits, parameters = _fixture(16)
    others = [jnp.asarray(a) for a in (_words(16), parameters["inverse"], *_everything(16))]
    some = jax.jit(lambda x, n: choose_token(x, *others, backend=REFERENCE, num_rows=n))
    all_tokens, _ = some(logits, jnp.int32(16))
    for count in (1, 3, 15):
        poisoned = logits.copy()
        poisoned[count:] = np.nan
        token, bad = some(poisoned, jnp.int32(count))
        assert_same_bits(token[:count], all_tokens[:count])
        assert not bad[:count].any()


def _chi_square(counts, probability):
    expected = probability * counts.sum()
    few = expected < 8
    counts = np.append(counts[~few], counts[few].sum())
    expected = np.append(expected[~few], expected[few].sum())
    if expected[-1] < 8:
        counts[-2] += counts[-1]
        expected[-2] += expected[-1]
        counts, expected = counts[:-1], expected[:-1]
    freedom = len(counts) - 1
    value = ((counts - expected) ** 2 / expected).sum()
    # Standard deviations from the mean, by the Wilson-Hilferty approximation.
    cube = 2 / (9 * freedom)
    return ((value / freedom) ** (1 / 3) - (1 - cube)) / math.sqrt(cube)


def _draws(row, inverse, draws, vocab):
    """Tokens of `draws` positions and seeds over one row of logits."""
    rows = 2048
    choose = jax.jit(lambda *a: choose_token(*a, backend=REFERENCE)[0])
    logits = np.broadcast_to(row, (rows, vocab))
    cut = np.full(rows, LOWEST, np.int32), np.full(rows, vocab, np.int32)
    tokens = []
    for seed in range(-(-draws // rows)):
        base = np.array([[0, seed]] * rows, np.uint32)
        words = np.stack(fold_in(base, np.arange(rows, dtype=np.uint32)), axis=1)
        tokens.append(choose(logits, words, np.full(rows, inverse, np.float32), *cut))
    return np.concatenate(tokens)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_draws_follow_the_softmax(temperature):
    vocab, draws = 60, 40960
    row = np.random.default_rng(3).normal(size=vocab).astype(np.float32) * 1.5
    tokens = _draws(row, 1 / temperature, draws, vocab)
    probability = np.exp(row.astype(np.float64) / temperature)
    probability /= probability.sum()
    counts = np.bincount(tokens, minlength=vocab).astype(float)
    assert abs(_chi_square(counts, probability)) < 4
    # The test can fail: another temperature, and nearly uniform noise.
    other = np.exp(row.astype(np.float64) / (temperature * 1.1))
    assert _chi_square(counts, other / other.sum()) > 8
    uniform = np.bincount(np.random.default_rng(0).integers(0, vocab, draws)).astype(float)
    assert _chi_square(uniform, probability) > 8


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_draws_follow_the_softmax_of_a_real_vocabulary(temperature):
    vocab = VOCABULARIES["smollm2"]
    row = np.random.default_rng(4).normal(size=vocab).astype(np.float32) * 2.5
    tokens = _draws(row, 1 / temperature, 20480, vocab)
    probability = np.exp(row.astype(np.float64) / temperature)
    probability /= probability.sum()
    counts = np.bincount(tokens, minlength=vocab).astype(float)
    assert abs(_chi_square(counts, probability)) < 4
    other = np.exp(row.astype(np.float64) / (temperature * 1.1))
    assert _chi_square(counts, other / other.sum()) > 8


@pytest.mark.parametrize("vocab", [1, 129, pytest.param(2048, marks=pytest.mark.slow)])
def test_small_and_odd_vocabularies(vocab):
    logits = np.random.default_rng(vocab).normal(size=(3, vocab)).astype(np.float32)
    parameters = _rows(3, top_k=2, top_p=2**31)
    token, bad, *_ = jax.jit(lambda *a: _step(*a, top=1))(logits, _words(3), *parameters)
    two = np.argsort(-logits, axis=1, kind="stable")[:, :2]
    assert all(t in row for t, row in zip(np.asarray(token), two, strict=True))
    assert not bad.any()


def test_what_does_not_fit_is_refused():
    logits = jnp.zeros((2, 8), jnp.float32)
    words = jnp.zeros((2, 2), jnp.uint32)
    ones, cut = jnp.ones(2, jnp.float32), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="logits must be float32"):
        choose_token(logits.astype(jnp.bfloat16), words, ones, cut, cut, backend=REFERENCE)
    with pytest.raises(ValueError, match=r"key_words must have shape \[2, 2\]"):
        choose_token(logits, words[:1], ones, cut, cut, backend=REFERENCE)
    with pytest.raises(ValueError, match="top_p must be uint32"):
        find_cut(logits, ones, cut, cut, ones, backend=REFERENCE)
    with pytest.raises(ValueError, match="count must be from 1 to 8, got 9"):
        top_tokens(logits, 9, backend=REFERENCE)
    with pytest.raises(NotImplementedError, match="backend"):
        top_tokens(logits, 2, backend="nothing")
    with pytest.raises(NotImplementedError, match="up to 262144 tokens, got 262145"):
        topology_for(vocab_size=262145)
