#!/usr/bin/env python3
"""What the tp-invariant topology costs: the engine's step in it, over its step in the default one.

    python scripts/bench_tp_invariant.py --json out.json                              # on the chip
    python scripts/bench_tp_invariant.py --only prefill --json out.json               # one case
    python scripts/bench_tp_invariant.py --tiny                                       # anywhere

Random weights of an 8B shape; steps of both engines by turns, each handed over many times in a row.
With --tensor-parallel-size N both run on N devices.
"""

import argparse
import json
import pathlib
import statistics
import sys
from typing import Any

from bench_engine import Ours, note, step_seconds
from device_timing import copy_bandwidth, header
from engine_cases import TINY_CASES, TINY_SIZES, Case, fill_cache, random_weights, settings_for

from bi_jax import Engine
from bi_jax.models import TransformerConfig, build_transformer
from bi_jax.models.families.qwen3 import QWEN3_8B

CASES = (
    Case(requests=1, context=1024, aim=1.05),
    Case(requests=64, context=1024, aim=1.05),
    Case(requests=1, context=8192, new=8192, aim=1.10),
)
TURNS = 3
TOPOLOGIES = ("default", "tp_invariant")


def make_engine(
    config: TransformerConfig, params: Any, cases: tuple[Case, ...], degree: int
) -> Engine:
    model = build_transformer(config, params)
    return Engine(model, config=settings_for(cases), tensor_parallel_size=degree)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    config, cases = QWEN3_8B, CASES
    if arguments.tiny:
        config = config.replace(**TINY_SIZES)
        cases = TINY_CASES
    names = [case.name for case in cases]
    cases = tuple(case for case in cases if arguments.only in case.name)
    if not cases:
        raise SystemExit(f"--only {arguments.only!r} is part of none of {names}")
    params = random_weights(config)
    engines = {
        name: make_engine(
            config.replace(topology=name), params, cases, arguments.tensor_parallel_size
        )
        for name in TOPOLOGIES
    }
    del params
    for engine in engines.values():
        fill_cache(engine.runner)
    result: dict[str, Any] = {
        "tensor_parallel_size": arguments.tensor_parallel_size,
        "ops": {name: dict(engine.ops.description) for name, engine in engines.items()},
        "rows": [],
    }
    if not arguments.tiny:
        result["header"] = header(copy_bandwidth()) | {"command": " ".join(sys.argv)}
    for case in cases:
        sides = {name: Ours(engine, case) for name, engine in engines.items()}
        for name, side in sides.items():
            side.compile()
            note("compiled", case.name, name)
        turns = [{name: step_seconds(side) for name, side in sides.items()} for _ in range(TURNS)]
        ms = {
            name: 1e3 * statistics.median(t for turn in turns for t in turn[name])
            for name in TOPOLOGIES
        }
        ratio = ms["tp_invariant"] / ms["default"]
        row = {"case": case.name, "aim": case.aim, "ratio": round(ratio, 4), "ms": ms}
        result["rows"].append(row | {"turns": turns})
        note(row)
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--only", default="", help="part of a case's name: prefill, decode 64")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    run(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
