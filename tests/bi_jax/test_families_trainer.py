"""Every family: what its engine emitted, a trainer recomputes in other programs, to the bit."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bi_jax import EngineConfig, RequestOutput, SamplingParams
from bi_jax.engine import Engine
from bi_jax.models.checkpoint import load_params, read_config
from bi_jax.models.transformer import Transformer, build_transformer
from bi_jax.stock_ops import stock_ops
from bi_jax.testing import assert_same_bits, bit_difference
from bi_jax.trainer_logprobs import token_logprobs
from tests.bi_jax.trainer_rows import Rows
from tests.models.fixture_models import CHECKPOINTS

FAMILIES = ("llama3", "mistral", "qwen2", "qwen3", "smollm2")
LONGEST_PROMPT = 40


class Fixture(NamedTuple):
    """Completions of one temperature and the length of the rows that hold them."""

    outputs: list[RequestOutput]
    temperature: float
    length: int

    def rows(self, side: str) -> Rows:
        return Rows.of(self.outputs, self.length, side)


@functools.cache
def model_of(name: str) -> Transformer:
    """The fixture in float32, with room for 256 new tokens."""
    folder = CHECKPOINTS / name
    config = read_config(folder)
    config = config.replace(dtype="float32", param_dtype="float32", max_position=512)
    return build_transformer(config, load_params(folder, config, dtype="float32"))


@functools.cache
def engine_of(name: str) -> Engine:
    settings = EngineConfig(
        max_num_seqs=16,
        max_num_batched_tokens=64,
        token_buckets=(16, 64),
        num_pages=96,
        max_model_len=320,
        audit=False,
    )
    return Engine(model_of(name), config=settings)


@functools.cache
def sampled(name: str, temperature: float, count: int, new: int) -> Fixture:
    """`count` completions of `new` tokens after prompts of 1 to 40."""
    rng = np.random.default_rng(5)
    vocab = model_of(name).config.vocab_size
    lengths = rng.integers(1, LONGEST_PROMPT + 1, count)
    prompts = [rng.integers(3, vocab, length).tolist() for length in lengths]
    params = [
        SamplingParams(
            temperature=temperature,
            seed=100 + i,
            max_tokens=new,
            ignore_eos=True,
            logprobs_mode="raw" if temperature == 1 else "scaled",
        )
        for i in range(count)
    ]
    return Fixture(engine_of(name).generate(prompts, params), temperature, LONGEST_PROMPT + new)


def trainer(name: str, temperature: float, *, remat: bool, differentiate: bool, ops: Any = None):
    """A user's jitted step: log-probabilities, out of value_and_grad or of the forward pass."""
    graph, params, rest = nnx.split(model_of(name), nnx.Param, ...)
    mode = "raw" if temperature == 1 else "scaled"

    def logprobs(params: nnx.State, rows: Rows) -> jax.Array:
        model = nnx.merge(graph, params, rest)
        return token_logprobs(
            model, rows.tokens, segment_ids=rows.mask, temperature=temperature, mode=mode, ops=ops
        )

    scored = jax.checkpoint(logprobs) if remat else logprobs

    def loss(params: nnx.State, rows: Rows) -> tuple[jax.Array, jax.Array]:
        out = scored(params, rows)
        return jnp.sum(jnp.where(rows.drawn, out, 0)), out

    if not differentiate:
        return jax.jit(lambda rows: scored(params, rows))
    step = jax.jit(jax.value_and_grad(loss, has_aux=True))

    def run(rows: Rows) -> jax.Array:
        (_, out), gradient = step(params, rows)
        assert all(np.isfinite(g).all() and np.any(g) for g in jax.tree.leaves(gradient))
        return out

    return run


def recomputed(step: Any, rows: Rows, size: int) -> np.ndarray:
    """float32 [tokens], what the step gives for everything drawn."""
    micros = [rows.micro(start, size) for start in range(0, len(rows.tokens), size)]
    return np.concatenate([np.asarray(step(micro))[micro.drawn] for micro in micros])


def test_the_families_are_all_there():
    configs = [model_of(name).config for name in FAMILIES]
    assert {c.family for c in configs} >= {"llama", "mistral", "qwen2", "qwen3"}
    assert any(c.sliding_window for c in configs)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "temperature"), [("llama3", 0.7), ("mistral", 1.0)])
def test_a_family_recomputes_what_it_emitted(name: str, temperature: float):
    fixture = sampled(name, temperature, 4, 48)
    rows = fixture.rows("left")
    step = trainer(name, temperature, remat=False, differentiate=False)
    assert_same_bits(recomputed(step, rows, 2), rows.emitted[rows.drawn])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_64_completions_of_256_tokens(name: str, record_property):
    """Micro-batches of 1, 2, 4 and 16, both paddings, remat and not, two temperatures."""
    cases = (
        (1.0, 1, "left", True, False),
        (1.0, 16, "right", False, True),
        (0.7, 2, "right", False, False),
        (0.7, 4, "left", True, True),
    )
    for temperature, size, side, remat, differentiate in cases:
        rows = sampled(name, temperature, 64, 256).rows(side)
        assert rows.drawn.sum() == 64 * 256
        step = trainer(name, temperature, remat=remat, differentiate=differentiate)
        if differentiate:  # a backward pass of all would take minutes
            rows = rows.micro(0, 16)
        context = f"{name} {temperature} {size} {side} remat={remat} grad={differentiate}"
        assert_same_bits(recomputed(step, rows, size), rows.emitted[rows.drawn], context=context)
    rows = sampled(name, 1.0, 64, 256).rows("left")
    step = trainer(name, 1.0, remat=False, differentiate=False, ops=stock_ops())
    stock, emitted = recomputed(step, rows, 16), rows.emitted[rows.drawn]
    assert bit_difference(stock, emitted) is not None  # the control
    error = np.abs(stock - emitted)
    differing = int((stock.view(np.int32) != emitted.view(np.int32)).sum())
    record_property("stock", f"{differing} of {error.size} differ, by up to {error.max():.3g}")
    print(name, "stock:", differing, "of", error.size, "differ, by up to", error.max())
