#!/usr/bin/env python3
"""What the contract costs on a CPU: SmolLM2 through our ops and through plain jnp, in one run.

    python scripts/bench_cpu.py [--rounds 5] [--tokens 32] [--json FILE]

Both sides are the same runner with only the ops record swapped, for one row and for sixteen. All
prompts are prefilled in one step; what is timed are the decode steps after it, every one of all
rows. Rounds alternate between the sides; figures are medians of decode tokens a second, and of the
process's CPU milliseconds a step, which other load on the machine disturbs much less.
"""

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

from bi_jax import Engine, EngineConfig, SamplingParams
from bi_jax.flags import enable_compilation_cache
from bi_jax.models import build_transformer, find_demo_model, load_params, read_config
from bi_jax.stock_ops import stock_ops

PROMPT_TOKENS = 32


def make_engine(model: Any, rows: int, *, stock: bool) -> Engine:
    config = EngineConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=rows * PROMPT_TOKENS,
        token_buckets=(rows, rows * PROMPT_TOKENS),
        max_model_len=4 * PROMPT_TOKENS,
    )
    return Engine(model, config=config, ops=stock_ops(by_rows=True) if stock else None)


def decode_rate(engine: Engine, rows: int, tokens: int) -> tuple[float, float]:
    """Decode tokens a second of `rows` completions and CPU milliseconds a step, without prefill."""
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0)
    active = []
    for _ in range(rows):
        prompt = rng.integers(0, engine.model_config.vocab_size, PROMPT_TOKENS).tolist()
        active.append(engine.add_request(engine.make_request(prompt, params)))
    engine.step()
    assert all(len(request.completions[0].token_ids) == 1 for request in active)
    start, start_cpu, steps = time.perf_counter(), time.process_time(), 0
    while engine.has_unfinished_requests:
        engine.step()
        steps += 1
    assert steps == tokens - 1
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    return rows * steps / seconds, 1e3 * cpu_seconds / steps


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    enable_compilation_cache()
    source = find_demo_model()
    config = read_config(source).replace(dtype="float32", param_dtype="float32")
    model = build_transformer(config, load_params(source, config, dtype="float32"))
    rows_of = []
    for rows in (1, 16):
        sides = {name: make_engine(model, rows, stock=name == "jnp") for name in ("ours", "jnp")}
        for engine in sides.values():
            decode_rate(engine, rows, 4)
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(arguments.rounds):
            for name, engine in sides.items():
                seen[name].append(decode_rate(engine, rows, arguments.tokens))
        rates = {name: statistics.median(r for r, _ in found) for name, found in seen.items()}
        cpu_ms = {name: statistics.median(c for _, c in found) for name, found in seen.items()}
        ratio, cpu_ratio = rates["ours"] / rates["jnp"], cpu_ms["jnp"] / cpu_ms["ours"]
        rows_of.append(
            {
                "batch": rows,
                **rates,
                "ratio": ratio,
                "cpu_ms_a_step": cpu_ms,
                "cpu_ratio": cpu_ratio,
            }
        )
        print(
            f"batch {rows:2d}: ours {rates['ours']:7.2f} tokens/s, jnp {rates['jnp']:7.2f}, "
            f"{ratio:.2f}; CPU ms a step: ours {cpu_ms['ours']:.1f}, jnp {cpu_ms['jnp']:.1f}, "
            f"{cpu_ratio:.2f}",
            flush=True,
        )
    report = {
        "date": datetime.date.today().isoformat(),
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__},
        "command": " ".join(["python", "scripts/bench_cpu.py", *sys.argv[1:]]),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "rows": rows_of,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
