"""Logits of every family equal those of transformers (float32, CPU) to 1e-4.

The expected logits are in tests/fixtures, made by make_fixtures.py. Both prompts of a family run
in one ragged batch. The controls: a model without its rope scaling, window, biases or norms of q
and k misses them by far, so the fixtures can see each of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.kv_cache import make_cache
from bi_jax.models.checkpoint import load_params, parameter_shapes, read_config
from bi_jax.models.config import RopeConfig, TransformerConfig
from bi_jax.models.transformer import Transformer, build_transformer, parameter_names
from bi_jax.ops import transformer_ops
from bi_jax.pallas_kernels.ragged import RaggedBatch
from tests.models.fixture_models import CHECKPOINTS, FAMILIES
from tests.models.numpy_decoder import decoder_logits

TOLERANCE = 1e-4
# What a deleted feature must miss the logits by.
POWER = 100 * TOLERANCE
PAGE_TOKENS = 32

Params = Mapping[str, Any]


def load(name: str) -> tuple[TransformerConfig, dict[str, jax.Array]]:
    config = read_config(CHECKPOINTS / name).replace(dtype="float32", param_dtype="float32")
    return config, load_params(CHECKPOINTS / name, config, dtype="float32")


def expected(name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    with np.load(CHECKPOINTS / name / "expected.npz") as arrays:
        return [arrays["prompt_0"], arrays["prompt_1"]], [arrays["logits_0"], arrays["logits_1"]]


def ragged(lengths: list[int]) -> tuple[RaggedBatch, int]:
    """A batch of whole prompts, each with pages of its own, and the number of pages."""
    pages_each = -(-max(lengths) // PAGE_TOKENS)
    # Pages in descending order: a page's id says nothing about its place.
    table = np.arange(len(lengths) * pages_each)[::-1].reshape(len(lengths), pages_each)
    batch = RaggedBatch(
        positions=jnp.asarray(np.concatenate([np.arange(n) for n in lengths]), jnp.int32),
        request=jnp.asarray(np.repeat(np.arange(len(lengths)), lengths), jnp.int32),
        query_start=jnp.asarray(np.cumsum([0, *lengths]), jnp.int32),
        page_table=jnp.asarray(table, jnp.int32),
        num_tokens=jnp.asarray(sum(lengths), jnp.int32),
    )
    return batch, table.size


def model_logits(
    config: TransformerConfig, params: Params, prompts: list[np.ndarray]
) -> list[np.ndarray]:
    model: Transformer = build_transformer(config, params)
    batch, num_pages = ragged([len(prompt) for prompt in prompts])
    cache = make_cache(config, num_pages=num_pages, page_size=PAGE_TOKENS)
    ops = transformer_ops(config, backend="reference")
    hidden, _ = model(jnp.asarray(np.concatenate(prompts)), batch, cache, ops)
    logits = np.asarray(model.logits(hidden, ops, batch.num_tokens))
    return np.split(logits, np.cumsum([len(prompt) for prompt in prompts])[:-1])


def worst(got: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    assert [g.shape for g in got] == [w.shape for w in wanted]
    return max(float(np.abs(g - w).max()) for g, w in zip(got, wanted, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_match(name: str) -> None:
    config, params = load(name)
    prompts, wanted = expected(name)
    assert min(logits.std() for logits in wanted) >= 1.0
    assert worst(model_logits(config, params, prompts), wanted) <= TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_a_decoder_in_float64_agrees(name: str) -> None:
    """Independent of the model: the layouts of the parameters are what the plan says."""
    config, params = load(name)
    prompts, wanted = expected(name)
    host = {path: np.asarray(value) for path, value in params.items()}
    assert worst([decoder_logits(config, host, p) for p in prompts], wanted) <= TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_asks_for_the_parameters_of_the_plan(name: str) -> None:
    config, params = load(name)
    assert parameter_names(build_transformer(config, params)) == parameter_shapes(config)


def without_scaling(config: TransformerConfig, params: Params) -> tuple[TransformerConfig, Params]:
    return config.replace(rope=RopeConfig(theta=config.rope.theta)), params


def without_window(config: TransformerConfig, params: Params) -> tuple[TransformerConfig, Params]:
    assert config.sliding_window is not None
    return config.replace(sliding_window=None), params


def with_window_of(size: int) -> Any:
    def change(config: TransformerConfig, params: Params) -> tuple[TransformerConfig, Params]:
        return config.replace(sliding_window=size), params

    return change


def without_bias(config: TransformerConfig, params: Params) -> tuple[TransformerConfig, Params]:
    kept = {path: value for path, value in params.items() if not path.endswith("qkv.bias")}
    assert len(params) - len(kept) == config.num_layers
    return config.replace(qkv_bias=False), kept


def without_qk_norm(config: TransformerConfig, params: Params) -> tuple[TransformerConfig, Params]:
    kept = {path: v for path, v in params.items() if "q_norm" not in path and "k_norm" not in path}
    assert len(params) - len(kept) == 2 * config.num_layers
    return config.replace(qk_norm=False), kept


def with_unit_qk_scales(
    config: TransformerConfig, params: Params
) -> tuple[TransformerConfig, Params]:
    unit = {path: jnp.ones_like(v) for path, v in params.items() if path.endswith("_norm.scale")}
    return config, {**params, **{path: v for path, v in unit.items() if "attention" in path}}


def with_theta(config: TransformerConfig, params: Params) -> tuple[TransformerConfig, Params]:
    return config.replace(rope=RopeConfig(theta=config.rope.theta * 2)), params


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama3", without_scaling),
        ("mistral", without_window),
        # A window is easily wrong by one.
        ("mistral", with_window_of(23)),
        ("mistral", with_window_of(25)),
        ("qwen2", without_bias),
        ("qwen3", without_qk_norm),
        ("qwen3", with_unit_qk_scales),
        ("llama2", with_theta),
        ("smollm2", with_theta),
    ],
)
def test_a_deleted_feature_is_seen(name: str, change: Any) -> None:
    config, params = change(*load(name))
    prompts, wanted = expected(name)
    assert worst(model_logits(config, params, prompts), wanted) > POWER
