"""The Hopper QK-norm and rotation in the interpreter on a CPU, and lowered for sm90."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.primitive import HOPPER, REFERENCE
from bi_jax.pallas_kernels.ragged import RaggedBatch
from bi_jax.pallas_kernels.rope import rope, rope_into_pages
from bi_jax.pallas_kernels.rope.kernel_hopper import rope_hopper, rope_into_pages_hopper
from bi_jax.pallas_kernels.rope.schedule import RopeSchedule, pick_schedule
from bi_jax.testing import assert_same_bits, operands

# (KV heads, group, head size) of Llama 3.1 8B and Qwen3, SmolLM2, and Llama 2 7B.
SHAPES = ((8, 4, 128), (3, 3, 64), (32, 1, 128))
PAGES, PAGE = 4, 8


def _arrays(tokens, kv_heads, group, width):
    shape = (tokens, kv_heads, group + 2, width)
    qkv = jnp.asarray(operands.spread(shape, "bfloat16", seed=1, powers=(-2, 2)))
    angles = np.random.default_rng(2).uniform(0, 6.28, (tokens, width // 2))
    cos, sin = (jnp.asarray(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
    scales = jnp.asarray(operands.spread((2, width), "bfloat16", seed=3, powers=(-1, 1)))
    return qkv, cos, sin, scales


@pytest.mark.parametrize("normed", [False, True])
def test_the_interpreted_kernel_against_the_reference(normed):
    """Two tiles, the second not full; its last token is padding and has no page."""
    tokens, real, kv_heads = 10, 9, 2
    qkv, cos, sin, scales = _arrays(tokens, kv_heads, 2, 64)
    qkv = qkv.at[real:].set(jnp.nan)
    place = jnp.asarray([*np.random.default_rng(4).permutation(PAGES * PAGE)[:real], 0], jnp.int32)
    page, slot = place // PAGE, place % PAGE
    page = page.at[real:].set(PAGES)
    empty = jnp.full((PAGES, kv_heads, PAGE, 64), jnp.nan, jnp.bfloat16)
    q, *pages = rope_into_pages_hopper(
        *(qkv, cos, sin, tuple(scales) if normed else ()),
        *(empty, empty, page, slot),
        eps=1e-6,
        schedule=RopeSchedule(queries=1 + normed, together=normed),
        interpret=True,
    )
    options = {"q_scale": scales[0], "k_scale": scales[1]} if normed else {}
    want = rope(qkv, cos, sin, backend=REFERENCE, eps=1e-6, **options)
    k, v = (p[page[:real], :, slot[:real]] for p in pages)
    for a, b in zip((q[:real], k, v), want, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b[:real], np.float64)
        assert np.abs(a - b).max() <= 2.0**-7 * np.abs(b).max()
    assert_same_bits(v, qkv[:real, :, -1])
    for p in pages:
        untouched = p.at[page[:real], :, slot[:real]].set(jnp.nan)
        assert_same_bits(untouched, empty)


def _lowered(run, *args, donate=()):
    jitted = jax.jit(run, donate_argnums=donate)
    return jitted.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def _spec(dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normed", [False, True])
def test_it_lowers_for_sm90(shape, normed):
    kv_heads, group, width = shape

    def run(qkv, cos, sin, scales):
        q_scale, k_scale = scales if normed else (None, None)
        return rope(qkv, cos, sin, backend=HOPPER, q_scale=q_scale, k_scale=k_scale)

    table = _spec((70, width // 2), jnp.float32)
    qkv, scales = _spec((70, kv_heads, group + 2, width)), (_spec((width,)),) * 2
    assert "mosaic_gpu" in _lowered(run, qkv, table, table, scales)


def test_donated_pages_are_changed_in_place():
    """The program that XLA is given states it; a test on a card looks for copies."""
    tokens, requests = 8, 3

    def run(qkv, cos, sin, k_pages, v_pages, batch):
        return rope_into_pages(qkv, cos, sin, k_pages, v_pages, batch, backend=HOPPER)

    def int32(*dims):
        return _spec(dims, jnp.int32)

    batch = RaggedBatch(
        positions=int32(tokens),
        request=int32(tokens),
        query_start=int32(requests + 1),
        page_table=int32(requests, 2),
        num_tokens=int32(),
    )
    table, pages = _spec((tokens, 64), jnp.float32), _spec((5, 2, 64, 128))
    args = _spec((tokens, 2, 4, 128)), table, table, pages, pages, batch
    text = _lowered(run, *args, donate=(3, 4))
    assert text.count("output_operand_alias<") == text.count("tf.aliasing_output") == 2
    assert "stablehlo.scatter" not in text


@pytest.mark.parametrize("tiles", [1, 4, 32, 128, 512])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 7, 64), (1, 8, 128)])
def test_a_schedule_takes_every_head_once(tiles, shape):
    kv_heads, group, _ = shape
    schedule = pick_schedule(tiles=tiles, kv_heads=kv_heads, group=group)
    assert schedule.parts(group) == (1 if schedule.together else 1 + group // schedule.queries)


def test_what_does_not_fit_is_refused_by_name():
    qkv, cos, sin, _ = _arrays(2, 3, 3, 64)
    with pytest.raises(NotImplementedError, match="got float32, head size 64"):
        rope_hopper(qkv.astype(jnp.float32), cos, sin, (), eps=1e-6)
    with pytest.raises(ValueError, match="queries=0 must be at least 1"):
        RopeSchedule(queries=0)
    for wrong in (RopeSchedule(queries=2), RopeSchedule(queries=1, together=True)):
        with pytest.raises(ValueError, match="does not divide 3 query heads"):
            wrong.parts(3)
