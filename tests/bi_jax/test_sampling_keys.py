"""Seeds become keys, parameters become numbers, and scoring repeats what sampling reported."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.primitive import REFERENCE
from bi_jax.pallas_kernels.sampling import fold_in
from bi_jax.sampling import request_key, row_sampling, sample, score, stack_rows
from bi_jax.sampling_params import SamplingParams
from bi_jax.testing import assert_same_bits

V = 6250
SEEDS = (0, 7, 2**31, 2**32 - 1, 2**32, 2**40 + 7, 2**63 - 1)


def _logits(rows, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, V)).astype(np.float32) * 2.5


def _jax_key(seed, sample_index):
    with jax.enable_x64(True):  # without it, JAX drops the upper half of a seed
        key = jax.random.key(np.int64(seed), impl="threefry2x32")
        return jax.random.fold_in(key, np.uint32(sample_index))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_key_of_a_request_is_that_of_jax(seed):
    for index in (0, 1, 31, 2**31 - 1):
        data = np.asarray(jax.random.key_data(_jax_key(seed, index)))
        assert request_key(seed, index) == tuple(data.tolist())


def test_all_keys_differ():
    keys = {request_key(seed, index) for seed in SEEDS for index in range(64)}
    assert len(keys) == len(SEEDS) * 64


def test_the_position_is_folded_in_on_the_device_as_on_the_host_and_in_jax():
    positions = np.array([0, 1, 5, 4095, 4096, 131071, 2**31 - 1], np.uint32)
    words = np.array([request_key(seed, 3) for seed in SEEDS], np.uint32)
    together = np.stack(jax.jit(fold_in)(words, positions), axis=1)
    assert_same_bits(together, np.stack(fold_in(words, positions), axis=1))
    for row, (seed, position) in enumerate(zip(SEEDS, positions, strict=True)):
        alone = jax.random.fold_in(_jax_key(seed, 3), position)
        assert_same_bits(np.asarray(jax.random.key_data(alone)), together[row])
    keys = jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")
    mapped = jax.vmap(jax.random.fold_in)(keys, jnp.asarray(positions))
    assert_same_bits(np.asarray(jax.random.key_data(mapped)), together)


def test_seeds_and_indices_out_of_range_are_refused():
    for seed, index in ((-1, 0), (2**63, 0)):
        with pytest.raises(ValueError, match="seed="):
            request_key(seed, index)
    for index in (-1, 2**31):
        with pytest.raises(ValueError, match="sample_index="):
            request_key(0, index)
    with pytest.raises(ValueError, match="seed=None must be assigned"):
        row_sampling(SamplingParams(), sample_index=0)


def test_the_numbers_of_a_request():
    row = row_sampling(
        SamplingParams(seed=1, temperature=0.7, top_p=0.25, top_k=9, min_p=0.5), sample_index=2
    )
    assert row.key_words == request_key(1, 2)
    assert row.inv_temperature == float(np.float32(1 / 0.7))
    assert (row.top_k, row.top_p, row.log_min_p) == (9, 2**30, math.log(0.5))
    assert (row.logprob_inv_temperature, row.logprob_cut, row.filtered) == (1.0, False, True)


@pytest.mark.parametrize(
    ("mode", "scaled", "cut"),
    [("raw", False, False), ("scaled", True, False), ("processed", True, True)],
)
def test_modes_of_log_probabilities(mode, scaled, cut):
    params = SamplingParams(seed=1, temperature=0.5, top_k=3, logprobs_mode=mode)
    row = row_sampling(params, sample_index=0)
    assert (row.logprob_inv_temperature, row.logprob_cut) == (2.0 if scaled else 1.0, cut)
    greedy = row_sampling(replace(params, temperature=0.0), sample_index=0)
    assert (greedy.inv_temperature, greedy.logprob_inv_temperature) == (0.0, 1.0)
    assert not greedy.logprob_cut and not greedy.filtered


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"top_p": 1.0}, 0),
        ({"top_p": 1 - 2.0**-40}, 0),
        ({"top_p": 1 - 2.0**-32}, 2**32 - 1),
        ({"top_p": 1e-30}, 1),
    ],
)
def test_top_p_in_fixed_point(given, expected):
    assert row_sampling(SamplingParams(seed=0, **given), sample_index=0).top_p == expected


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-30, 1e30, 1e300])
def test_extreme_temperatures_are_neither_greedy_nor_infinite(temperature):
    inverse = row_sampling(SamplingParams(seed=0, temperature=temperature), sample_index=0)
    number = np.float32(inverse.inv_temperature)
    assert np.finfo(np.float32).tiny <= number <= np.finfo(np.float32).max


def test_rows_are_padded_with_greedy_ones():
    row = row_sampling(SamplingParams(seed=3, top_k=2), sample_index=0)
    rows = stack_rows([row, row], [4, 5], size=5)
    assert rows.key_words.shape == (5, 2) and rows.key_words.dtype == np.uint32
    assert list(rows.position) == [4, 5, 0, 0, 0]
    assert list(rows.inv_temperature) == [1, 1, 0, 0, 0]
    assert list(rows.top_k) == [2, 2, 0, 0, 0]
    for positions, size in (([4], 5), ([4, 5], 1)):
        with pytest.raises(ValueError, match="stack_rows: expected one position a row"):
            stack_rows([row, row], positions, size=size)


_sample = jax.jit(lambda *a: sample(*a, backend=REFERENCE, top=3))
_score = jax.jit(lambda *a: score(*a, backend=REFERENCE, top=3))


def _mixed(seed=5):
    """Requests of every kind, side by side."""
    kinds = [{"temperature": 0.0}, {}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.4}]
    kinds.append({"min_p": 0.2, "top_p": 0.9, "temperature": 1.3})
    modes = ("raw", "scaled", "processed")
    return [
        SamplingParams(seed=seed + i, logprobs_mode=mode, **kind)
        for i, (kind, mode) in enumerate((k, m) for k in kinds for m in modes)
    ]


def test_scoring_repeats_the_bits_of_sampling():
    params = _mixed()
    rows = stack_rows([row_sampling(p, sample_index=0) for p in params], range(18), size=18)
    logits = _logits(18)
    drawn = _sample(logits, rows)
    scored = _score(logits, drawn.token, rows)
    assert_same_bits(scored, drawn)
    assert not drawn.bad_row.any() and np.isfinite(drawn.logprob).all()
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :3]
    assert_same_bits(np.asarray(drawn.top_ids), ids.astype(np.int32))


def test_a_token_outside_top_k_has_processed_logprob_minus_infinity():
    params = SamplingParams(seed=0, top_k=5, temperature=0.8)
    modes = [replace(params, logprobs_mode=mode) for mode in ("raw", "scaled", "processed")]
    rows = stack_rows([row_sampling(p, sample_index=0) for p in modes] * 6, [9] * 18, size=18)
    logits = np.repeat(_logits(1), 18, axis=0)
    order = np.argsort(-logits[0], kind="stable").astype(np.int32)
    for place, outside in ((4, False), (5, True), (6000, True)):
        got = _score(logits, np.full(18, order[place], np.int32), rows)
        assert list(np.isneginf(got.logprob[:3])) == [False, False, outside]
        assert not got.bad_row.any()
    best = np.asarray(_score(logits, np.full(18, order[0], np.int32), rows).logprob[:3])
    scaled = logits[0].astype(np.float64) / 0.8
    for value, part in ((best[1], scaled), (best[2], scaled[order[:5]])):
        assert abs(value - (scaled.max() - np.log(np.exp(part).sum()))) < 1e-5
    assert len(set(best.tolist())) == 3


def test_samples_of_one_seed_differ_and_repeat_in_any_batch():
    """32 samples at 4 positions; sample i does not depend on how many there are."""
    params = SamplingParams(seed=11)
    logits = np.repeat(_logits(1, seed=2), 18, axis=0)

    def tokens(indices, position):
        rows = [row_sampling(params, sample_index=i) for i in indices]
        stacked = stack_rows(rows, [position] * len(rows), size=18)
        return np.asarray(_sample(logits, stacked).token)[: len(rows)].tolist()

    positions = range(40, 44)
    first = {i: [] for i in range(32)}
    for position in positions:
        for start in (0, 16):
            indices = range(start, start + 16)
            for i, token in zip(indices, tokens(indices, position), strict=True):
                first[i].append(token)
    assert len({tuple(t) for t in first.values()}) == 32
    order = np.random.default_rng(0).permutation(32).tolist()
    for at, position in enumerate(positions):
        for start in range(0, 32, 7):
            some = order[start : start + 7]
            assert tokens(some, position) == [first[i][at] for i in some]


def test_a_program_without_filters_gives_the_same_bits():
    params = [p for p in _mixed() if not row_sampling(p, sample_index=0).filtered]
    rows = stack_rows([row_sampling(p, sample_index=0) for p in params], range(9), size=18)
    logits = _logits(18)
    without = jax.jit(lambda *a: sample(*a, backend=REFERENCE, top=3, filters=False))
    assert_same_bits(without(logits, rows), _sample(logits, rows))


def test_only_the_broken_row_is_flagged():
    rows = [row_sampling(p, sample_index=0) for p in _mixed()]
    stacked = stack_rows(rows, range(18), size=18)
    logits = _logits(18)
    clean = _sample(logits, stacked)
    broken = logits.copy()
    broken[[1, 11]] = np.nan
    got = _sample(broken, stacked)
    scored = _score(broken, got.token, stacked)
    assert np.nonzero(got.bad_row)[0].tolist() == [1, 11]
    assert np.nonzero(scored.bad_row)[0].tolist() == [1, 11]
    good = np.setdiff1d(np.arange(18), (1, 11))
    for now, before in zip(jax.tree.leaves(got), jax.tree.leaves(clean), strict=True):
        assert_same_bits(np.asarray(now)[good], np.asarray(before)[good])
