"""Kernels that change arrays in place, as a GPU's compiler is given them."""

import re

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.mlir import ir

from bi_jax.pallas_kernels import in_place
from bi_jax.pallas_kernels.in_place import run_in_place
from bi_jax.pallas_kernels.primitive import HOPPER
from bi_jax.pallas_kernels.ragged import RaggedBatch
from bi_jax.pallas_kernels.rope import rope_into_pages
from bi_jax.pallas_kernels.rope.kernel_hopper import rope_into_pages_hopper
from tests.source_tree import ROOT

LAYERS, TOKENS, PAGES = 4, 8, 5


def _looped(qkv, cos, sin, k_pages, v_pages, batch):
    """Slices of stacked arrays go in, and what comes out is stacked."""

    def layer(carry, sliced):
        return carry, rope_into_pages(sliced[0], cos, sin, *sliced[1:], batch, backend=HOPPER)

    return lax.scan(layer, None, (qkv, k_pages, v_pages))[1]


def _lowered():
    def spec(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype)

    def int32(*dims):
        return spec(*dims, dtype=jnp.int32)

    batch = RaggedBatch(
        positions=int32(TOKENS),
        request=int32(TOKENS),
        query_start=int32(2),
        page_table=int32(1, 2),
        num_tokens=int32(),
    )
    table, pages = spec(TOKENS, 32, dtype=jnp.float32), spec(LAYERS, PAGES, 3, 64, 64)
    args = spec(LAYERS, TOKENS, 3, 5, 64), table, table, pages, pages, batch
    program = jax.jit(lambda *a: _looped(*a))  # traced anew
    return program.trace(*args).lower(lowering_platforms=("cuda",)).compiler_ir()


def unguarded(program) -> list[str]:
    """What makes an operand or takes a result of an in-place custom call and is no barrier."""
    found, calls = [], 0

    def look(op):
        nonlocal calls
        if op.name == "stablehlo.custom_call" and "output_operand_aliases" in op.attributes:
            calls += len(op.attributes["output_operand_aliases"]) > 0
            beside = [getattr(operand.owner, "name", "argument") for operand in op.operands]
            beside += [use.owner.name for result in op.results for use in result.uses]
            found.extend(name for name in beside if name != "stablehlo.optimization_barrier")
        return ir.WalkResult.ADVANCE

    program.operation.walk(look)
    assert calls == 1
    return found


def test_slices_and_updates_are_kept_off_by_barriers():
    assert unguarded(_lowered()) == []


def test_missing_barriers_are_seen(monkeypatch):
    monkeypatch.setattr(in_place.lax, "optimization_barrier", lambda values: values)
    rope_into_pages_hopper.clear_cache()
    assert set(unguarded(_lowered())) == {"argument", "stablehlo.reshape"}
    rope_into_pages_hopper.clear_cache()


def test_arrays_are_changed_and_the_given_ones_kept():
    def kernel(x, first, second):
        first[1:3] = x
        second[...] = second[...] + 1
        return x + x

    first, second = jnp.zeros(4), jnp.arange(3)
    result, changed = jax.jit(lambda *a: run_in_place(kernel, a[:1], a[1:]))(
        jnp.ones(2), first, second
    )
    assert result.tolist() == [2, 2]
    assert [a.tolist() for a in changed] == [[0, 1, 1, 0], [1, 2, 3]]
    assert first.tolist() == [0] * 4 and second.tolist() == [0, 1, 2]


def test_no_kernel_changes_arrays_in_another_way():
    folders = [ROOT / name for name in ("bi_jax", "models", "pallas_kernels")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    marks = re.compile(r"new_ref|input_output_aliases|operand_output_aliases")
    found = {p.relative_to(ROOT).as_posix() for p in files if marks.search(p.read_text())}
    assert found == {"pallas_kernels/in_place.py"}
