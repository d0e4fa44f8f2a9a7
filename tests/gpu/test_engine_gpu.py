"""The engine on a card: our kernels ran, and no company changes a completion's bits."""

import dataclasses

import jax
import numpy as np
import pytest

from bi_jax import Engine, EngineConfig, SamplingParams
from bi_jax.check import first_difference
from bi_jax.models import build_transformer, random_params
from bi_jax.models.families.qwen3 import QWEN3_0_6B
from bi_jax.stock_ops import stock_ops

pytestmark = pytest.mark.gpu

LENGTHS = (5, 64, 129, 300, 17, 256, 1, 90)
TOKENS = 128


@pytest.fixture(scope="module")
def model():
    config = dataclasses.replace(
        QWEN3_0_6B, num_layers=3, dtype="bfloat16", param_dtype="bfloat16", max_position=4096
    )
    return build_transformer(config, random_params(config, 0))


def make_engine(model, ops=None, **settings):
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 1024, "max_model_len": 1024}
    config = EngineConfig(**{**defaults, "token_buckets": (8, 64, 1024), **settings})
    return Engine(model, config=config, ops=ops)


def prompts_and_params(vocab):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab, n).tolist() for n in LENGTHS]
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=TOKENS, ignore_eos=True)
        for i, t in enumerate((0.0, 1.0) * 4)
    ]
    return prompts, params


def differences(a, b):
    return [d for x, y in zip(a, b, strict=True) if (d := first_difference(x, y)) is not None]


def test_alone_together_and_in_chunks(model):
    prompts, params = prompts_and_params(model.config.vocab_size)
    engine = make_engine(model)
    together = engine.generate(prompts, params)
    assert len({t for out in together for t in out.outputs[0].token_ids}) > 100
    backwards = engine.generate(prompts[::-1], params[::-1])[::-1]
    assert not differences(together, backwards)
    alone = [engine.generate([p], [s])[0] for p, s in zip(prompts, params, strict=True)]
    assert not differences(together, alone)
    chunked = make_engine(model, max_num_batched_tokens=64, token_buckets=(64,))
    assert not differences(together, chunked.generate(prompts, params))


def test_stock_ops_do_differ(model):
    """The control: the same requests through stock XLA change with their company."""
    prompts, params = prompts_and_params(model.config.vocab_size)
    engine = make_engine(model, ops=stock_ops())
    together = engine.generate(prompts, params)
    alone = [engine.generate([p], [s])[0] for p, s in zip(prompts, params, strict=True)]
    assert differences(together, alone)


def test_it_is_a_card():
    assert jax.default_backend() == "gpu"
