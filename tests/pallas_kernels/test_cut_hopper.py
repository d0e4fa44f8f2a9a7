"""The Hopper cut and top tokens in the interpreter on a CPU, and lowered for sm90 without a GPU.

tests/gpu/test_cut_gpu.py has the vocabularies of models and every kind of row.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.float_order import from_order_key, order_key
from bi_jax.pallas_kernels.log_softmax.schedule import Schedule
from bi_jax.pallas_kernels.primitive import HOPPER
from bi_jax.pallas_kernels.sampling import SamplingTopology, find_cut, hopper_list, top_tokens
from bi_jax.pallas_kernels.sampling.cases import SMALL_VOCABULARY, VOCABULARIES
from bi_jax.pallas_kernels.sampling.hopper_buckets import bucket_of
from bi_jax.pallas_kernels.sampling.hopper_list import lowest_key, search, ties_needed
from bi_jax.pallas_kernels.sampling.hopper_weights import limb_values, signed_limbs
from bi_jax.pallas_kernels.sampling.kernel_cut_hopper import find_cut_hopper, top_tokens_hopper
from tests.gpu import cut_checks as checks

V, BLOCK = 1100, 256  # five blocks, the last one short
SMALL = SamplingTopology(block=BLOCK)


def _cut(rows, wanted, *, num_rows=None, interpret=True, **options):
    arrays = (jnp.asarray(wanted[name]) for name in checks.FIELDS)
    count = jnp.int32(len(rows) if num_rows is None else num_rows)
    options |= dict(topology=SMALL, interpret=interpret)
    return tuple(
        np.asarray(a) for a in find_cut_hopper(jnp.asarray(rows), *arrays, count, **options)
    )


def _some(picked):
    rows, wanted = checks.adversarial(V, BLOCK)
    return rows[picked], {name: array[picked] for name, array in wanted.items()}


def _expect(rows, wanted, got):
    weights = checks.weights_of_rows(rows, wanted["inverse"], block=BLOCK, interpret=True)
    for r, row in enumerate(rows):
        expected = checks.expected_cut(row, weights[r], *(a[r] for a in wanted.values()))
        assert (got[0][r], got[1][r]) == expected, {n: a[r] for n, a in wanted.items()}


@pytest.mark.slow
def test_cuts_are_those_of_the_definition():
    """The usual settings, top-p alone, ties at the end, a row of a few finite logits, none."""
    rows, wanted = _some([0, 4, 15, 31, 46])
    _expect(rows, wanted, _cut(rows, wanted))


@pytest.mark.slow
def test_cuts_of_all_kinds_of_rows():
    rows, wanted = checks.adversarial(V, BLOCK)
    # A CPU takes numbers below 2^-126 for zero, where a GPU does not.
    normal = np.flatnonzero(~((rows != 0) & (np.abs(rows) < 2.0**-126)).any(axis=1))
    rows, wanted = _some(normal)
    whole = _cut(rows, wanted, schedule=Schedule(blocks_a_cta=1))
    _expect(rows, wanted, whole)
    rows[::2] = np.nan
    beside = _cut(rows, wanted, schedule=Schedule(blocks_a_cta=3), num_rows=20)
    for a, b in zip(whole, beside, strict=True):
        np.testing.assert_array_equal(a[1:20:2], b[1:20:2])


@pytest.mark.slow
def test_the_search_of_a_whole_row():
    """What a list of no room leaves to the slow way: the same cuts."""
    rows, wanted = checks.adversarial(6000, 2048)
    picked = [7, 8, 13, 17, 24, 26, 29]
    wanted = {name: array[picked] for name, array in wanted.items()}
    arrays = (jnp.asarray(a) for a in wanted.values())
    got = find_cut_hopper(
        *(jnp.asarray(rows[picked]), *arrays, jnp.int32(len(picked))),
        topology=SamplingTopology(block=2048),
        interpret=True,
    )
    weights = checks.weights_of_rows(rows[picked], wanted["inverse"], block=2048, interpret=True)
    for r, row in enumerate(rows[picked]):
        expected = checks.expected_cut(row, weights[r], *(a[r] for a in wanted.values()))
        assert (int(got[0][r]), int(got[1][r])) == expected, picked[r]


def test_top_tokens_in_order():
    rows, _ = _some([2, 33])  # of many ties, of four finite logits
    rows = rows[:, :500]
    (got,) = top_tokens_hopper(
        jnp.asarray(rows), jnp.int32(2), count=9, topology=SMALL, interpret=True
    )
    for row, ids in zip(rows, np.asarray(got), strict=True):
        np.testing.assert_array_equal(ids, checks.ranked(row)[:9])


@pytest.mark.slow
def test_no_race_in_the_interpreter():
    rows, wanted = _some([0, 4])
    params = plgpu.InterpretGPUParams(detect_races=True)
    _expect(rows, wanted, _cut(rows, wanted, interpret=params))


def test_buckets_follow_the_gap():
    gaps = np.concatenate([-np.geomspace(1e-9, 90, 5000), [0.0, -np.inf]]).astype(np.float32)
    gaps = np.sort(gaps)[::-1]
    buckets = np.asarray(jax.jit(bucket_of)(gaps))
    assert buckets[0] == 0 and buckets[-1] == 127 and (np.diff(buckets) >= 0).all()
    octave = np.float32(-np.log(2))
    assert np.asarray(jax.jit(bucket_of)(octave * np.arange(4, dtype=np.float32))).tolist() == [
        *(0, 4, 8, 12)
    ]


def test_signed_limbs_are_the_weight():
    likelihood = np.exp(-np.linspace(0, 30, 9999)).astype(np.float32)
    high, low = (np.asarray(a, np.int64) for a in jax.jit(limb_values)(likelihood))
    near, rest = (np.asarray(a, np.int64) for a in jax.jit(signed_limbs)(likelihood))
    np.testing.assert_array_equal((near << 20) + rest, (high << 20) + low)
    assert (rest < 0).any() and np.abs(rest).max() <= 2**19


@pytest.mark.parametrize("edge", [-3.5, -0.0, 1e-42, 0.75, 12.0])
def test_the_lowest_key_of_a_rule(edge, monkeypatch):
    monkeypatch.setattr(
        hopper_list.plgpu, "broadcasted_iota", lambda dtype, shape, axis, layout: jnp.arange(*shape)
    )
    found = jax.jit(lambda top: lowest_key(lambda x: x >= edge, top))(order_key(jnp.float32(16.0)))
    assert from_order_key(found) == np.float32(edge)


def test_the_search_for_a_key():
    keys = np.sort(np.random.default_rng(0).integers(-(2**31), 2**31 - 1, 99))[::-1]
    keys = jnp.asarray(keys.astype(np.int32))

    def from_key(lowest):
        return jnp.uint32(0), jnp.sum(keys >= lowest, dtype=jnp.uint32)

    def run(need):
        return search(from_key, (jnp.uint32(0), need), keys[-1], keys[0])

    for need in (1, 2, 50, 99):
        key, above = jax.jit(run)(jnp.uint32(need))
        assert key == keys[need - 1] and above[1] == need - 1


def test_how_many_ties_reach_a_weight():
    weight = jnp.uint32(3), jnp.uint32(5)
    unit = (3 << 32) + 5
    for count in (1, 2, 77, 2**18 - 1):
        for need in (unit * count, unit * (count - 1) + 1):
            words = jnp.uint32(need >> 32), jnp.uint32(need & 0xFFFFFFFF)
            assert jax.jit(ties_needed)(weight, words) == count


def _shapes(rows, vocab):
    dtypes = dict(inverse=jnp.float32, top_k=jnp.int32, top_p=jnp.uint32, log_min_p=jnp.float32)
    return (
        jax.ShapeDtypeStruct((rows, vocab), jnp.float32),
        *(jax.ShapeDtypeStruct((rows,), dtype) for dtype in dtypes.values()),
    )


def _kernels(fn, *shapes):
    text = jax.jit(fn).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("custom_call @mosaic_gpu")


@pytest.mark.slow  # tests/bi_jax/test_audit_programs.py lowers one of both in the short tier
@pytest.mark.parametrize(
    ("vocab", "rows"),
    [
        *((vocab, 256) for vocab in VOCABULARIES.values()),
        (VOCABULARIES["qwen3"], 1),
        (SMALL_VOCABULARY, 8),
        (100, 8),
    ],
)
def test_a_cut_lowers_for_sm90(vocab, rows):
    assert _kernels(lambda *a: find_cut(*a, backend=HOPPER), *_shapes(rows, vocab)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 20, 128])
def test_top_tokens_lower_for_sm90(count):
    def run(logits):
        return top_tokens(logits, count, backend=HOPPER)

    assert _kernels(run, _shapes(256, VOCABULARIES["qwen3"])[0]) == 2


def test_too_many_top_tokens_are_refused():
    with pytest.raises(NotImplementedError, match="up to 128"):
        top_tokens_hopper(jnp.zeros((1, 500)), jnp.int32(1), count=129)
