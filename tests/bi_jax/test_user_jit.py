"""token_logprobs inside a user's own jit has the sampler's bits without any flag."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bi_jax import EngineConfig, SamplingParams, audit, flags, token_logprobs
from bi_jax.engine import Engine
from bi_jax.models.transformer import build_transformer, random_params
from bi_jax.testing import assert_same_bits
from tests.bi_jax.test_audit_programs import CONFIG

PROMPT = [3, 1, 4, 1, 5]
SETTINGS = EngineConfig(
    max_num_seqs=8, max_num_batched_tokens=8, token_buckets=(8,), max_model_len=64
)


def held_without_a_pin():
    """The user's options are JAX's defaults, then the opposite of what we would ask for."""
    model = build_transformer(CONFIG, random_params(CONFIG, 2))
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    completion = Engine(model, config=SETTINGS).generate(PROMPT, params)[0].outputs[0]
    tokens = jnp.asarray([[*PROMPT, *completion.token_ids]], jnp.int32)
    graph, state = nnx.split(model)

    def scored(state, tokens):
        return token_logprobs(nnx.merge(graph, state), tokens)

    def mine(state, tokens):
        scale = jnp.exp(jnp.mean(tokens.astype(jnp.float32)) * 1e-3)  # the user's own arithmetic
        return scored(state, tokens), scale

    # The reason why it holds: there is nothing that an option could drop or reorder.
    assert audit(scored, state, tokens, compiled=False).passed
    for options in (
        None,
        {"xla_allow_excess_precision": True},
        flags.compiler_options(jax.default_backend()),
    ):
        logprobs, _ = jax.jit(mine, compiler_options=options)(state, tokens)
        assert_same_bits(np.asarray(logprobs)[0, len(PROMPT) :], completion.logprobs)


def test_on_a_cpu():
    held_without_a_pin()


@pytest.mark.gpu
def test_on_a_gpu():
    held_without_a_pin()
