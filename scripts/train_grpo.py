#!/usr/bin/env python3
"""GRPO (arXiv:2402.03300) on additions, with SmolLM2-135M-Instruct unless told otherwise.

Every step: questions, completions by the engine, rewards, one or more updates by micro-batches,
and the new weights back into the engine. The log-probabilities that the trainer computes are those
that the engine emitted, bit for bit, or the run stops. The bits of the weights depend on the
settings of the first group alone; those of the second change speed and memory.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bi_jax.config import EngineConfig
from bi_jax.engine import Engine
from bi_jax.flags import enable_compilation_cache
from bi_jax.models import Transformer, build_transformer, find_demo_model, load_params, read_config
from bi_jax.request import RequestOutput, SamplingParams
from bi_jax.tokenizer import Tokenizer
from bi_jax.whole_file import write_whole

# So that it also runs as a file, whose folder and not the repository is then on the path.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from scripts.arithmetic import REWARDS, Question, questions
from scripts.grpo_trainer import Rollout, Trainer, TrainerConfig, check_identity
from scripts.run_plot import plot

ROOM_FOR_PROMPT = 64  # tokens
PAGE_SIZE = 64  # tokens


def count(text: str) -> int:
    """A positive whole number, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return number


def amount(text: str) -> float:
    """A finite number that is not negative, for argparse."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a finite number, 0 or more")
    return number


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    bits = parser.add_argument_group("what fixes the weights' bits")
    bits.add_argument("--model", help="folder, hub id, GGUF or Orbax; unset: SmolLM2-135M")
    bits.add_argument("--dtype", choices=("float32", "bfloat16"), help="compute dtype")
    bits.add_argument("--steps", type=count, default=3)
    bits.add_argument("--prompts", type=count, default=2, help="questions a step")
    bits.add_argument("--samples", type=count, default=4, help="completions of a question")
    bits.add_argument("--max-tokens", type=count, default=12)
    bits.add_argument("--largest", type=count, default=9, help="largest summand")
    bits.add_argument(
        "--reward", choices=REWARDS, default="answer", help="lowercase: for random weights"
    )
    bits.add_argument("--updates", type=count, default=1, help="inner updates a step")
    bits.add_argument("--learning-rate", type=amount, default=2e-6)
    bits.add_argument("--kl-coef", type=amount, default=0.0, help="above 0 keeps a reference model")
    bits.add_argument("--clip", type=amount, default=0.2)
    bits.add_argument("--max-norm", type=amount, default=1.0)
    bits.add_argument("--seed", type=int, default=0)
    speed = parser.add_argument_group("speed and memory; no bit depends on it")
    speed.add_argument("--micro-batch", type=int, default=2, help="a power of two")
    speed.add_argument("--max-num-seqs", type=count, default=8)
    speed.add_argument("--max-num-batched-tokens", type=count, default=64)
    out = parser.add_argument_group("output")
    out.add_argument("--out", type=Path, default=Path("grpo_run"))
    out.add_argument("--checkpoint-every", type=count, default=10)
    out.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    args = parser.parse_args(argv)
    if args.seed < 0:
        parser.error(f"--seed {args.seed} must be 0 or more")
    sequences = args.prompts * args.samples
    size = args.micro_batch
    if size < 1 or size & (size - 1) or sequences % size:
        parser.error(
            f"--micro-batch {size} must be a power of two that divides the "
            f"{sequences} completions of a step"
        )
    return args


def load(args: argparse.Namespace) -> tuple[Transformer, Tokenizer]:
    """The model, its parameters in float32, and its tokenizer."""
    name = args.model or find_demo_model()
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    config = read_config(name).replace(dtype=dtype, param_dtype="float32")
    model = build_transformer(config, load_params(name, config, dtype="float32"))
    return model, Tokenizer.from_pretrained(name)


def token_buckets(args: argparse.Namespace) -> tuple[int, ...] | None:
    """Two step programs, for prompts and for tokens drawn; on a CPU the engine's own choice."""
    if jax.default_backend() == "cpu":
        return None
    most = args.max_num_batched_tokens
    return tuple(sorted({min(args.max_num_seqs, most), most}))


def advantages(rewards: np.ndarray) -> np.ndarray:
    """float32 [prompts, samples]: each group's rewards, centred and scaled, 0 where all agree."""
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return (centred / (rewards.std(axis=1, keepdims=True) + 1e-4)).astype(np.float32)


def roll_out(
    engine: Engine, tokenizer: Tokenizer, args: argparse.Namespace, step: int
) -> tuple[list[Question], list[RequestOutput]]:
    """The step's questions and their completions."""
    asked = questions(args.prompts, seed=args.seed, step=step, largest=args.largest)
    seeds = np.random.default_rng([args.seed, step, 1]).integers(0, 2**62, args.prompts).tolist()
    prompts = [tokenizer.encode_chat(q.messages, add_generation_prompt=True) for q in asked]
    longest = max(map(len, prompts))
    if longest > ROOM_FOR_PROMPT:
        raise ValueError(f"a prompt has {longest} tokens, expected at most {ROOM_FOR_PROMPT}")
    params = [SamplingParams(n=args.samples, max_tokens=args.max_tokens, seed=s) for s in seeds]
    return asked, engine.generate(prompts, params)


def run_step(
    engine: Engine, trainer: Trainer, tokenizer: Tokenizer, args: argparse.Namespace, step: int
) -> dict[str, Any]:
    """One step; returns its metrics."""
    started = time.perf_counter()
    asked, outputs = roll_out(engine, tokenizer, args, step)
    sampled = time.perf_counter()
    reward = REWARDS[args.reward]
    rewards = np.array(
        [[reward(q, c.text) for c in out.outputs] for q, out in zip(asked, outputs, strict=True)]
    )
    rollout = Rollout.of(outputs, advantages(rewards), length=ROOM_FOR_PROMPT + args.max_tokens)
    metrics = trainer.update(rollout)
    engine.update_weights(trainer.state())
    return {
        "step": step,
        "reward": float(rewards.mean()),
        "reward_spread": float(rewards.std()),
        **metrics,
        "weights": trainer.digest(),
        "sampling_seconds": round(sampled - started, 3),
        "training_seconds": round(time.perf_counter() - sampled, 3),
        "example": f"{asked[0].text} {outputs[0].outputs[0].text!r}",
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    try:
        train(args)
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def open_run(out: Path, *, resume: bool) -> Path:
    """Makes the run's folder; returns the file of its metrics.

    Raises:
      ValueError: another run is there; what it wrote would be lost, or taken for this one's.
    """
    out.mkdir(parents=True, exist_ok=True)
    log = out / "metrics.jsonl"
    begun = (out / "checkpoints").exists() or (log.exists() and log.stat().st_size > 0)
    if begun and not resume:
        raise ValueError(f"{out} holds a run: --resume goes on with it, --out names another folder")
    return log


def train(args: argparse.Namespace) -> None:
    log = open_run(args.out, resume=args.resume)
    enable_compilation_cache()
    model, tokenizer = load(args)
    trainer = Trainer(
        model,
        TrainerConfig(
            learning_rate=args.learning_rate,
            updates=args.updates,
            kl_coef=args.kl_coef,
            clip=args.clip,
            max_norm=args.max_norm,
            micro_batch=args.micro_batch,
        ),
    )
    first, saved = trainer.restore(args.out) if args.resume else (0, None)
    lines = log.read_text().splitlines()[:first] if first else []
    write_whole(log, "".join(line + "\n" for line in lines))
    longest = ROOM_FOR_PROMPT + args.max_tokens
    pages = args.max_num_seqs * -(-longest // PAGE_SIZE)
    engine = Engine(
        model,
        tokenizer=tokenizer,
        config=EngineConfig(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_model_len=longest,
            page_size=PAGE_SIZE,
            num_pages=pages,  # the rest of a card's memory is the trainer's
            token_buckets=token_buckets(args),
        ),
    )
    if jax.default_backend() != "cpu":  # compile the engine's programs beside the trainer's
        with ThreadPoolExecutor(1) as pool:
            warm = pool.submit(engine.warm_up)
            trainer.warm_up(longest)
            warm.result()
    engine.update_weights(trainer.state())
    if saved is not None:
        check_identity(saved, engine.identity)
    for step in range(first, args.steps):
        metrics = run_step(engine, trainer, tokenizer, args, step)
        print(" ".join(f"{key}={_short(value)}" for key, value in metrics.items()), flush=True)
        with log.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        if (step + 1) % args.checkpoint_every == 0 or step + 1 == args.steps:
            trainer.save(args.out, step + 1, engine.identity)
    plot(log, args.out / "run.svg")


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
