"""QK-norm, rotation and the store into pages on a card: rows, schedules, padding, no copies."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.audit_hlo import HloAudit
from bi_jax.pallas_kernels.rope.kernel_hopper import rope_hopper, rope_into_pages_hopper
from bi_jax.pallas_kernels.rope.schedule import RopeSchedule
from bi_jax.testing import assert_same_bits, operands

pytestmark = pytest.mark.gpu
# (KV heads, group, head size, QK-norm) of Qwen3 8B, Llama 3.1 8B and SmolLM2.
CASES = ((8, 4, 128, True), (8, 4, 128, False), (3, 3, 64, False), (3, 3, 64, True))
PAGE = 64


def _arrays(case, tokens):
    kv_heads, group, width, normed = case
    shape = (tokens, kv_heads, group + 2, width)
    qkv = jnp.asarray(operands.spread(shape, "bfloat16", seed=1, powers=(-3, 3)))
    angles = np.random.default_rng(2).uniform(0, 6.28, (tokens, width // 2))
    cos, sin = (jnp.asarray(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
    scales = jnp.asarray(operands.spread((2, width), "bfloat16", seed=3, powers=(-1, 1)))
    return qkv, cos, sin, tuple(scales) if normed else ()


def _places(tokens, pages):
    place = np.random.default_rng(tokens).permutation(pages * PAGE)[:tokens].astype(np.int32)
    return jnp.asarray(place // PAGE), jnp.asarray(place % PAGE)


@pytest.mark.parametrize("case", CASES)
def test_a_token_alone_and_among_others(case):
    qkv, cos, sin, scales = _arrays(case, 200)
    whole = rope_hopper(qkv, cos, sin, scales, eps=1e-6)
    for first, count in ((0, 1), (63, 1), (64, 1), (199, 1), (1, 130)):
        rows = slice(first, first + count)
        alone = rope_hopper(qkv[rows], cos[rows], sin[rows], scales, eps=1e-6)
        for a, b in zip(alone, whole, strict=True):
            assert_same_bits(a, b[rows])


@pytest.mark.parametrize("case", CASES)
def test_pages_hold_the_tokens_and_nothing_else_changes(case):
    """In every schedule, with padding that holds NaN and pages that were never written."""
    tokens, real, pages = 200, 187, 5
    kv_heads, group, width, _ = case
    qkv, cos, sin, scales = _arrays(case, tokens)
    q, k, v = rope_hopper(qkv, cos, sin, scales, eps=1e-6)
    page, slot = _places(tokens, pages)
    page = page.at[real:].set(pages + jnp.arange(tokens - real, dtype=jnp.int32))
    poisoned = qkv.at[real:].set(jnp.nan)
    empty = jnp.full((pages, kv_heads, PAGE, width), jnp.nan, qkv.dtype)
    schedules = [RopeSchedule(queries=n) for n in range(1, group + 1) if group % n == 0]
    for schedule in (*schedules, RopeSchedule(queries=group, together=True)):
        got, *stored = rope_into_pages_hopper(
            *(poisoned, cos, sin, scales, empty, empty, page, slot),
            eps=1e-6,
            schedule=schedule,
        )
        assert_same_bits(got[:real], q[:real])
        for new, want in zip(stored, (k, v), strict=True):
            assert_same_bits(new[page[:real], :, slot[:real]], want[:real])
            rest = np.array(new)  # on the host: a device may write another NaN
            rest[page[:real], :, slot[:real]] = np.asarray(empty)[0, 0, 0, 0]
            assert_same_bits(rest, empty)


@pytest.mark.parametrize("looped", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_stacked_layers_keep_their_own_pages(case, looped):
    """A compiler may fuse the slices and updates of a stack with the kernel between them."""
    layers, tokens, pages = 5, 64, 3
    kv_heads, _, width, _ = case
    qkv, cos, sin, scales = _arrays(case, tokens)
    page, slot = _places(tokens, pages)
    qkvs = jnp.stack([jnp.roll(qkv, layer, axis=0) for layer in range(layers)])
    shape = (2, layers, pages, kv_heads, PAGE, width)
    old = jnp.asarray(operands.spread(shape, "bfloat16", seed=5, powers=(-3, 3)))

    def run(qkv, k_pages, v_pages):
        return rope_into_pages_hopper(
            *(qkv, cos, sin, scales, k_pages, v_pages, page, slot), eps=1e-6
        )

    def looping(qkvs, old):
        stacks = (qkvs, *old)
        if looped:
            return jax.lax.scan(lambda carry, one: (carry, run(*one)), None, stacks)[1]
        each = [run(*(stack[layer] for stack in stacks)) for layer in range(layers)]
        return tuple(jnp.stack(parts) for parts in zip(*each, strict=True))

    compiled = jax.jit(looping).lower(qkvs, old).compile()
    assert not [f for f in HloAudit(compiled.as_text(), (), {}).findings if f.kind == "alias"]
    found = compiled(qkvs, old)
    for layer in range(layers):
        alone = run(qkvs[layer], *old[:, layer])
        for stack, want in zip(found, alone, strict=True):
            assert_same_bits(stack[layer], want)


def test_donated_pages_are_not_copied():
    kv_heads, _, width, _ = CASES[0]
    tokens, pages = 64, 9
    qkv, cos, sin, scales = _arrays(CASES[0], tokens)
    empty = jnp.zeros((pages, kv_heads, PAGE, width), qkv.dtype)

    def run(k_pages, v_pages, page, slot):
        return rope_into_pages_hopper(qkv, cos, sin, scales, k_pages, v_pages, page, slot, eps=1e-6)

    found = []
    for donate in ((), (0, 1)):
        compiled = jax.jit(run, donate_argnums=donate).lower(empty, empty, *_places(tokens, pages))
        compiled = compiled.compile()
        name = re.escape(f"bf16[{pages},{kv_heads},{PAGE},")
        copies = re.findall(rf"= {name}\S* (?:copy|copy-start|transpose)\(", compiled.as_text())
        found.append((len(copies), compiled.memory_analysis().alias_size_in_bytes))
    assert found[0][0] > 0  # the control: pages that are kept
    assert found[1] == (0, 2 * empty.nbytes)
