#!/usr/bin/env python3
"""Times `token_logprobs` and its gradient on 8B-shaped layers against stock XLA and cuDNN.

    python scripts/bench_trainer.py --layers 2 --rows 4 --length 2048

The peer is a plain jnp transformer of the same weights in bfloat16, differentiated by JAX through
the whole batch, its logits in checkpointed chunks. Both are timed by turns in one run on the host's
clock, which is fair for programs of ten milliseconds and more. `--json` also writes where the time
goes, by the profiler. On a CPU it shows that it runs.
"""

import argparse
import functools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bi_jax import flags, token_logprobs
from bi_jax.models import build_transformer, random_params
from bi_jax.models.families.llama import LLAMA_3_1_8B, SMOLLM2_135M

# So that it also runs as a file, whose folder and not the repository is then on the path.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from engine_profile import CLASSES, by_class, by_name, kernels_of
from run_header import run_header

REPEATS = 3  # timed a turn
CHUNK = 2048  # rows of logits at a time, in the peer
SHAPES = {"8b": LLAMA_3_1_8B, "smollm2": SMOLLM2_135M}
# As in `engine_profile`; the first that fits, so backward passes come before what they consist of.
BACKWARD = (
    ("bi_attention_gradient", "attention backward"),
    ("bi_matmul_weight_gradient", "weight gradients"),
    ("bi_swiglu_gradient", "SwiGLU backward"),
    ("bi_rms_norm_gradient", "norms backward"),
    ("bi_rope_gradient", "rotation backward"),
    ("bi_target_logprobs_gradient", "log-probabilities backward"),
    ("bi_embedding_gradient", "token table"),
    ("bi_tree_sum|bi_merge_gradients|bi_nonnegative", "sums over rows"),
)


def peer(model: Any, tokens: jax.Array) -> jax.Array:
    """Log-probabilities of tokens[:, 1:], flat, as fast as plain JAX gives them."""
    config = model.config
    dtype = jnp.dtype(config.dtype)
    rows, length = tokens.shape
    cos, sin = (t[...][None, :length, None] for t in (model.rope.cos, model.rope.sin))
    attention = "cudnn" if jax.default_backend() == "gpu" else None

    def weight(linear: Any) -> jax.Array:
        return linear.weight[...].astype(dtype)

    def norm(x: jax.Array, scale: Any) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide * wide, -1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean + config.rms_norm_eps) * scale[...]).astype(dtype)

    def rotated(x: jax.Array) -> jax.Array:
        low, high = jnp.split(x.astype(jnp.float32), 2, -1)
        turned = (low * cos - high * sin, high * cos + low * sin)
        return jnp.concatenate(turned, -1).astype(dtype)

    x = model.embed.embedding[...][tokens].astype(dtype)
    for layer in model.layers:
        qkv = jnp.einsum(
            "btd,ngkd->btngk", norm(x, layer.attn_norm.scale), weight(layer.attention.qkv)
        )
        q = rotated(qkv[:, :, :, :-2].reshape(rows, length, -1, config.head_dim))
        k, v = rotated(qkv[:, :, :, -2]), qkv[:, :, :, -1]
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
        x = x + mixed.reshape(rows, length, -1) @ weight(layer.attention.out).T
        both = jnp.einsum("btd,pfd->btpf", norm(x, layer.mlp_norm.scale), weight(layer.mlp.gate_up))
        x = x + (jax.nn.silu(both[:, :, 0]) * both[:, :, 1]) @ weight(layer.mlp.down).T
    x = norm(x, model.final_norm.scale)
    head = (
        model.embed.embedding[...].astype(dtype) if model.lm_head is None else weight(model.lm_head)
    )

    @jax.checkpoint
    def score(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden, target = part
        logits = jnp.dot(hidden, head.T, preferred_element_type=jnp.float32)
        picked = jnp.take_along_axis(logits, target[:, None], 1)[:, 0]
        return picked - jax.nn.logsumexp(logits, -1)

    hidden, target = x[:, :-1].reshape(-1, config.hidden_size), tokens[:, 1:].reshape(-1)
    extra = -len(target) % CHUNK
    hidden = jnp.pad(hidden, ((0, extra), (0, 0))).reshape(-1, CHUNK, config.hidden_size)
    target = jnp.pad(target, (0, extra)).reshape(-1, CHUNK)
    return jax.lax.map(score, (hidden, target)).reshape(-1)[: rows * (length - 1)]


def programs(args: argparse.Namespace) -> tuple[dict[tuple[str, str], Any], tuple[Any, ...]]:
    """(who, what) to a compiled program, and their operands."""
    config = SHAPES[args.shape]
    layers = args.layers or config.num_layers
    config = config.replace(
        num_layers=layers, dtype="bfloat16", param_dtype="float32", max_position=args.length
    )
    model = build_transformer(config, random_params(config, 0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    rng = np.random.default_rng(0)
    shape = (args.rows, args.length)
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, shape), jnp.int32)

    def ours(params: nnx.State, tokens: jax.Array) -> jax.Array:
        return token_logprobs(nnx.merge(graph, params, rest), tokens)

    def theirs(params: nnx.State, tokens: jax.Array) -> jax.Array:
        return peer(nnx.merge(graph, params, rest), tokens)

    def gradient(score: Callable[..., jax.Array]) -> Callable[..., Any]:
        return jax.grad(lambda params, tokens: jnp.sum(score(params, tokens)))

    def compiled(name: tuple[str, str], run: Callable[..., Any], pinned: Any) -> Any:
        started = time.perf_counter()
        program = jax.jit(run, compiler_options=pinned).lower(params, tokens).compile()
        print(f"{', '.join(name)}: compiled in {time.perf_counter() - started:.1f} s", flush=True)
        return program

    options = flags.compiler_options(jax.default_backend())
    jobs = {}
    with ThreadPoolExecutor(4) as pool:
        for who, score, pinned in (("peer", theirs, None), ("ours", ours, options)):
            for what, run in (("forward", score), ("forward and backward", gradient(score))):
                jobs[who, what] = pool.submit(compiled, (who, what), run, pinned)
    return {name: job.result() for name, job in jobs.items()}, (params, tokens)


def profiled(found: dict[tuple[str, str], Any], operands: tuple[Any, ...]) -> dict[str, Any]:
    """Microseconds by class and by kernel of each program, on a card."""
    parts = {}
    for (who, what), program in found.items():
        run = functools.partial(program, *operands)
        kernels = kernels_of(run, program.as_text())
        classes = by_class(kernels, (*BACKWARD, *CLASSES))
        parts[f"{who}, {what}"] = {"by_class": classes, "by_kernel": by_name(kernels)[:60]}
        print(f"{who}, {what}: {classes}", flush=True)
    return parts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, help="unset: all of them")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, help="times, and a profile on a card")
    args = parser.parse_args(argv)
    found, operands = programs(args)
    times: dict[tuple[str, str], list[float]] = {}
    for what in ("forward", "forward and backward"):
        for turn in range(args.rounds):
            # Each first in turn, and not timed until it has run: what ran before heats the card.
            for who in ("ours", "peer")[:: 1 if turn % 2 else -1]:
                program = found[who, what]
                jax.block_until_ready(program(*operands))
                for _ in range(REPEATS):
                    started = time.perf_counter()
                    jax.block_until_ready(program(*operands))
                    seconds = time.perf_counter() - started
                    times.setdefault((who, what), []).append(seconds)
    report: dict[str, Any] = {"run": run_header(__file__), "times": []}
    for what in ("forward", "forward and backward"):
        ours, theirs = (statistics.median(times[who, what]) * 1e3 for who in ("ours", "peer"))
        figures = {"ours_ms": ours, "peer_ms": theirs, "ratio": ours / theirs}
        rounded = {name: round(value, 3) for name, value in figures.items()}
        report["times"].append({"what": what, "shape": args.shape, **rounded})
        print(json.dumps(report["times"][-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
        if jax.default_backend() == "gpu":
            report["profile"] = profiled(found, operands)
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
