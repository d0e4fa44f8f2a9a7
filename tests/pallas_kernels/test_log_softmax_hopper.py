"""The Hopper log-probabilities in the interpreter on a CPU, and lowered for sm90 without a GPU."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.float_order import LOWEST, order_key
from bi_jax.pallas_kernels.log_softmax import LogSoftmaxTopology, target_logprobs, topology_for
from bi_jax.pallas_kernels.log_softmax.cases import SMALL_VOCABULARY, VOCABULARIES
from bi_jax.pallas_kernels.log_softmax.hopper_blocks import PLACES
from bi_jax.pallas_kernels.log_softmax.kernel_hopper import target_logprobs_hopper
from bi_jax.pallas_kernels.log_softmax.schedule import Schedule, schedule_for
from bi_jax.pallas_kernels.primitive import HOPPER
from bi_jax.testing import assert_same_bits, bit_difference

V = 1100  # five blocks of 256, the last one short
SMALL = LogSoftmaxTopology(block=256, lanes=128)


def _run(logits, target, inverse, cut_key, cut_id, *, num_rows=None, topology=SMALL, **options):
    arrays = (jnp.asarray(a) for a in (logits, target, inverse, cut_key, cut_id))
    count = jnp.int32(len(logits) if num_rows is None else num_rows)
    options = {"interpret": True, **options}
    return target_logprobs_hopper(*arrays, count, topology=topology, **options)


def _fixture(rows, vocab=V, seed=0):
    """Logits of several widths, two targets a row, temperatures, and a cut in every other row."""
    rng = np.random.default_rng(seed)
    widths = np.resize([0.5, 2.5, 12.0], (rows, 1))
    logits = (rng.normal(size=(rows, vocab)) * widths + 7).astype(np.float32)
    target = rng.integers(0, vocab, (rows, 2)).astype(np.int32)
    target[:, 0] = logits.argmax(1)
    inverse = np.resize(np.float32([1.0, 1 / 0.7, 2.0]), rows)
    cut_key, cut_id = np.full(rows, LOWEST, np.int32), np.full(rows, vocab, np.int32)
    for r in range(1, rows, 2):
        last = np.argsort(-logits[r], kind="stable")[20 + 5 * r]
        cut_key[r], cut_id[r] = order_key(logits[r, last : last + 1])[0], last
    return logits, target, inverse, cut_key, cut_id


def _exact(logits, target, inverse, cut_key, cut_id):
    keys, ids = np.asarray(order_key(logits)), np.arange(logits.shape[1])
    kept = (keys > cut_key[:, None]) | ((keys == cut_key[:, None]) & (ids <= cut_id[:, None]))
    scaled = np.where(kept, logits.astype(np.float64) * inverse[:, None], -np.inf)
    top = scaled.max(1, keepdims=True)
    lse = top + np.log(np.exp(scaled - top).sum(1, keepdims=True))
    return np.take_along_axis(scaled, target, 1) - lse, lse[:, 0]


def test_the_interpreted_kernels_against_float64():
    arguments = _fixture(4)
    logprob, lse = (np.asarray(a, np.float64) for a in _run(*arguments))
    exact, exact_lse = _exact(*arguments)
    inside = np.isfinite(exact)
    assert (np.isneginf(logprob) == ~inside).all() and (~inside).any()
    steps = 4 * 2.0**-23
    assert (np.abs(logprob[inside] - exact[inside]) <= steps * (np.abs(exact[inside]) + 13)).all()
    assert (np.abs(lse - exact_lse) <= steps * (np.abs(exact_lse) + 13)).all()


def test_a_row_does_not_follow_its_batch_or_the_schedule_in_the_interpreter():
    logits, *rest = arguments = _fixture(3)
    whole = _run(*arguments, schedule=Schedule(blocks_a_cta=1))
    poisoned = logits.copy()
    poisoned[0], poisoned[1, ::2] = np.nan, np.inf
    beside = _run(poisoned, *rest, schedule=Schedule(blocks_a_cta=3))
    alone = _run(*(a[2:] for a in arguments), schedule=Schedule(blocks_a_cta=5))
    for a, b, c in zip(whole, beside, alone, strict=True):
        assert_same_bits(b[2], a[2])
        assert_same_bits(c[0], a[2])
    control = _run(*arguments, topology=LogSoftmaxTopology(block=128, lanes=128))
    assert any(bit_difference(a, b) is not None for a, b in zip(control, whole, strict=True))


def test_rows_that_hold_no_data_are_left_alone():
    arguments = _fixture(3)
    whole, some = _run(*arguments), _run(*arguments, num_rows=2)
    for a, b in zip(whole, some, strict=True):
        assert_same_bits(b[:2], a[:2])


def test_what_has_no_logprob_is_nan_or_minus_infinity():
    logits, target, inverse, cut_key, cut_id = _fixture(6)
    cut_key[:], cut_id[:] = LOWEST, V
    logits[0, -1] = np.nan  # in the short block
    logits[1, 300] = np.inf
    logits[2] = -np.inf
    target[3, 1], target[4, 1] = -1, V
    logits[5, 256:512] = -np.inf  # a whole block
    target[5] = logits[5].argmax(), 300
    logprob, lse = (np.asarray(a) for a in _run(logits, target, inverse, cut_key, cut_id))
    assert np.isnan(logprob[:3]).all() and np.isnan(lse[:3]).all()
    assert np.isfinite(lse[3:]).all() and np.isfinite(logprob[3:, 0]).all()
    assert np.isnan(logprob[3:5, 1]).all() and np.isneginf(logprob[5, 1])


def test_fewer_columns_than_a_block():
    arguments = _fixture(1, vocab=100)
    logprob, _ = _run(*arguments)
    exact, _ = _exact(*arguments)
    inside = np.isfinite(exact)
    assert np.abs(np.asarray(logprob)[inside] - exact[inside]).max() < 1e-5


@pytest.mark.slow
def test_no_race_in_the_interpreter():
    params = plgpu.InterpretGPUParams(detect_races=True)
    arguments = _fixture(1)
    for a, b in zip(_run(*arguments, interpret=params), _run(*arguments), strict=True):
        assert_same_bits(a, b)


def _shapes(rows, vocab, targets=1):
    def row(dtype, *more):
        return jax.ShapeDtypeStruct((rows, *more), dtype)

    floats, ints = jnp.float32, jnp.int32
    return row(floats, vocab), row(ints, targets), row(floats), row(ints), row(ints)


@pytest.mark.parametrize(
    ("vocab", "rows", "targets"),
    [
        *((vocab, 256, 1) for vocab in [*VOCABULARIES.values(), SMALL_VOCABULARY, 100]),
        (VOCABULARIES["qwen3"], 1, 1),
        (VOCABULARIES["qwen3"], 33, 6),
    ],
)
def test_it_lowers_for_sm90(vocab, rows, targets):
    def run(*arrays):
        return target_logprobs(*arrays, backend=HOPPER)

    traced = jax.jit(run).trace(*_shapes(rows, vocab, targets))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2


def test_every_vocabulary_fits_the_places_of_a_row():
    for vocab in VOCABULARIES.values():
        assert -(-vocab // topology_for(vocab_size=vocab).block) <= PLACES
    assert schedule_for(rows=1, blocks=75).blocks_a_cta == 1


def test_what_does_not_fit_is_refused_by_name():
    shapes = _shapes(2, 2**18 + 1)
    with pytest.raises(NotImplementedError, match="up to 262144 columns in blocks of 2048"):
        jax.eval_shape(lambda *a: _run_lowered(*a), *shapes)
    with pytest.raises(NotImplementedError, match="1 to 128 targets a row, got 129"):
        jax.eval_shape(lambda *a: _run_lowered(*a), *_shapes(2, 5000, 129))


def _run_lowered(*arrays):
    topology = topology_for(vocab_size=arrays[0].shape[1])
    return target_logprobs_hopper(*arrays, jnp.int32(2), topology=topology)
