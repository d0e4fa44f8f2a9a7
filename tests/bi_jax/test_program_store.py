"""Audited programs on disk: the same bits without a compilation, and never the wrong program."""

import jax
import jax.numpy as jnp
import pytest

from bi_jax import program_store
from bi_jax.audited import AuditedJit
from bi_jax.pallas_kernels.primitive import REFERENCE
from bi_jax.pallas_kernels.rms_norm import rms_norm
from bi_jax.program_store import ProgramStore, context_of, enable_program_store
from bi_jax.testing import assert_same_bits, operands


@pytest.fixture
def folder(tmp_path):
    yield enable_program_store(tmp_path / "programs")
    enable_program_store(None)


def new_jit(context, traced, *, audited=True):
    def step(x, scale, *, times):
        traced.append(times)
        for _ in range(times):
            x = rms_norm(x, scale, eps=1e-5, backend=REFERENCE)
        return x, {"copy": x}

    store = program_store.program_store({"context": context})
    return AuditedJit(step, audited=audited, static_argnames=("times",), store=store)


def run(jit, rows=3, times=1):
    x = operands.spread((rows, 64), "float32", seed=1)
    scale = operands.spread((64,), "float32", seed=2)
    return jit((rows, times), jnp.asarray(x), jnp.asarray(scale), times=times)


def test_found_again_with_its_report(folder):
    traced = []
    first, second = new_jit("a", traced), new_jit("a", traced)
    expected = run(first)
    assert traced == [1]
    assert_same_bits(run(second), expected)
    assert traced == [1]  # neither traced nor compiled again
    assert second.reports == first.reports
    assert second.reports[3, 1].ours == {"bi_rms_norm": 1}


@pytest.mark.parametrize(("context", "kinds"), [("b", {}), ("a", {"rows": 4}), ("a", {"times": 2})])
def test_another_program_is_not_taken_for_it(folder, context, kinds):
    traced = []
    run(new_jit("a", traced))
    run(new_jit(context, traced), **kinds)
    assert len(traced) == 2


def test_a_damaged_file_or_one_of_others_counts_as_none(folder):
    traced = []
    expected = run(new_jit("a", traced))
    (file,) = folder.iterdir()
    content = file.read_bytes()
    for bad in (b"", content[:-1], content[:100] + b"x" + content[101:]):
        file.write_bytes(bad)
        assert_same_bits(run(new_jit("a", traced)), expected)
        assert file.read_bytes()[:100] == content[:100] or len(file.read_bytes()) == len(content)
    file.chmod(0o666)
    count = len(traced)
    run(new_jit("a", traced))
    assert len(traced) == count + 1
    run(new_jit("a", traced))  # the file was replaced by one of our own
    assert len(traced) == count + 1


def test_a_full_disk_costs_time_only(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(program_store.os, "replace", full)
    run(new_jit("a", []))
    assert not list(folder.iterdir())


def test_what_is_not_audited_is_not_kept(folder):
    run(new_jit("a", [], audited=False))
    assert not list(folder.iterdir())


def test_what_fails_its_audit_is_not_kept(folder):
    store = program_store.program_store({})
    jit = AuditedJit(lambda x: jnp.exp(x), audited=True, static_argnames=(), store=store)
    for _ in range(2):
        with pytest.raises(Exception, match="exp"):
            jit("key", jnp.ones(3))
    assert not list(folder.iterdir())


def test_settings_source_and_flags_are_in_the_context(monkeypatch):
    seen = {context_of({}), context_of({"a": 1})}
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    seen.add(context_of({}))
    for name in ("_source_digest", "_processor", "_versions"):
        monkeypatch.setattr(program_store, name, lambda: "another")
        seen.add(context_of({}))
    with jax.default_matmul_precision("highest"):
        jax.config.update("jax_default_matmul_precision", "highest")
        seen.add(context_of({}))
    jax.config.update("jax_default_matmul_precision", None)
    assert len(seen) == 7


def test_off_by_default_and_refuses_a_folder_of_everybody(tmp_path):
    assert program_store.program_store({}) is None
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert enable_program_store(tmp_path / "open") is None
    assert program_store.program_store({}) is None


def test_arguments_tell_programs_apart():
    store = ProgramStore(program_store.Path("x"), "context")
    x = jnp.ones((2, 3))
    paths = [
        store.path(*a)
        for a in (
            ((x,), {}),
            ((x, x), {}),
            (({"a": x},), {}),
            ((x.astype(jnp.bfloat16),), {}),
            ((x[:1],), {}),
            ((x,), {"top": 1}),
            ((x,), {"top": True}),
        )
    ]
    assert len(set(paths)) == len(paths)
    assert store.path((x + 1,), {}) == paths[0]


def test_jax_has_its_cache_back_when_the_last_thread_is_done():
    before = jax.config.jax_enable_compilation_cache
    with program_store.fresh_compilation():
        with program_store.fresh_compilation():
            assert not jax.config.jax_enable_compilation_cache
        assert not jax.config.jax_enable_compilation_cache
    assert jax.config.jax_enable_compilation_cache == before
