"""Cuts and top tokens on a card: the definition's, in any company, under every schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.log_softmax.schedule import Schedule
from bi_jax.pallas_kernels.primitive import HOPPER
from bi_jax.pallas_kernels.sampling import choose_token, find_cut, top_tokens, topology_for
from bi_jax.pallas_kernels.sampling.cases import SMALL_VOCABULARY, VOCABULARIES
from bi_jax.pallas_kernels.sampling.kernel_cut_hopper import find_cut_hopper, top_tokens_hopper
from bi_jax.testing import assert_same_bits
from tests.gpu import cut_checks as checks

pytestmark = pytest.mark.gpu
QWEN = VOCABULARIES["qwen3"]
BLOCK = 2048


@jax.jit
def _cut(rows, inverse, top_k, top_p, log_min_p):
    return find_cut(rows, inverse, top_k, top_p, log_min_p, backend=HOPPER)


@pytest.fixture(scope="module")
def qwen():
    """Rows, what they ask for, and their cuts."""
    rows, wanted = checks.adversarial(QWEN, BLOCK)
    return rows, wanted, [np.asarray(a) for a in _cut(rows, *wanted.values())]


@pytest.mark.parametrize("vocab", [*VOCABULARIES.values(), SMALL_VOCABULARY, 100])
def test_cuts_are_those_of_the_definition(vocab):
    rows, wanted = checks.adversarial(vocab, BLOCK if vocab > 2 * BLOCK else 64)
    got = [np.asarray(a) for a in _cut(rows, *wanted.values())]
    weights = checks.weights_of_rows(rows, wanted["inverse"], block=BLOCK)
    wrong = []
    for r, row in enumerate(rows):
        expected = checks.expected_cut(row, weights[r], *(a[r] for a in wanted.values()))
        if (got[0][r], got[1][r]) != expected:
            wrong.append((r, (got[0][r], got[1][r]), expected))
    assert not wrong


@pytest.mark.parametrize(
    ("vocab", "count"), [(QWEN, 20), (QWEN, 128), (SMALL_VOCABULARY, 5), (100, 64), (32000, 8)]
)
def test_top_tokens_are_the_largest_in_order(vocab, count):
    rows, _ = checks.adversarial(vocab, BLOCK if vocab > 2 * BLOCK else 64)
    got = np.asarray(jax.jit(lambda x: top_tokens(x, count, backend=HOPPER))(rows))
    np.testing.assert_array_equal(got, [checks.ranked(row)[:count] for row in rows])


@pytest.mark.parametrize("blocks_a_cta", [1, 3, 8, 100])
def test_no_schedule_changes_a_cut(qwen, blocks_a_cta):
    rows, wanted, whole = qwen

    def run(rows, *wanted):
        return find_cut_hopper(
            *(rows, *wanted, jnp.int32(len(rows))),
            topology=topology_for(vocab_size=QWEN),
            schedule=Schedule(blocks_a_cta=blocks_a_cta),
        )

    for a, b in zip(jax.jit(run)(rows, *wanted.values()), whole, strict=True):
        assert_same_bits(a, b)

    def ordered(rows):
        schedule = Schedule(blocks_a_cta=blocks_a_cta)
        return top_tokens_hopper(rows, jnp.int32(len(rows)), count=20, schedule=schedule)[0]

    expected = [checks.ranked(row)[:20] for row in rows]
    np.testing.assert_array_equal(jax.jit(ordered)(rows), expected)


@pytest.mark.parametrize("count", [1, 2, 7, 33])
def test_a_row_is_cut_alike_in_any_company(qwen, count):
    rows, wanted, whole = qwen
    for start in (0, 5, len(rows) - count):
        part = slice(start, start + count)
        got = _cut(rows[part], *(a[part] for a in wanted.values()))
        for a, b in zip(got, whole, strict=True):
            assert_same_bits(a, b[part])
    poisoned = rows.copy()
    poisoned[::2] = np.nan
    poisoned[[0, 4]] = np.inf, -np.inf
    for a, b in zip(_cut(poisoned, *wanted.values()), whole, strict=True):
        assert_same_bits(a[1::2], b[1::2])


def test_what_is_drawn_is_kept(qwen):
    """The draw takes the weights that the cut was made with."""
    rows, wanted, (cut_key, cut_id) = qwen
    words = jax.random.bits(jax.random.key(0), (len(rows), 2), jnp.uint32)
    token, bad = choose_token(
        *(jnp.asarray(rows), words, jnp.asarray(wanted["inverse"])),
        *(jnp.asarray(cut_key), jnp.asarray(cut_id)),
        backend=HOPPER,
    )
    assert not bad.any()
    for row, drawn, last in zip(rows, np.asarray(token), cut_id, strict=True):
        ranks = np.empty(QWEN, int)
        ranks[checks.ranked(row)] = np.arange(QWEN)
        assert last == QWEN or ranks[drawn] <= ranks[last]


def test_the_control_differs(qwen):
    """Another top-p moves cuts, so that equal cuts say something."""
    rows, wanted, whole = qwen
    other = wanted | {"top_p": np.where(wanted["top_p"] > 0, wanted["top_p"] ^ (1 << 28), 0)}
    got = _cut(rows, *(a.astype(wanted[n].dtype) for n, a in other.items()))
    assert (np.asarray(got[1]) != whole[1]).sum() > 5
