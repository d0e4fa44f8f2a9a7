"""The trainer on a card: it recomputes what was emitted, and its gradients keep their bits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bi_jax import Engine, EngineConfig, SamplingParams, token_logprobs
from bi_jax.audit_program import audit_compiled
from bi_jax.gradient_sum import accumulate
from bi_jax.models import (
    Transformer,
    build_transformer,
    find_demo_model,
    load_params,
    random_params,
    read_config,
)
from bi_jax.models.families.llama import LLAMA_3_1_8B
from bi_jax.stock_ops import stock_ops
from bi_jax.testing import assert_same_bits, bit_difference
from tests.bi_jax.trainer_rows import Rows

pytestmark = pytest.mark.gpu
ROWS, NEW, LENGTH = 64, 256, 320
GRADIENT_ROWS = 8
DTYPES = dict(dtype="bfloat16", param_dtype="float32")
MODELS = ("SmolLM2-135M-Instruct", "two layers of Llama-3.1-8B")


@functools.cache
def model_of(name: str) -> Transformer:
    if name == MODELS[0]:
        source = find_demo_model()
        config = read_config(source).replace(**DTYPES, max_position=1024)
        return build_transformer(config, load_params(source, config, dtype="float32"))
    config = LLAMA_3_1_8B.replace(
        **DTYPES,
        num_layers=2,
        max_position=1024,
        vocab_size=32768,
        bos_token_id=1,
        eos_token_ids=(2,),
        pad_token_id=None,
    )
    return build_transformer(config, random_params(config, 0))


@functools.cache
def sampled(name: str, temperature: float) -> tuple[Any, ...]:
    """64 completions of 256 tokens after prompts of 1 to 64."""
    model = model_of(name)
    settings = EngineConfig(
        max_num_seqs=ROWS, max_num_batched_tokens=512, max_model_len=LENGTH, num_pages=400
    )
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, LENGTH - NEW + 1, ROWS)
    prompts = [rng.integers(5, model.config.vocab_size, n).tolist() for n in lengths]
    params = [
        SamplingParams(
            temperature=temperature,
            seed=i,
            max_tokens=NEW,
            ignore_eos=True,
            logprobs_mode="raw" if temperature == 1 else "scaled",
        )
        for i in range(ROWS)
    ]
    outputs = Engine(model, config=settings).generate(prompts, params)
    assert min(len(set(o.outputs[0].token_ids)) for o in outputs) > NEW // 16
    return tuple(outputs)


def rows_of(name: str, temperature: float, side: str) -> Rows:
    return Rows.of(sampled(name, temperature), LENGTH, side)


def logprobs_of(name: str, params: Any, tokens: Any, mask: Any, temperature: float) -> jax.Array:
    graph, _, rest = nnx.split(model_of(name), nnx.Param, ...)
    return token_logprobs(
        nnx.merge(graph, params, rest),
        tokens,
        segment_ids=mask,
        temperature=temperature,
        mode="raw" if temperature == 1 else "scaled",
        scan_layers=True,
    )


def parameters(name: str) -> nnx.State:
    return nnx.split(model_of(name), nnx.Param, ...)[1]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("temperature", "size", "side", "remat"),
    [
        (1.0, 1, "left", False),
        (1.0, 16, "right", True),
        (0.7, 2, "right", False),
        (0.7, 4, "left", True),
    ],
)
def test_the_trainer_recomputes_what_was_emitted(name, temperature, size, side, remat):
    def run(params, tokens, mask):
        return logprobs_of(name, params, tokens, mask, temperature)

    run = jax.jit(jax.checkpoint(run) if remat else run)
    rows, params = rows_of(name, temperature, side), parameters(name)
    for start in range(0, ROWS, size):
        micro = rows.micro(start, size)
        found = np.asarray(run(params, micro.tokens, micro.mask))
        assert_same_bits(found[micro.drawn], micro.emitted[micro.drawn])


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_equal_for_every_micro_batch(name):
    rows, params = rows_of(name, 1.0, "right").micro(0, GRADIENT_ROWS), parameters(name)
    weights = np.random.default_rng(1).standard_normal(rows.drawn.shape).astype(np.float32)
    weights = np.where(rows.drawn, weights, np.float32(0))

    def step(params, tokens, mask, weights):
        out, pull = jax.vjp(lambda p: logprobs_of(name, p, tokens, mask, 1.0), params)
        return out, pull(weights)[0]

    expected, norms = None, []
    for size in (1, 2, 4, 8):
        first = rows.micro(0, size)
        traced = jax.jit(step).trace(params, first.tokens, first.mask, weights[:size])
        program = traced.lower().compile()
        assert "bi_matmul_weight_gradient" in audit_compiled(traced, program).ours
        total = None
        for start in range(0, GRADIENT_ROWS, size):
            micro = rows.micro(start, size)
            operands = (params, micro.tokens, micro.mask, weights[start : start + size])
            out, gradient = program(*operands)
            assert_same_bits(np.asarray(out)[micro.drawn], micro.emitted[micro.drawn])
            total = accumulate(total, gradient, sequences=size)
            if size == 1:
                norms.append(np.asarray(jax.tree.leaves(gradient)[-1]))
        assert total is not None
        found = [np.asarray(leaf) for leaf in jax.tree.leaves(total.result())]
        assert all(np.isfinite(leaf).all() and leaf.any() for leaf in found)
        expected = expected or found
        for got, wanted in zip(found, expected, strict=True):
            assert_same_bits(got, wanted)
    assert expected is not None
    plain = functools.reduce(np.add, norms)  # the control: one after the other
    assert bit_difference(plain, expected[-1]) is not None


@pytest.mark.parametrize("name", MODELS)
def test_a_stock_trainer_computes_something_else(name):
    rows = rows_of(name, 1.0, "right").micro(0, 16)
    model = model_of(name)
    stock = jax.jit(lambda t, m: token_logprobs(model, t, segment_ids=m, ops=stock_ops()))
    found, emitted = np.asarray(stock(rows.tokens, rows.mask))[rows.drawn], rows.emitted[rows.drawn]
    assert bit_difference(found, emitted) is not None
    error = np.abs(found - emitted)
    print(f"{name}: stock differs by up to {error.max():.3g}, {error.mean():.3g} on average")
    assert jnp.isfinite(error).all()
