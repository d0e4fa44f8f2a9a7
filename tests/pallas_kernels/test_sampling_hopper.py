"""The Hopper token choice in the interpreter on a CPU, and lowered for sm90 without a GPU."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.float_order import LOWEST, order_key
from bi_jax.pallas_kernels.log_softmax import LogSoftmaxTopology
from bi_jax.pallas_kernels.log_softmax.hopper_blocks import Vocabulary
from bi_jax.pallas_kernels.log_softmax.kernel_hopper import target_logprobs_hopper
from bi_jax.pallas_kernels.log_softmax.schedule import Schedule
from bi_jax.pallas_kernels.primitive import HOPPER, REFERENCE
from bi_jax.pallas_kernels.sampling import (
    SamplingTopology,
    choose_and_score,
    choose_token,
    topology_for,
)
from bi_jax.pallas_kernels.sampling.cases import SMALL_VOCABULARY, VOCABULARIES
from bi_jax.pallas_kernels.sampling.hopper_walk import pick_token, weight_of
from bi_jax.pallas_kernels.sampling.hopper_weights import limb_sums, limb_values
from bi_jax.pallas_kernels.sampling.kernel_hopper import (
    choose_and_score_hopper,
    choose_token_hopper,
)
from bi_jax.pallas_kernels.sampling.threefry import threefry2x32
from bi_jax.testing import assert_same_bits

V = 1100  # five blocks of 256, the last one short
SMALL = SamplingTopology(block=256)


def _fixture(rows, vocab=V, seed=0):
    """Flat and peaked rows, ties, -inf, zeros of both signs; greedy, drawn and cut ones."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, vocab)).astype(np.float32)
    logits *= np.resize(np.float32([0.3, 2.5, 8.0]), (rows, 1))
    for r in range(0, rows, 2):
        logits[r] = np.round(logits[r] * 2) / 2
    logits[1::4, ::3] = -np.inf
    words = rng.integers(0, 2**32, (rows, 2), dtype=np.uint32)
    inverse = np.resize(np.float32([0.0, 1.0, 2.0, 0.0, 1.0, 0.5]), rows)
    cut_key, cut_id = np.full(rows, LOWEST, np.int32), np.full(rows, vocab, np.int32)
    for r in range(2, rows, 3):
        last = np.argsort(-logits[r], kind="stable")[30]
        cut_key[r], cut_id[r] = order_key(logits[r, last : last + 1])[0], last
    return tuple(jnp.asarray(a) for a in (logits, words, inverse, cut_key, cut_id))


def _run(*arrays, topology=SMALL, num_rows=None, **options):
    count = jnp.int32(len(arrays[0]) if num_rows is None else num_rows)
    return choose_token_hopper(*arrays, count, topology=topology, interpret=True, **options)


def test_the_interpreted_kernels_choose_what_the_reference_chooses():
    arguments = _fixture(6)
    for a, b in zip(
        _run(*arguments),
        choose_token(*arguments, backend=REFERENCE, topology=SMALL),
        strict=True,
    ):
        assert_same_bits(a, b)


def test_a_row_does_not_follow_its_batch_or_the_schedule_in_the_interpreter():
    logits, *rest = arguments = _fixture(3)
    whole = _run(*arguments, schedule=Schedule(blocks_a_cta=1))
    poisoned = logits.at[0].set(jnp.nan).at[1].set(jnp.inf)
    beside = _run(poisoned, *rest, schedule=Schedule(blocks_a_cta=3))
    alone = _run(*(a[2:] for a in arguments), schedule=Schedule(blocks_a_cta=5))
    for a, b, c in zip(whole, beside, alone, strict=True):
        assert_same_bits(b[2], a[2])
        assert_same_bits(c[0], a[2])
    other_key = (logits[1:2], rest[0][1:2] ^ jnp.uint32(2**31), *(a[1:2] for a in rest[1:]))
    assert _run(*other_key)[0][0] != whole[0][1]


def test_bad_rows_are_told_and_ties_go_to_the_lowest_id():
    logits, words, inverse, cut_key, cut_id = (np.array(a) for a in _fixture(5))
    cut_key[:], cut_id[:], inverse[:] = LOWEST, V, (1.0, 0.0, 0.0, 0.0, 0.0)
    logits[0, -1] = np.nan  # in the short block
    logits[1, 300] = np.inf
    logits[2] = -np.inf
    logits[3] = np.minimum(logits[3], -1)
    logits[3, [400, 900]] = -0.0, 0.0
    logits[4] = 1.0
    arrays = (jnp.asarray(a) for a in (logits, words, inverse, cut_key, cut_id))
    token, bad = _run(*arrays)
    assert bad.tolist() == [True, True, True, False, False]
    assert token.tolist() == [0, 0, 0, 400, 0]


@pytest.mark.slow
def test_one_summary_serves_the_token_and_its_logprob():
    arguments = _fixture(2)
    one, everything = jnp.ones(2), (jnp.full(2, LOWEST), jnp.full(2, V, jnp.int32))
    token, bad, logprob, lse = choose_and_score_hopper(
        *arguments, one, *everything, jnp.int32(2), topology=SMALL, interpret=True
    )
    assert_same_bits(token, _run(*arguments)[0])
    assert not bad.any()
    apart, apart_lse = target_logprobs_hopper(
        *(arguments[0], token[:, None], one, *everything, jnp.int32(2)),
        topology=LogSoftmaxTopology(block=SMALL.block, lanes=128),
        interpret=True,
    )
    assert_same_bits(logprob, apart[:, 0])
    assert_same_bits(lse, apart_lse)
    given = jnp.array([5, -1], jnp.int32)
    again = choose_and_score_hopper(
        *arguments, one, *everything, jnp.int32(2), given, topology=SMALL, interpret=True
    )
    assert again[0].tolist() == [5, int(token[1])] and again[2][1] == logprob[1]
    assert abs(again[2][0] + lse[0] - arguments[0][0, 5]) < 1e-5


@pytest.mark.slow
def test_greedy_steps_need_no_draw():
    logits, words, _, cut_key, cut_id = _fixture(2)
    arguments = logits, words, jnp.zeros(2), cut_key, cut_id
    for a, b in zip(_run(*arguments, sampled=False), _run(*arguments), strict=True):
        assert_same_bits(a, b)


def test_limbs_are_those_of_the_definition():
    rng = np.random.default_rng(0)
    gaps = np.concatenate([-(rng.random(60000) ** 3) * 30, np.linspace(-1e-6, 0, 5000), [-np.inf]])
    likelihood = np.exp(np.concatenate([gaps, np.arange(0, -41, -1) * np.log(2)]))
    likelihood = np.append(likelihood, [1.0 + 2.0**-23, 2.0**-149]).astype(np.float32)
    exact = (np.minimum(likelihood.astype(np.float64), 1.0) * 2.0**40).astype(np.uint64)
    high, low = jax.jit(limb_values)(likelihood)
    assert_same_bits(high, (exact >> np.uint64(20)).astype(np.uint32))
    assert_same_bits(low, (exact & np.uint64(2**20 - 1)).astype(np.uint32))
    for n in (1, 128, 2048):
        for start in (0, 7777, len(exact) - n):
            total = int(exact[start : start + n].sum())
            sums = [int(s) for s in jax.jit(limb_sums)(likelihood[start : start + n])]
            assert sums == [total >> 20, total & (2**20 - 1)]


@pytest.mark.parametrize("key", [5, 3, 2])  # they draw the first, the third and the last
def test_the_walk_over_given_integers(key):
    """Block sums and a key of our choice; the logits' weights are exp(0) and exp(-inf)."""
    logits = np.full((1, V), -np.inf, np.float32)
    alive = [3, 255, 256, 1023, 1099]
    logits[0, alive] = 0.0
    per_block = np.bincount(np.minimum(np.asarray(alive) // 256, 4), minlength=128)
    high = (per_block.astype(np.uint32) << 20)[None]
    arrays = {
        "logits": logits,
        "inverse": np.ones(1, np.float32),
        "cut_value": np.full(1, -np.inf, np.float32),
        "cut_id": np.full(1, V, np.int32),
        "num_rows": np.ones(1, np.int32),
        "maxima": np.zeros((1, 128), np.float32),
        "key_words": np.full((1, 2), key, np.uint32),
        "high": high,
        "low": np.zeros_like(high),
    }
    token, bad = pick_token(
        {name: jnp.asarray(a) for name, a in arrays.items()},
        vocabulary=Vocabulary(size=V, block=256),
        vocab_size=V,
        interpret=True,
    )
    words = threefry2x32(*np.full((2, 1), key, np.uint32), *np.zeros((2, 1), np.uint32))
    upper, lower = (int(word[0]) for word in words)
    word = (upper << 32) + lower
    assert not bad[0] and token[0] == alive[(word * len(alive)) >> 64]


@pytest.mark.slow
def test_no_race_in_the_interpreter():
    arguments = _fixture(2)
    params = plgpu.InterpretGPUParams(detect_races=True)
    token, _ = choose_token_hopper(*arguments, jnp.int32(2), topology=SMALL, interpret=params)
    assert_same_bits(token, _run(*arguments)[0])


def _shapes(rows, vocab):
    def row(dtype, *more):
        return jax.ShapeDtypeStruct((rows, *more), dtype)

    cut = row(jnp.int32), row(jnp.int32)
    return row(jnp.float32, vocab), row(jnp.uint32, 2), row(jnp.float32), *cut


@pytest.mark.parametrize(
    ("vocab", "rows"),
    [
        *((vocab, 256) for vocab in [*VOCABULARIES.values(), SMALL_VOCABULARY, 100]),
        (VOCABULARIES["qwen3"], 1),
    ],
)
def test_it_lowers_for_sm90(vocab, rows):
    def run(*arrays):
        return choose_token(*arrays, backend=HOPPER)

    text = jax.jit(run).trace(*_shapes(rows, vocab)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 3


def test_the_op_of_both_lowers_for_sm90():
    shapes = _shapes(8, VOCABULARIES["qwen3"])

    def run(logits, words, inverse, key, ids):
        cut = key, ids
        return choose_and_score(
            logits, words, inverse, cut, inverse, cut, backend=HOPPER, given=ids
        )

    text = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 3


@pytest.mark.parametrize("sampled", [True, False])
def test_the_shared_step_lowers_for_sm90(sampled):
    shapes = _shapes(256, VOCABULARIES["qwen3"])

    def run(*arrays):
        topology = topology_for(vocab_size=VOCABULARIES["qwen3"])
        return choose_and_score_hopper(
            *arrays, *arrays[2:], jnp.int32(256), topology=topology, sampled=sampled
        )

    text = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2 + sampled


def test_a_weight_in_words_is_the_weight_in_limbs():
    rng = np.random.default_rng(1)
    high = rng.integers(0, 2**31, 100, dtype=np.uint32)
    low = rng.integers(0, 2**32, 100, dtype=np.uint32)
    upper, lower = weight_of(jnp.asarray(high), jnp.asarray(low))
    exact = (high.astype(np.uint64) << np.uint64(20)) + low
    assert_same_bits(upper, (exact >> np.uint64(32)).astype(np.uint32))
    assert_same_bits(lower, exact.astype(np.uint32))
