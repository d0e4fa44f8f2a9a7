"""On a card the cache takes what weights and steps leave of the memory, and the steps do fit."""

import jax
import pytest

from bi_jax import Engine, EngineConfig
from bi_jax.cache_size import GIB
from bi_jax.kv_cache import bytes_a_page
from bi_jax.models.families.qwen3 import QWEN3_8B
from tests.gpu.engine_ways import load_of, random_model, together

pytestmark = pytest.mark.gpu


def test_pages_take_nine_tenths_of_what_is_left():
    device = jax.devices()[0]
    assert device.memory_stats()["bytes_limit"] > 90 * GIB, "give the process most of the card"
    model = random_model(QWEN3_8B.replace(max_position=4096))
    weights = device.memory_stats()["bytes_in_use"]
    config = EngineConfig(
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        token_buckets=(64, 8192),
        max_model_len=2048,
    )
    engine = Engine(model, config=config)
    load = load_of(model.config.vocab_size, requests=64, tokens=8)
    assert all(len(o.outputs[0].token_ids) == 8 for o in together(engine, load))
    program = engine.runner.step_program
    activations = max(program.memory(key)["temporary"] for key in program.reports)
    limit = device.memory_stats()["bytes_limit"]
    pages = engine.runner.config.num_pages * bytes_a_page(model.config, config.page_size)
    share = pages / (limit - weights - activations)
    print(
        f"\nlimit {limit / GIB:.2f} GiB, weights {weights / GIB:.2f}, steps {activations / GIB:.2f}"
    )
    print(f"pages {pages / GIB:.2f} GiB, {share:.3f} of what is left")
    assert {key[0] for key in engine.runner.programs} == {64, 8192}
    assert 0.9 <= share <= 1
