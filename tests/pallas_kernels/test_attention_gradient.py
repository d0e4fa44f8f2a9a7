"""The attention gradient of a GPU, pair by pair of blocks, with a CPU's products."""

import dataclasses
import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bi_jax.pallas_kernels.attention import attention, topology_for, write_pages
from bi_jax.pallas_kernels.attention.gradient_blocks import attention_gradient_blocks
from bi_jax.pallas_kernels.attention.reference_backward import attention_gradient_reference
from bi_jax.pallas_kernels.matmul.kernel_hopper import matmul_hopper
from bi_jax.pallas_kernels.matmul.schedule import Schedule
from bi_jax.pallas_kernels.primitive import HOPPER, REFERENCE
from bi_jax.pallas_kernels.ragged import RaggedBatch
from bi_jax.testing import assert_same_bits, bit_difference

LENGTHS = (150, 9)  # three blocks of keys, and a neighbour
HEADS, GROUP, WIDTH = 2, 3, 8
SCALE = 0.3


def _batch(lengths: tuple[int, int], padding: int = 0) -> RaggedBatch:
    total = sum(lengths)
    positions = np.concatenate([np.arange(n) for n in lengths] + [np.full(padding, 7)])
    request = np.concatenate([np.full(n, i) for i, n in enumerate(lengths)] + [np.ones(padding)])
    return RaggedBatch(
        positions=jnp.asarray(positions, jnp.int32),
        request=jnp.asarray(request, jnp.int32),
        query_start=jnp.asarray([0, lengths[0], total], jnp.int32),
        page_table=jnp.asarray([[3, 1, 2], [0, 4, 4]], jnp.int32),
        num_tokens=jnp.int32(total),
    )


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _draw(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _inputs(tokens: int) -> list[np.ndarray]:
    """q, k, v, dout, dlse."""
    queries, keys = (tokens, HEADS, GROUP, WIDTH), (tokens, HEADS, WIDTH)
    shapes = (queries, keys, keys, queries, queries[:3])
    return [_draw(shape, seed) for seed, shape in enumerate(shapes)]


def _gradients(gradient, arrays, batch, window) -> list[np.ndarray]:
    q, k, v, dout, dlse = (jnp.asarray(a) for a in arrays)

    def run(q, k, v, dout, dlse, batch):
        pages = jnp.full((7, HEADS, 64, WIDTH), jnp.nan, jnp.float32)
        pages = write_pages(pages, pages, k, v, batch)
        options = dict(scale=SCALE, window=window)
        out, lse = attention(q, *pages, batch, backend=REFERENCE, **options)
        rest = (batch.positions, batch.request, batch.query_start, batch.page_table)
        topology = topology_for(head_dim=WIDTH)
        arrays = (q, *pages, *rest, batch.num_tokens, out, lse, dout, dlse)
        return gradient(*arrays, **options, topology=topology)

    return [np.asarray(a) for a in jax.jit(run)(q, k, v, dout, dlse, batch)]


_blocks = functools.partial(attention_gradient_blocks, product=_product, block=64)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 70])
def test_blocks_agree_with_the_reference(window):
    arrays, batch = _inputs(sum(LENGTHS)), _batch(LENGTHS)
    ours = _gradients(_blocks, arrays, batch, window)
    reference = _gradients(attention_gradient_reference, arrays, batch, window)
    for got, expected in zip(ours, reference, strict=True):
        assert np.abs(got - expected).max() < 2e-6 * np.abs(expected).max()
    # The control: other keys, another gradient.
    arrays[1] = arrays[1][::-1]
    other = _gradients(_blocks, arrays, batch, window)
    assert np.abs(other[1] - reference[1]).max() > 1e-3


@pytest.mark.slow
def test_a_sequence_keeps_its_gradient_in_other_company():
    arrays, first = _inputs(sum(LENGTHS)), LENGTHS[0]
    exact = _gradients(_blocks, arrays, _batch(LENGTHS), None)
    moved = [np.concatenate([a[:first], np.roll(a[first:], 1, axis=0)]) for a in arrays]
    padded = [np.concatenate([a, np.full((5, *a.shape[1:]), np.nan, np.float32)]) for a in moved]
    again = _gradients(_blocks, padded, _batch(LENGTHS, padding=5), None)
    for got, expected in zip(again, exact, strict=True):
        assert_same_bits(got[:first], expected[:first])
        assert bit_difference(got[first : sum(LENGTHS)], expected[first:]) is not None


def test_the_backward_pass_lowers_to_kernels_of_ours():
    """In bfloat16 for sm90: five products a pair, and no product of the compiler's."""
    tokens, width = 190, 64
    q = jax.ShapeDtypeStruct((tokens, HEADS, GROUP, width), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((tokens, HEADS, width), jnp.bfloat16)

    def backward(q, k, v, batch):
        def forward(q, k, v):
            pages = jnp.zeros((7, HEADS, 64, width), jnp.bfloat16)
            pages = write_pages(pages, pages, k, v, batch)
            return attention(q, *pages, batch, scale=SCALE, backend=HOPPER)

        out, pull = jax.vjp(forward, q, k, v)
        return pull(out)

    traced = jax.jit(backward).trace(q, k, k, _batch((170, 20)))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "dot_general" not in text
    assert text.count("custom_call @mosaic_gpu") >= 1 + 3  # equal products are lowered once


@pytest.mark.slow
def test_with_the_interpreted_matmul_kernel():
    """bfloat16, one head of 64: three pairs of blocks, five launches each."""
    tokens, width = 70, 64
    schedule = Schedule(tile_m=64, tile_n=32, stages=3, ctas=2)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return matmul_hopper(x, w, out_dtype="float32", schedule=schedule)

    shapes = [(tokens, 1, 1, width), (tokens, 1, width), (tokens, 1, width)]
    q, k, v = (jnp.asarray(_draw(s, i), jnp.bfloat16) for i, s in enumerate(shapes))
    dout, dlse = (jnp.asarray(_draw(s, 7)) for s in (shapes[0], shapes[0][:3]))
    batch = dataclasses.replace(
        _batch((tokens, 0)),
        query_start=jnp.asarray([0, tokens], jnp.int32),
        page_table=jnp.asarray([[1, 0]], jnp.int32),
    )
    pages = jnp.zeros((2, 1, 64, width), jnp.bfloat16)
    pages = write_pages(pages, pages, k, v, batch)
    options = dict(scale=0.125, window=None)
    out, lse = attention(q, *pages, batch, backend=REFERENCE, **options)
    rest = (batch.positions, batch.request, batch.query_start, batch.page_table)
    arrays = (q, *pages, *rest, batch.num_tokens, out, lse, dout.astype(jnp.bfloat16), dlse)
    options["topology"] = topology_for(head_dim=width)
    expected = attention_gradient_reference(*arrays, **options)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        found = attention_gradient_blocks(*arrays, product=product, block=64, **options)
    for got, wanted in zip(found, expected, strict=True):
        got, wanted = (np.asarray(a, np.float64) for a in (got, wanted))
        assert np.linalg.norm(got - wanted) < 3e-3 * np.linalg.norm(wanted)
