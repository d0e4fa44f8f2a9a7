"""Backward passes: right, blind to padding, and row by row where a gradient belongs to a row."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.attention import attention, write_pages
from bi_jax.pallas_kernels.embedding import embedding
from bi_jax.pallas_kernels.float_order import LOWEST
from bi_jax.pallas_kernels.log_softmax import target_logprobs
from bi_jax.pallas_kernels.matmul import matmul, swiglu_matmul
from bi_jax.pallas_kernels.primitive import HOPPER, REFERENCE
from bi_jax.pallas_kernels.ragged import RaggedBatch
from bi_jax.pallas_kernels.rms_norm import add_rms_norm, rms_norm
from bi_jax.pallas_kernels.rope import rope
from bi_jax.pallas_kernels.row_sums import sum_rows
from bi_jax.testing import assert_same_bits, bit_difference

ROWS, PADDED = 70, 83  # one full block of summed rows and a bit; both no multiples of anything
EPS = 1e-5


class Case(NamedTuple):
    """An op of rows [T, ...] and of shared arrays, and the same in plain jnp."""

    ours: Callable
    stock: Callable
    rows: tuple[tuple[int, ...], ...]
    shared: tuple[tuple[int, ...], ...]


def _norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS) * _like(scale, x)


def _like(shared, x):
    return shared.reshape((1,) * (x.ndim - 1) + (-1,))


def _rotate(heads, cos, sin):
    low, high = jnp.split(heads, 2, -1)
    cos, sin = cos[:, None, None], sin[:, None, None]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def _stock_rope(qkv, q_scale, k_scale):
    q, k = _norm(qkv[:, :, :2], q_scale), _norm(qkv[:, :, 2:3], k_scale)
    cos, sin = _tables(qkv.shape[0])
    return _rotate(q, cos, sin), _rotate(k, cos, sin)[:, :, 0], qkv[:, :, 3]


def _tables(count):
    # One angle for all rows, so that a row may move.
    angle = jnp.tile(jnp.asarray([[0.3, 1.1, 2.0, 4.0]], jnp.float32), (count, 1))
    return jnp.cos(angle), jnp.sin(angle)


def _rope(qkv, q_scale, k_scale, num_rows):
    cos, sin = _tables(qkv.shape[0])
    return rope(
        qkv,
        cos,
        sin,
        q_scale=q_scale,
        k_scale=k_scale,
        eps=EPS,
        backend=REFERENCE,
        num_rows=num_rows,
    )


def _logprobs(logits, num_rows):
    count, vocab = logits.shape
    return target_logprobs(
        logits,
        jnp.full((count, 1), 17, jnp.int32),
        jnp.full((count,), 1.5, jnp.float32),
        jnp.full((count,), LOWEST, jnp.int32),
        jnp.full((count,), vocab, jnp.int32),
        backend=REFERENCE,
        num_rows=num_rows,
    )


def _stock_logprobs(logits):
    scaled = jnp.float32(1.5) * logits
    return jax.nn.log_softmax(scaled)[:, 17:18], jax.nn.logsumexp(scaled, -1)


def _bound(op, **options):
    return lambda *args: op(*args[:-1], backend=REFERENCE, num_rows=args[-1], **options)


CASES = {
    "matmul": Case(_bound(matmul), lambda x, w, b: x @ w.T + b[None], ((24,),), ((16, 24), (16,))),
    "swiglu_matmul": Case(
        _bound(swiglu_matmul),
        lambda x, w: jax.nn.silu(x @ w[0].T) * (x @ w[1].T),
        ((24,),),
        ((2, 20, 24),),
    ),
    "rms_norm": Case(_bound(rms_norm, eps=EPS), _norm, ((24,),), ((24,),)),
    "add_rms_norm": Case(
        _bound(add_rms_norm, eps=EPS),
        lambda x, r, s: (_norm(x + r, s), x + r),
        ((24,), (24,)),
        ((24,),),
    ),
    "rope": Case(_rope, _stock_rope, ((2, 4, 8),), ((8,), (8,))),
    "target_logprobs": Case(_logprobs, _stock_logprobs, ((300,),), ()),
}


def _draw(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _pullback(fn):
    @jax.jit
    def pull(args, cotangents, *others):
        _, back = jax.vjp(lambda *a: fn(*a, *others), *args)
        return back(cotangents)

    return pull


def _padded(array):
    """Rows of NaN behind the real ones."""
    return np.pad(array, [(0, PADDED - ROWS)] + [(0, 0)] * (array.ndim - 1), constant_values=np.nan)


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    case = CASES[name]
    rows = [_draw((ROWS, *shape), i) for i, shape in enumerate(case.rows)]
    shared = [_draw(shape, 10 + i) for i, shape in enumerate(case.shared)]
    out = jax.eval_shape(case.stock, *rows, *shared)
    cotangents = jax.tree.map(lambda o: _draw(o.shape, 20 + o.ndim), out)
    ours, count = _pullback(case.ours), jnp.int32(ROWS)
    exact = ours((*rows, *shared), cotangents, count)

    stock = _pullback(case.stock)((*rows, *shared), cotangents)
    for got, expected in zip(exact, stock, strict=True):
        error = np.abs(np.asarray(got) - np.asarray(expected)).max()
        assert error < 5e-6 * np.abs(expected).max()

    # Padding, of NaN, changes neither the rows' gradients nor those of what they share.
    wide = jax.tree.map(_padded, cotangents)
    padded = ours((*map(_padded, rows), *shared), wide, count)
    for index, (got, expected) in enumerate(zip(padded, exact, strict=True)):
        assert_same_bits(got[:ROWS] if index < len(rows) else got, expected)

    # In another order each row keeps its gradient; the sums over rows do not: the control.
    order = np.random.default_rng(5).permutation(ROWS)
    moved = [a[order] for a in rows]
    turned = ours((*moved, *shared), jax.tree.map(lambda c: c[order], cotangents), count)
    for index, (got, expected) in enumerate(zip(turned, exact, strict=True)):
        if index < len(rows):
            assert_same_bits(got, np.asarray(expected)[order])
        else:
            assert bit_difference(got, expected) is not None


LENGTHS = (150, 9)  # two blocks of keys, and a neighbour
TOKENS = sum(LENGTHS)


def _batch(lengths, padding=0):
    total = sum(lengths)
    positions = np.concatenate([np.arange(n) for n in lengths] + [np.full(padding, 7)])
    request = np.concatenate([np.full(n, i) for i, n in enumerate(lengths)] + [np.ones(padding)])
    return RaggedBatch(
        positions=jnp.asarray(positions, jnp.int32),
        request=jnp.asarray(request, jnp.int32),
        query_start=jnp.asarray([0, lengths[0], total], jnp.int32),
        page_table=jnp.asarray([[3, 1, 2], [0, 0, 0]], jnp.int32),
        num_tokens=jnp.int32(total),
    )


def _attend(window):
    def run(q, k, v, batch):
        pages = jnp.full((4, 2, 64, 8), jnp.nan, jnp.float32)
        stored = write_pages(pages, pages, k, v, batch)
        return attention(q, *stored, batch, scale=0.3, window=window, backend=REFERENCE)

    return run


def _stock_attend(window):
    def run(q, k, v, batch):
        request, place = batch.request, batch.positions
        seen = (request[:, None] == request[None]) & (place[:, None] >= place[None])
        if window is not None:
            seen &= place[None] > place[:, None] - window
        scores = jnp.einsum("tngd,snd->ngts", q, k) * jnp.float32(0.3)
        scores = jnp.where(seen[None, None], scores, -jnp.inf)
        mixed = jnp.einsum("ngts,snd->tngd", jax.nn.softmax(scores), v)
        return mixed, jax.nn.logsumexp(scores, -1).transpose(2, 0, 1)

    return run


@pytest.mark.parametrize("window", [None, 40])
def test_attention_gradients(window):
    q, k, v = _draw((TOKENS, 2, 3, 8), 1), _draw((TOKENS, 2, 8), 2), _draw((TOKENS, 2, 8), 3)
    cotangents = (_draw(q.shape, 4), _draw(q.shape[:3], 5))
    ours = _pullback(_attend(window))
    exact = ours((q, k, v), cotangents, _batch(LENGTHS))
    stock = _pullback(_stock_attend(window))((q, k, v), cotangents, _batch(LENGTHS))
    for got, expected in zip(exact, stock, strict=True):
        assert np.abs(got - expected).max() < 2e-6 * np.abs(expected).max()
    if window is None:
        # The other request first, another neighbour, and padding of NaN.
        first = LENGTHS[0]
        other = np.full((TOKENS - first + 6, *q.shape[1:]), np.nan, np.float32)
        arrays = [
            np.concatenate([a[:first], other[:, :, 0] if a.ndim == 3 else other])
            for a in (q, k, v, cotangents[0])
        ]
        lse = np.concatenate([cotangents[1][:first], other[..., 0]])
        batch = _batch((first, TOKENS - first), padding=6)
        again = ours(tuple(arrays[:3]), (arrays[3], lse), batch)
        for got, expected in zip(again, exact, strict=True):
            assert_same_bits(got[:first], expected[:first])


def test_embedding_gradients():
    tokens = np.random.default_rng(6).integers(0, 5, ROWS).astype(np.int32)
    dy = _draw((ROWS, 24), 7)
    pull = _pullback(lambda table, ids, n: embedding(table, ids, num_rows=n))
    table = _draw((7, 24), 8)
    (exact,) = pull((table,), dy, tokens, jnp.int32(ROWS))
    expected = np.zeros_like(table)
    for token, row in zip(tokens, dy, strict=True):
        expected[token] += row
    assert_same_bits(exact, expected)
    (padded,) = pull((table,), _padded(dy), np.pad(tokens, (0, PADDED - ROWS)), jnp.int32(ROWS))
    assert_same_bits(padded, expected)
    (turned,) = pull((table,), dy[::-1].copy(), tokens[::-1].copy(), jnp.int32(ROWS))
    assert bit_difference(turned, expected) is not None


@pytest.mark.parametrize("rows", [ROWS, 1, 64, 700])
def test_rows_are_summed_in_one_order_whoever_counts_them(rows):
    """By a loop over the blocks that hold data, as on a CPU, and side by side, as on a GPU."""
    values = _draw((rows, 24), 9)
    count = jnp.int32(rows)
    looped = jax.jit(sum_rows)(values, count)
    at_once = jax.jit(functools.partial(sum_rows, counted=False))
    assert_same_bits(at_once(values, count), looped)
    padded = np.concatenate([values, np.full((77, 24), np.nan, np.float32)])
    assert_same_bits(at_once(padded, count), looped)
    if rows == 700:
        assert bit_difference(functools.reduce(np.add, values), looped) is not None


def test_backward_products_lower_to_hopper_kernels():
    shapes = {"x": (200, 256), "w": (512, 256), "gate_up": (2, 384, 512)}
    x, w, gate_up = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes.values())

    def backward(x, w, gate_up):
        def forward(x, w, gate_up):
            return swiglu_matmul(matmul(x, w, backend=HOPPER), gate_up, backend=HOPPER)

        out, pull = jax.vjp(forward, x, w, gate_up)
        return pull(out)

    lowered = jax.jit(backward).trace(x, w, gate_up).lower(lowering_platforms=("cuda",))
    # Two products forwards; backwards gate and up again, and two products each.
    assert lowered.as_text().count("stablehlo.custom_call @mosaic_gpu_v2") >= 7
