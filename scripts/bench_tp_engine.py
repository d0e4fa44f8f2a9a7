#!/usr/bin/env python3
"""Times the engine's step over 1, 2 and 4 cards against stock XLA and cuDNN with psum.

    python scripts/bench_tp_engine.py --json docs/benchmarks/tp_engine_h200x4.json   # on the chips
    python scripts/bench_tp_engine.py --tiny                                         # anywhere

Qwen3-8B's shapes with random weights made in their shards. A process for each degree and topology
compiles its programs while others do; then they measure, those of other cards beside one another. A
step is the engine's own program on its own arrays, handed over many times in a row; so is the
peer's (engine_peer.py), once with float32 partial sums and once with bfloat16 ones.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import bench_engine
import jax
import numpy as np
from bench_engine import Ours, measure, note, shapes_only
from card_turns import Job, run_in_turns, side_by_side, wait_for_turn
from engine_cases import (
    TINY_CASES,
    TINY_SIZES,
    Case,
    fill_cache,
    random_weights,
    settings_for,
    step_of,
)
from engine_peer import HEADS, make_caches, make_step, peer_params
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from run_header import command_line, run_header

from bi_jax import Engine, row_products, runner
from bi_jax.models import build_transformer
from bi_jax.models.families.qwen3 import QWEN3_8B
from bi_jax.ops import pick_backends
from bi_jax.sharding import model_placer
from bi_jax.step_arguments import pack

CASES = (Case(requests=64, context=1024), Case(requests=1, context=1024))
PREFILL = Case(requests=1, context=4096, new=4096)
TINY_DEVICES = 2
DTYPES = ("float32", "bfloat16")  # of the peer's partial sums
# How ours are summed: through peer memory, so but never in the kernel of the norm, by collectives;
# and as the first, but several tokens a sequence in one dispatch.
PEERS, UNFUSED, GATHERED, STEPS = "peers", "unfused", "gathered", "steps"
STEPS_A_DISPATCH = 4


def make_engine(config: Any, cases: tuple[Case, ...], degree: int, sums: str) -> Engine:
    backends = pick_backends(jax.devices()[0], config.dtype)
    placer = model_placer(config, backends, degree)
    params = random_weights(config, placer)
    jax.block_until_ready(params)
    settings = settings_for(cases, audit=False, peer_memory=sums != GATHERED)
    layout = None if placer is None else placer.layout
    model = build_transformer(config, params, layout=layout)
    return Engine(model, config=settings, tensor_parallel_size=degree)


def no_digest(engine: Engine) -> Any:
    """Nobody asks for the identity, and hashing gigabytes would disturb what is timed."""
    done: concurrent.futures.Future[str] = concurrent.futures.Future()
    done.set_result("")
    return done


class OnRanks(Ours):
    """A case's step in the engine, its arrays on every rank."""

    def __init__(self, engine: Engine, case: Case, steps: int) -> None:
        super().__init__(engine, case)
        self.step = dataclasses.replace(self.step, steps=steps)
        self.on_host = dataclasses.replace(step_of(engine, case), steps=steps)
        self.operands: dict[str, Any] = {}
        if engine.placer is not None and engine.placer.mesh is not None:
            whole = {"tokens": self.on_host.tokens.tokens, "words": pack(self.on_host)}
            self.operands = jax.device_put(whole, NamedSharding(engine.placer.mesh, P()))

    def run(self) -> Any:
        return self.engine.runner.launch(self.step, **self.operands)

    def run_from_host(self) -> Any:
        return self.engine.runner.launch(self.on_host)


class Peer:
    """A case's step in stock XLA over the same cards, on the engine's own arrays."""

    def __init__(self, engine: Engine, case: Case, params: Any, sums: str, tiny: bool) -> None:
        placer, self.config = engine.placer, engine.model_config
        self.mesh = None if placer is None else placer.mesh
        self.case, self.params = case, params
        self.heads = None if placer is None else placer.layout.cache_heads
        attention = "xla" if tiny else "cudnn"
        kinds = dict(attention=attention, params=params, mesh=self.mesh, sum_dtype=sums)
        self.step = make_step(self.config, case, **kinds)
        tokens = np.random.default_rng(0).integers(0, 500, case.tokens).astype(np.int32)
        place = None if self.mesh is None else NamedSharding(self.mesh, P())
        self.tokens = jax.device_put(tokens, place)

    def compile(self) -> None:
        place = None if self.mesh is None else NamedSharding(self.mesh, HEADS)
        caches = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place),
            jax.eval_shape(self._caches),
        )
        self.compiled = self.step.lower(self.params, caches, self.tokens).compile()

    def _caches(self) -> Any:
        return make_caches(self.config, self.case, mesh=self.mesh, heads=self.heads)

    def prepare(self) -> None:
        self.caches = self._caches()

    def run(self) -> Any:
        self.caches, token = self.compiled(self.params, self.caches, self.tokens)
        return token

    @property
    def program(self) -> str:
        return self.compiled.as_text()


def part(arguments: argparse.Namespace, degree: int, topology: str, sums: str) -> None:
    """Compiles and measures one degree and topology; writes what it found to --json."""
    if sums == UNFUSED:
        row_products.fits_peer_norm = lambda _: False
    config, cases = QWEN3_8B.replace(topology=topology), CASES
    if arguments.prefill and sums != STEPS:
        cases = (*CASES, PREFILL)
    if arguments.layers:
        config = config.replace(num_layers=arguments.layers)
    if arguments.tiny:
        config = config.replace(**TINY_SIZES | {"num_kv_heads": 4})
        cases = TINY_CASES
    if arguments.only:
        cases = tuple(case for case in cases if case.name in arguments.only.split("/"))
    steps = 1
    if sums == STEPS:
        cases, steps = tuple(case for case in cases if case.new == 1), STEPS_A_DISPATCH
    Engine._submit_digest = no_digest
    bench_engine.ROUND_SECONDS = arguments.round_seconds
    make_cache, runner.make_cache = runner.make_cache, shapes_only
    engine = make_engine(config, cases, degree, sums)
    through = "peer memory" if engine.runner.sums_through_peers else "collectives"
    note(degree, topology, sums, "built, sums through", through)
    sides: dict[tuple[str, Case], Any] = {("ours", c): OnRanks(engine, c, steps) for c in cases}
    if topology == "default" and sums == PEERS:
        params = peer_params(nnx.merge(engine.runner._graph, engine.runner.state))
        for dtype in DTYPES[: 2 if degree > 1 and not arguments.tiny else 1]:
            made = {c: Peer(engine, c, params, dtype, arguments.tiny) for c in cases}
            sides |= {(f"psum {dtype}", c): side for c, side in made.items()}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(OnRanks.compile, (s for s in sides.values() if isinstance(s, OnRanks))))
    note(degree, topology, "compiled")
    rows: dict[str, Any] = {case.name: {} for case in cases}
    found = {
        "degree": degree,
        "topology": topology,
        "sums": sums,
        "steps": steps,
        "layers": config.num_layers,
        "rows": rows,
    }
    found["header"] = run_header(__file__)
    found["model"], found["ops"] = str(config), dict(engine.ops.description)
    wait_for_turn(arguments.turn)
    # Not before: the caches of all parts would not fit beside one another.
    runner.make_cache = make_cache
    engine.runner.reset_cache()
    fill_cache(engine.runner)
    for (name, case), side in sides.items():
        if isinstance(side, Peer):
            engine.runner._cache = None
            side.compile()  # autotuned: not while anybody else uses the cards
            side.prepare()
        if arguments.tiny:  # steps in flight together starve one another of the few threads
            side.run = functools.partial(_blocking, side.run)
        profiled = arguments.profile and case.requests > 1 and name == "ours"
        row = measure(side, profiled=profiled)
        row["dispatch_ms"] = dispatch_ms(side.run)
        if isinstance(side, Peer):
            side.caches = side.compiled = None
        else:
            row["dispatch_from_host_ms"] = dispatch_ms(side.run_from_host)
        for long in ("kernels", "order"):
            row.pop(long, None) if name.startswith("psum") else None
        for each in ("ms", "dispatch_ms", "dispatch_from_host_ms"):
            if each in row:
                row[each] = round(row[each] / steps, 4)
        row["tokens_a_second"] = round(case.tokens / row["ms"] * 1e3, 1)
        rows[case.name][name] = row
        figures = (row["ms"], "ms", row["dispatch_ms"], row.get("classes_us"))
        note(degree, topology, sums, case.name, name, *figures)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def dispatch_ms(run: Callable[[], Any]) -> float:
    """Until a step is handed over to idle cards, by the host's clock."""
    found = []
    for _ in range(7):
        started = time.perf_counter()
        out = run()
        found.append(1e3 * (time.perf_counter() - started))
        jax.block_until_ready(out)
    return round(statistics.median(found), 4)


def _blocking(run: Any) -> Any:
    return jax.block_until_ready(run())


def ratios(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours over each peer of the same degree and case."""
    peers = {
        (p["degree"], case, name): row["ms"]
        for p in parts
        for case, sides in p["rows"].items()
        for name, row in sides.items()
        if name != "ours"
    }
    table = []
    for p in parts:
        for case, sides in p["rows"].items():
            ms = sides["ours"]["ms"]
            row = {name: p[name] for name in ("degree", "topology", "sums", "steps")}
            row |= {"case": case, "ms": ms}
            row["tokens_a_second"] = sides["ours"]["tokens_a_second"]
            for name in (f"psum {dtype}" for dtype in DTYPES):
                peer = peers.get((p["degree"], case, name))
                if peer:
                    row[f"{name} ms"], row[f"over {name}"] = peer, round(ms / peer, 4)
            table.append(row)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on virtual devices")
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--degrees", default="4,2,1")
    parser.add_argument("--topologies", default="default,tp_invariant")
    parser.add_argument("--prefill", action="store_true", help="a prompt of 4,096 tokens too")
    parser.add_argument("--only", help="names of steps, such as 'prefill 1 x 4096', with / between")
    parser.add_argument("--profile", action="store_true", help="where our time goes")
    also = f"of {UNFUSED}, {GATHERED}, {STEPS}: further ways at the first degree"
    parser.add_argument("--also", default="", help=also)
    parser.add_argument("--turn", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--round-seconds", type=float, default=0.35, help="a round of steps takes")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--begin", type=pathlib.Path, help="compile, but wait for this file")
    arguments = parser.parse_args()
    if arguments.part:
        if arguments.tiny:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", TINY_DEVICES)
        degree, topology, sums = arguments.part.split(":")
        part(arguments, int(degree), topology, sums)
        return 0
    return run_parts(arguments)


def run_parts(arguments: argparse.Namespace) -> int:
    """A process a part; then one file of what they found."""
    degrees = [int(degree) for degree in arguments.degrees.split(",")]
    topologies = arguments.topologies.split(",")
    # Those of one degree stand together, so that they can measure side by side.
    names = [f"{d}:{t}:{PEERS}" for d in degrees for t in topologies]
    also = [sums for sums in arguments.also.split(",") if sums]
    names += [f"{degrees[0]}:{topologies[0]}:{sums}" for sums in also]
    switches = ("--tiny", "--prefill", "--profile")
    words = [word for word in switches if getattr(arguments, word[2:])]
    words += ["--layers", str(arguments.layers)] if arguments.layers else []
    words += ["--only", arguments.only] if arguments.only else []
    words += ["--round-seconds", str(arguments.round_seconds)]
    with tempfile.TemporaryDirectory() as folder:
        files = {name: pathlib.Path(folder) / f"{name.replace(':', '_')}.json" for name in names}
        jobs = []
        for place, (name, file) in enumerate(files.items()):
            turn = file.with_suffix(".turn")
            command = (sys.executable, __file__, *words, "--part", name)
            command += ("--json", str(file), "--turn", str(turn))
            cards = side_by_side(int(name.split(":")[0]), max(degrees), place)
            jobs.append(Job(name=name, command=command, cards=cards, turn=turn))
        parts: list[dict[str, Any]] = []

        def ended(job: Job) -> None:
            parts[:] = [json.loads(file.read_text()) for file in files.values() if file.exists()]
            save(parts, arguments)

        status = run_in_turns(jobs, ended=ended, begin=arguments.begin)
    for row in ratios(parts):
        print(row, flush=True)
    return 1 if any(status.values()) else 0


def save(parts: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    if arguments.json and parts:
        # A part's header: whoever asks for the cards takes hold of them.
        words = {"command": command_line(__file__)}
        rest = [{key: p[key] for key in p if key != "header"} for p in parts]
        report = {**parts[0]["header"], **words, "ratios": ratios(parts), "parts": rest}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
