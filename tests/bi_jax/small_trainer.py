"""A model with every kind of parameter, completions of its engine, and a trainer's loss on them."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bi_jax import EngineConfig, RequestOutput, SamplingParams
from bi_jax.engine import Engine
from bi_jax.models.config import RopeConfig, TransformerConfig
from bi_jax.models.ops import TransformerOps
from bi_jax.models.transformer import Transformer, build_transformer, parameter_names
from bi_jax.trainer_logprobs import token_logprobs

CONFIG = TransformerConfig(
    family="qwen3",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4),
    max_position=256,
    sliding_window=140,
    qkv_bias=True,
    qk_norm=True,
    tie_word_embeddings=True,
)
# Prompt and completion lengths of a global batch of eight: one block of keys, two, and very short.
LENGTHS = ((3, 150), (40, 12), (1, 1), (17, 33), (60, 9), (5, 70), (25, 21), (2, 40))
LENGTH = 160


def parameters(config: TransformerConfig = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 parameters, biases and scales among them."""
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(seed)
    params = {}
    for name, shape in parameter_names(model).items():
        if name.endswith("scale"):
            params[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        else:
            width = 0.5 if name.startswith("embed") else shape[-1] ** -0.5
            params[name] = (width * rng.standard_normal(shape)).astype(np.float32)
    return params


@functools.cache
def model(dtype: str = "float32") -> Transformer:
    """Float32 parameters, computed with in `dtype`."""
    return build_transformer(CONFIG.replace(dtype=dtype), parameters())


@functools.cache
def completions(dtype: str = "float32", temperature: float = 1.0) -> tuple[RequestOutput, ...]:
    """Eight ragged completions as an engine of one program emitted them."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, CONFIG.vocab_size, length).tolist() for length, _ in LENGTHS]
    params = [
        SamplingParams(
            temperature=temperature,
            seed=i,
            max_tokens=new,
            ignore_eos=True,
            logprobs_mode="raw" if temperature == 1 else "scaled",
        )
        for i, (_, new) in enumerate(LENGTHS)
    ]
    return tuple(_engine(dtype).generate(prompts, params))


@functools.cache
def _engine(dtype: str) -> Engine:
    config = EngineConfig(
        max_num_seqs=8,
        max_num_batched_tokens=16,
        token_buckets=(16,),
        page_size=32,
        num_pages=64,
        max_model_len=256,
    )
    return Engine(model(dtype), config=config)


class Batch(NamedTuple):
    """[B, T] each: ids, 1 where there is a token, the emitted log-probabilities, their weights."""

    tokens: np.ndarray
    mask: np.ndarray
    emitted: np.ndarray
    weights: np.ndarray

    def rows(self, start: int, count: int) -> "Batch":
        return Batch(*(a[start : start + count] for a in self))


def batch_of(
    outputs: tuple[RequestOutput, ...], *, side: str = "right", length: int = LENGTH
) -> Batch:
    """Pads to `length` on one side, or "hole": prompts to their left and completions to theirs."""
    rng = np.random.default_rng(2)
    shape = (len(outputs), length)
    tokens = rng.integers(0, CONFIG.vocab_size, shape).astype(np.int32)  # padding holds anything
    mask = np.zeros(shape, np.int32)
    emitted, weights = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for row, output in enumerate(outputs):
        prompt, completion = output.prompt_token_ids, output.outputs[0]
        count, new = len(prompt), len(completion.token_ids)
        start = length - count - new if side == "left" else 0
        after = length - new if side == "hole" else start + count
        tokens[row, start : start + count] = prompt
        tokens[row, after : after + new] = completion.token_ids
        mask[row, start : start + count] = mask[row, after : after + new] = 1
        emitted[row, after : after + new] = completion.logprobs
        weights[row, after : after + new] = np.random.default_rng(100 + row).standard_normal(new)
    return Batch(tokens, mask, emitted, weights / np.float32(np.count_nonzero(weights)))


def split(dtype: str = "float32") -> tuple[Any, nnx.State, nnx.State]:
    """Graph, parameters, and the rest."""
    return nnx.split(model(dtype), nnx.Param, ...)


@functools.cache
def train_step(dtype: str = "float32", remat: bool = False, ops: TransformerOps | None = None):
    """A user's jitted ``(params, batch) -> gradients, (loss, logprobs)``."""
    graph, _, rest = split(dtype)

    def logprobs(params: nnx.State, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        merged = nnx.merge(graph, params, rest)
        return token_logprobs(merged, tokens, segment_ids=mask, ops=ops)

    if remat:
        logprobs = jax.checkpoint(logprobs)

    def loss(params: nnx.State, batch: Batch) -> tuple[jax.Array, jax.Array]:
        out = logprobs(params, batch.tokens, batch.mask)
        return jnp.sum(out * batch.weights), out

    return jax.jit(jax.grad(loss, has_aux=True))


def host(tree: Any) -> dict[str, np.ndarray]:
    """An nnx state as NumPy arrays by name."""
    flat = nnx.to_flat_state(tree)
    return {".".join(map(str, path)): np.asarray(v[...]) for path, v in flat}
