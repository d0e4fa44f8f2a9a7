"""Compiled steps: the cache stays where it is, and programs can be made before they are needed."""

import re

import jax
import jax.numpy as jnp
import pytest

from bi_jax import flags
from bi_jax.engine import Engine
from bi_jax.kv_cache import bytes_a_page
from tests.bi_jax import tiny

PAGES = 700  # so many that the cache is far larger than anything else in a step


@pytest.fixture(scope="module")
def engine() -> Engine:
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 8, "token_buckets": (8,)}
    engine = tiny.new_engine(num_pages=PAGES, decode_steps=2, **settings)
    engine.warm_up()
    return engine


def copies_of(shape: str, program: str) -> list[str]:
    """Instructions of the optimised program that make another array of that shape by copying."""
    return re.findall(rf"= {re.escape(shape)}\S* (copy|transpose|copy-start)\(", program)


def test_no_step_copies_the_cache(engine: Engine):
    """Donated buffers come back as results, and nothing of the cache's size is made on the way."""
    config = tiny.CONFIG
    cache = PAGES * bytes_a_page(config, tiny.PAGE)
    pages = f"f32[{PAGES},{config.num_kv_heads},{tiny.PAGE},{config.head_dim}]"
    programs = engine.runner.step_program
    assert {(8, 8, 1), (8, 8, 2)} == {(k[0], k[1], k[4]) for k in programs.reports}
    for key in programs.reports:
        memory, text = programs.memory(key), programs.text(key)
        assert pages in text
        assert memory["shared"] >= cache
        assert memory["temporary"] < cache / (2 * config.num_layers)
        assert copies_of(pages, text) == []


def test_a_cache_that_is_not_donated_would_be_seen():
    """The control: the same store without donation."""
    shape = (PAGES, 2, tiny.PAGE, 16)
    pages = jax.ShapeDtypeStruct(shape, jnp.float32)
    kept = jax.jit(lambda p: p.at[3, :, 5].set(0.0)).lower(pages).compile()
    given = jax.jit(lambda p: p.at[3, :, 5].set(0.0), donate_argnums=0).lower(pages).compile()
    name = f"f32[{','.join(map(str, shape))}]"
    assert copies_of(name, kept.as_text()) and not copies_of(name, given.as_text())
    assert kept.memory_analysis().alias_size_in_bytes == 0


def test_warm_programs_are_the_ones_that_run(engine: Engine):
    before = dict(engine.runner.programs)
    assert before and engine.metrics().programs_compiled == len(before)
    prompts, params = tiny.prompts_of((5, 50)), tiny.params_of(2, max_tokens=12)
    engine.generate(prompts, params)
    assert engine.runner.programs == before


def test_an_engine_keeps_its_programs_on_disk(monkeypatch, tmp_path):
    """Also where something was compiled before: JAX looks for a cache but once."""
    monkeypatch.setenv(flags.CACHE_DIR_VARIABLE, str(tmp_path / "programs"))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    old = {name: getattr(jax.config, name) for name in (*names, "jax_enable_compilation_cache")}
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_enable_compilation_cache", True)
        jax.jit(lambda x: x + 1)(jnp.ones(3))
        tiny.new_engine(compilation_cache=False)
        assert jax.config.jax_compilation_cache_dir is None
        tiny.new_engine()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "programs")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.jit(lambda x: x * 3 + 1)(jnp.ones(5))
        assert list((tmp_path / "programs").iterdir())
    finally:
        for name, value in old.items():
            jax.config.update(name, value)
        flags.compilation_cache.reset_cache()
