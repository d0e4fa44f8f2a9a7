"""A tiny random model and engines on it: little to compile, yet several pages and KV blocks."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from flax import nnx

from bi_jax import EngineConfig, RequestOutput, SamplingParams
from bi_jax.engine import Engine
from bi_jax.models.config import RopeConfig, TransformerConfig
from bi_jax.models.ops import TransformerOps
from bi_jax.models.transformer import Transformer, build_transformer, parameter_names
from bi_jax.testing import assert_same_bits

VOCAB = 320
CONTEXT = 512
PAGE = 32
# Tokens whose embeddings are NaN and infinite. No row ever draws them, see `parameters`.
NAN_TOKEN, INF_TOKEN = VOCAB - 1, VOCAB - 2
ORDINARY = VOCAB - 2  # ids below this are ordinary

CONFIG = TransformerConfig(
    family="llama",
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4),
    max_position=CONTEXT,
)
# Contexts of up to 4 KV blocks and 16 pages.
ENGINE = EngineConfig(
    max_num_seqs=64,
    max_num_batched_tokens=64,
    token_buckets=(8, 64),
    page_size=PAGE,
    num_pages=160,
)


def parameters(config: TransformerConfig = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    """Random parameters by name, with which completions hold many distinct tokens.

    The output projection leans towards a random cycle through all ordinary tokens, or greedy
    completions of so small a model would soon go round in circles of a few tokens. Column 0 of the
    residual stream is the same large number everywhere: no block adds to it. The output projection
    reads it for the two poisonous tokens only, so that their logits are far below all others.
    """
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(seed)
    params = {}
    for name, shape in parameter_names(model).items():
        if name.endswith("scale"):
            params[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        else:
            width = 1.0 if name.startswith("embed") else shape[-1] ** -0.5
            params[name] = (width * rng.standard_normal(shape)).astype(np.float32)
    params["embed.embedding"][:, 0] = 8.0
    for layer in range(config.num_layers):
        params[f"layers.{layer}.attention.out.weight"][0] = 0.0
        params[f"layers.{layer}.mlp.down.weight"][0] = 0.0
    params["final_norm.scale"][0] = 1.0
    head, embedding = params["lm_head.weight"], params["embed.embedding"]
    order = rng.permutation(config.vocab_size - 2)
    head *= 0.5
    head[order] += embedding[np.roll(order, 1)] * config.hidden_size**-0.5
    head[:, 0] = 0.0
    head[[NAN_TOKEN, INF_TOKEN], 0] = -50.0
    embedding[NAN_TOKEN], embedding[INF_TOKEN] = np.nan, np.inf
    return params


@functools.cache
def model(seed: int = 0) -> Transformer:
    return build_transformer(CONFIG, parameters(seed=seed))


def new_engine(ops: TransformerOps | None = None, **changes: Any) -> Engine:
    """An engine of its own, which compiles its own programs; `ops` in place of ours."""
    return Engine(model(), config=dataclasses.replace(ENGINE, **changes), ops=ops)


@functools.cache
def shared_engine() -> Engine:
    """The one engine of a test process: its programs are compiled once. Derive others from it."""
    return new_engine()


def rescheduled(engine: Engine | None = None, **changes: Any) -> Engine:
    """An idle engine on the programs of another one (None: the shared one), rescheduled."""
    return (engine or shared_engine()).rescheduled(**changes)


def prompts_of(lengths: Iterable[int], seed: int = 0) -> list[list[int]]:
    """Random prompts of ordinary tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, ORDINARY, length).tolist() for length in lengths]


def params_of(count: int, *, max_tokens: int = 128, **others: Any) -> list[SamplingParams]:
    """Greedy and sampled by turns, ragged in length, never ended by a token."""
    return [
        SamplingParams(
            temperature=(1.0, 0.0, 0.7)[i % 3],
            seed=1000 + i,
            max_tokens=max_tokens + 5 * (i % 4),
            ignore_eos=True,
            **others,
        )
        for i in range(count)
    ]


def digest(outputs: Sequence[RequestOutput]) -> str:
    """Of every completion's bits and every prompt's log-probabilities."""
    state = hashlib.sha256()
    for output in outputs:
        for completion in output.outputs:
            state.update(completion.bits())
        if output.prompt_logprobs is not None:
            state.update(output.prompt_logprobs.tobytes())
    return state.hexdigest()


def distinct_tokens(outputs: Sequence[RequestOutput]) -> int:
    """The smallest number of distinct tokens in one completion."""
    return min(len(set(c.token_ids)) for output in outputs for c in output.outputs)


def assert_same_completions(
    got: Sequence[RequestOutput], expected: Sequence[RequestOutput], context: str = ""
) -> None:
    """Every completion to the bit; where one side is shorter, its tokens must be a prefix."""
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        for ours, theirs in zip(a.outputs, b.outputs, strict=True):
            count = min(len(ours.token_ids), len(theirs.token_ids))
            where = f"{context}: request {index}, completion {ours.index}"
            assert_same_bits(
                np.array(ours.token_ids[:count], np.int32),
                np.array(theirs.token_ids[:count], np.int32),
                context=f"{where}, tokens",
            )
            assert_same_bits(
                ours.logprobs[:count], theirs.logprobs[:count], context=f"{where}, logprobs"
            )
            full = (a.sampling_params, b.sampling_params)
            assert count == min(p.max_tokens for p in full if p is not None), f"{where} is short"


def run_all(
    engine: Engine,
    arrivals: Callable[[int], Sequence[Any]],
    wanted: int,
) -> dict[str, RequestOutput]:
    """Steps until `wanted` requests are done; `arrivals(step)` are the requests added before it."""
    done: dict[str, RequestOutput] = {}
    step = 0
    while len(done) < wanted:
        for request in arrivals(step):
            engine.add_request(request)
        done.update((output.request_id, output) for output in engine.step())
        step += 1
        assert step < 20_000, f"only {len(done)} of {wanted} requests ended"
    return done
