#!/usr/bin/env python3
"""Times the host's part of a decode step of many requests: plan, arrays, tokens handed out.

    python scripts/bench_host.py [--requests 256] [--json FILE]

The device's part is left out: a step's choice is made up on the spot. Figures are milliseconds, the
median and the smallest of the steps; on a busy machine the smallest says more.
"""

import argparse
import collections
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from bi_jax import Engine, EngineConfig, SamplingParams
from bi_jax.models import Transformer, TransformerConfig, build_transformer, parameter_names
from bi_jax.models.config import RopeConfig
from bi_jax.sampling import TokenChoice

STEPS = 200
PROMPT = 1024
TINY = TransformerConfig(
    family="llama", vocab_size=512, hidden_size=64, intermediate_size=64, num_layers=1,
    num_query_heads=1, num_kv_heads=1, head_dim=64, rms_norm_eps=1e-5, rope=RopeConfig(theta=1e4),
    max_position=4096,
)  # fmt: skip


def make_engine(requests: int, *, overlap: bool) -> Engine:
    names = parameter_names(nnx.eval_shape(lambda: Transformer(TINY, rngs=nnx.Rngs(0))))
    params = {name: np.zeros(shape, np.float32) for name, shape in names.items()}
    config = EngineConfig(
        max_num_seqs=requests,
        max_num_batched_tokens=8192,
        token_buckets=(requests, 8192),
        max_model_len=2112,
        num_pages=requests * 33,
        overlap=overlap,
        audit=False,
    )
    engine = Engine(build_transformer(TINY, params), config=config)
    rng = np.random.default_rng(0)

    def launch(step: Any, *, tokens: Any = None) -> TokenChoice:
        shape = step.steps, len(step.rows.row)
        return TokenChoice(
            token=rng.integers(0, TINY.vocab_size, shape).astype(np.int32),
            logprob=np.zeros(shape, np.float32),
            bad_row=np.zeros(shape, bool),
            top_ids=np.zeros((*shape, 0), np.int32),
            top_logprobs=np.zeros((*shape, 0), np.float32),
        )  # type: ignore[arg-type]

    engine.runner.launch = launch  # type: ignore[method-assign]
    return engine


def watch(owner: Any, name: str, times: dict[str, list[float]]) -> None:
    """Times every call of a method."""
    true: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return true(*args, **kwargs)
        finally:
            times[name].append(1e3 * (time.perf_counter() - start))

    setattr(owner, name, call)


def measure(requests: int, *, overlap: bool) -> dict[str, dict[str, float]]:
    engine = make_engine(requests, overlap=overlap)
    times: dict[str, list[float]] = collections.defaultdict(list)
    scheduler, runner = engine.scheduler, engine.runner
    for owner, names in (
        (scheduler, ("plan", "plan_one_on", "commit")),
        (runner, ("start", "start_one_on", "collect")),
        (engine, ("_logit_rows", "_start_ahead", "_take_result", "_step")),
    ):
        for name in names:
            watch(owner, name, times)
    rng = np.random.default_rng(1)
    for index in range(requests):
        params = SamplingParams(temperature=0.0, seed=index, max_tokens=1000, ignore_eos=True)
        prompt = rng.integers(0, TINY.vocab_size, PROMPT).tolist()
        engine.add_request(engine.make_request(prompt, params))
    while scheduler.num_waiting or scheduler.num_running < requests:
        engine.step()
    for _ in range(8):
        engine.step()
    times.clear()
    for _ in range(STEPS):
        engine.step()
    return {
        name.lstrip("_"): {"median": round(statistics.median(t), 3), "least": round(min(t), 3)}
        for name, t in times.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": f"python scripts/bench_host.py --requests {arguments.requests}",
        "requests": arguments.requests,
        "load": round(os.getloadavg()[0], 1),
    }
    for overlap in (False, True):
        found = measure(arguments.requests, overlap=overlap)
        report["ahead" if overlap else "one after the other"] = found
        print("steps ahead" if overlap else "steps one after the other")
        for name, row in found.items():
            print(f"  {name:14s} {row['median']:7.3f} ms, least {row['least']:.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
