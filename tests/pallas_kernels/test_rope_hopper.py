"""The Hopper QK-norm and rotation in the interpreter on a CPU, and lowered for sm90."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.primitive import REFERENCE
from bi_jax.pallas_kernels.rope import rope
from bi_jax.pallas_kernels.rope.kernel_hopper import ROWS, Rows, kv_heads_a_tile, rope_hopper
from bi_jax.testing import assert_same_bits, operands

# (KV heads, group, head size) of Llama 3.1 8B and Qwen3, SmolLM2, and Llama 2 7B.
SHAPES = ((8, 4, 128), (3, 3, 64), (32, 1, 128))


def _arrays(tokens, kv_heads, group, width):
    shape = (tokens, kv_heads, group + 2, width)
    qkv = jnp.asarray(operands.spread(shape, "bfloat16", seed=1, powers=(-2, 2)))
    angles = np.random.default_rng(2).uniform(0, 6.28, (tokens, width // 2))
    cos, sin = (jnp.asarray(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
    scales = jnp.asarray(operands.spread((2, width), "bfloat16", seed=3, powers=(-1, 1)))
    return qkv, cos, sin, scales


@pytest.mark.parametrize("normed", [False, True])
def test_the_interpreted_kernel_against_the_reference(normed):
    qkv, cos, sin, scales = _arrays(2, 3, 3, 64)
    got = rope_hopper(qkv, cos, sin, scales if normed else None, eps=1e-6, interpret=True)
    options = {"q_scale": scales[0], "k_scale": scales[1]} if normed else {}
    want = rope(qkv, cos, sin, backend=REFERENCE, eps=1e-6, **options)
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= 2.0**-7 * np.abs(b).max()
    assert_same_bits(got[2], qkv[:, :, -1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normed", [False, True])
def test_it_lowers_for_sm90(shape, normed):
    kv_heads, group, width = shape

    def spec(dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype)

    args = [spec((5, kv_heads, group + 2, width))]
    args += [spec((5, width // 2), jnp.float32)] * 2
    args += [spec((2, width))] if normed else []

    def run(qkv, cos, sin, scales=None):
        return rope_hopper(qkv, cos, sin, scales, eps=1e-6)

    text = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def test_tiles_hold_whole_kv_heads():
    rows = [Rows(group=g, half=width // 2) for _, g, width in SHAPES]
    assert [kv_heads_a_tile(n, r) for (n, _, _), r in zip(SHAPES, rows, strict=True)] == [8, 3, 16]


@pytest.mark.parametrize("shape", [*SHAPES, (2, 7, 64), (4, 8, 64), (1, 1, 64)])
def test_what_tma_touches_is_aligned(shape):
    """Head size 64 has rows of 64 bytes: a copy that began at an odd one was a device fault."""
    kv_heads, group, width = shape
    rows = Rows(group=group, half=width // 2)
    row_bytes = width // 2 * 2
    tile_heads = kv_heads_a_tile(kv_heads, rows)
    assert 0 < tile_heads * rows.total <= ROWS
    for i in range(tile_heads):
        for place in (0, rows.k, rows.v):
            assert (i * rows.total + place) * row_bytes % 128 == 0


def test_what_does_not_fit_is_refused_by_name():
    qkv, cos, sin, _ = _arrays(2, 3, 3, 64)
    with pytest.raises(NotImplementedError, match="got float32, head size 64, group 3"):
        rope_hopper(qkv.astype(jnp.float32), cos, sin, None, eps=1e-6)
