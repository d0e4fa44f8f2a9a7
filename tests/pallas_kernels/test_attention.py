"""Attention reference: one order for prefill, chunks, decode and scoring; padding is inert."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.attention import AttentionTopology, attention, write_pages
from bi_jax.pallas_kernels.primitive import REFERENCE
from bi_jax.pallas_kernels.ragged import RaggedBatch
from bi_jax.testing import assert_same_bits, bit_difference, operands

PAGE = 16
BLOCK = 32  # of the tests' topology, so that short contexts have several blocks
KV_HEADS, WIDTH = 2, 16


@dataclass(frozen=True)
class Tokens:
    """q [L, Nkv, G, Dh], k and v [L, Nkv, Dh] of one request."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def make_tokens(length, seed, group=3, dtype="float32"):
    def draw(shape, part):
        return operands.spread(shape, dtype, seed=10 * seed + part, powers=(-2, 2))

    return Tokens(
        draw((length, KV_HEADS, group, WIDTH), 1),
        draw((length, KV_HEADS, WIDTH), 2),
        draw((length, KV_HEADS, WIDTH), 3),
    )


@functools.partial(jax.jit, static_argnames=("window", "block"))
def _step(q, k, v, k_pages, v_pages, batch, *, window, block):
    k_pages, v_pages = write_pages(k_pages, v_pages, k, v, batch)
    topology = AttentionTopology(kv_block=block)
    out, lse = attention(
        q, k_pages, v_pages, batch, backend=REFERENCE, scale=0.25, window=window, topology=topology
    )
    return out, lse, k_pages, v_pages


def run(requests, steps, *, bucket, window=None, block=BLOCK, page=PAGE, seed=0):
    """Runs steps of [(request, count), ...] and returns each request's outputs and lse.

    Pages are handed out in random order and begin as NaN; padding tokens hold NaN.
    """
    dtype = requests[0].q.dtype
    pages_each = -(-max(len(r.q) for r in requests) // page)
    count = len(requests)
    table = np.random.default_rng(seed).permutation(count * pages_each).astype(np.int32)
    table = table.reshape(count, pages_each)
    k_pages = jnp.full((count * pages_each, KV_HEADS, page, WIDTH), jnp.nan, dtype)
    v_pages = k_pages
    outs = [np.zeros(r.q.shape, dtype) for r in requests]
    lses = [np.zeros(r.q.shape[:3], np.float32) for r in requests]
    done = [0] * count
    for step in steps:
        parts = [(b, slice(done[b], done[b] + n)) for b, n in step]
        starts = np.cumsum([0] + [p.stop - p.start for _, p in parts])
        total = starts[-1]

        def flat(name, parts=parts, total=total):
            rows = np.concatenate([getattr(requests[b], name)[part] for b, part in parts])
            return np.concatenate([rows, np.full((bucket - total, *rows.shape[1:]), np.nan, dtype)])

        def ints(rows, fill, total=total):
            return np.concatenate([*rows, np.full(bucket - total, fill)]).astype(np.int32)

        batch = RaggedBatch(
            positions=ints([np.arange(p.start, p.stop) for _, p in parts], 10**6),
            request=ints([np.full(p.stop - p.start, i) for i, (_, p) in enumerate(parts)], 10**6),
            query_start=np.pad(starts, (0, count - len(parts)), mode="edge").astype(np.int32),
            page_table=table[[b for b, _ in parts] + [0] * (count - len(parts))],
            num_tokens=np.int32(total),
        )
        out, lse, k_pages, v_pages = _step(
            flat("q"), flat("k"), flat("v"), k_pages, v_pages, batch, window=window, block=block
        )
        for (b, part), start in zip(parts, starts, strict=False):
            size = part.stop - part.start
            outs[b][part] = np.asarray(out)[start : start + size]
            lses[b][part] = np.asarray(lse)[start : start + size]
            done[b] = part.stop
    assert done == [len(r.q) for r in requests]
    return outs, lses


def exact(tokens, window):
    q, k, v = (np.asarray(a, np.float64) for a in (tokens.q, tokens.k, tokens.v))
    scores = np.einsum("qngd,knd->ngqk", q, k) * 0.25
    place = np.arange(len(q))
    seen = place[None] <= place[:, None]
    if window is not None:
        seen &= place[None] > place[:, None] - window
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    out = np.einsum("ngqk,knd->qngd", weights / total, v)
    return out, np.moveaxis((top + np.log(total))[..., 0], -1, 0)


LENGTHS = (5, 97, 64, 33)


def prefill_steps(lengths=LENGTHS):
    return [[(b, n) for b, n in enumerate(lengths)]]


def chunked_steps(chunk, lengths=LENGTHS):
    left, steps = list(lengths), []
    while any(left):
        step = [(b, min(chunk, n)) for b, n in enumerate(left) if n]
        left = [n - min(chunk, n) for n in left]
        steps.append(step)
    return steps


@pytest.fixture(scope="module")
def requests():
    return [make_tokens(n, seed) for seed, n in enumerate(LENGTHS)]


@pytest.mark.parametrize("window", [None, 1, 20, 50])
def test_against_float64(requests, window):
    outs, lses = run(requests, prefill_steps(), bucket=208, window=window)
    for tokens, out, lse in zip(requests, outs, lses, strict=True):
        want, want_lse = exact(tokens, window)
        np.testing.assert_allclose(out, want, rtol=0, atol=2e-5)
        np.testing.assert_allclose(lse, want_lse, rtol=0, atol=2e-5)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("chunk", [1, 7, 31, 32, 33])
def test_every_chunking_gives_the_same_bits(requests, window, chunk):
    expected = run(requests, prefill_steps(), bucket=208, window=window)
    got = run(requests, chunked_steps(chunk), bucket=136, window=window, seed=chunk)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("group", [1, 3])
def test_alone_and_among_others(group):
    requests = [make_tokens(n, seed, group) for seed, n in enumerate(LENGTHS)]
    together = run(requests, prefill_steps(), bucket=208)
    for b, bucket in ((1, 104), (3, 208)):
        alone = run([requests[b]], [[(0, LENGTHS[b])]], bucket=bucket)
        assert_same_bits(alone, ([together[0][b]], [together[1][b]]))


def test_a_neighbour_of_nan_is_not_noticed(requests):
    expected = run(requests, prefill_steps(), bucket=208)
    for value in (np.nan, np.inf, 1e30):
        bad = Tokens(*(np.full_like(a, value) for a in vars(requests[1]).values()))
        got = run([requests[0], bad, *requests[2:]], prefill_steps(), bucket=208)
        for b in (0, 2, 3):
            assert_same_bits(got[0][b], expected[0][b])


@pytest.mark.parametrize("page", [8, 32, 64])
def test_the_page_size_changes_nothing(requests, page):
    expected = run(requests, prefill_steps(), bucket=208)
    assert_same_bits(run(requests, prefill_steps(), bucket=208, page=page), expected)


@pytest.mark.parametrize(
    ("block", "pages", "window"), [(128, (64, 16, 256), 70), (96, (96, 48), None)]
)
def test_blocks_of_several_parts(block, pages, window):
    """The reference meets a block of 128 in parts of 64, one of 96 in parts of 32; the last page
    size neither holds whole parts nor fits into one."""
    lengths = (150, 63)
    requests = [make_tokens(n, seed) for seed, n in enumerate(lengths)]
    kinds = {"window": window, "block": block}
    expected = run(requests, prefill_steps(lengths), bucket=216, page=pages[0], **kinds)
    for tokens, out, lse in zip(requests, *expected, strict=True):
        want, want_lse = exact(tokens, window)
        np.testing.assert_allclose(out, want, rtol=0, atol=2e-5)
        np.testing.assert_allclose(lse, want_lse, rtol=0, atol=2e-5)
    for page in pages[1:]:
        got = run(requests, chunked_steps(37, lengths), bucket=80, page=page, **kinds)
        assert_same_bits(got, expected)
    other = run(requests, prefill_steps(lengths), bucket=216, page=16, window=window, block=16)
    assert bit_difference(other[0][0], expected[0][0]) is not None  # the control


def test_another_kv_block_is_another_order(requests):
    """The control: these operands do show it when blocks are cut elsewhere."""
    expected = run(requests, prefill_steps(), bucket=208)
    other = run(requests, prefill_steps(), bucket=208, block=16)
    assert bit_difference(other[0][1], expected[0][1]) is not None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_invariant_too(dtype):
    requests = [make_tokens(n, seed, dtype=dtype) for seed, n in enumerate(LENGTHS)]
    expected = run(requests, prefill_steps(), bucket=208)
    got = run(requests, chunked_steps(9), bucket=40)
    assert_same_bits(got, expected)


def test_refusals():
    tokens = make_tokens(4, 0)
    with pytest.raises(ValueError, match="page size 24 must divide kv_block=32"):
        run([tokens], [[(0, 4)]], bucket=4, page=24)
    with pytest.raises(ValueError, match="window=0 must be positive"):
        run([tokens], [[(0, 4)]], bucket=4, window=0)
