#!/usr/bin/env python3
"""Times the engine's step on 8B shapes against stock XLA with cuDNN and against the floor.

    python scripts/bench_engine.py --json docs/benchmarks/engine_h200.json     # on the chip
    python scripts/bench_engine.py --tiny                                      # anywhere, untimed

Weights are random, made on the device; keys and values in the cache too. A step is the engine's
own program on the engine's own arrays, handed over many times in a row. Ours and stock take turns,
or, where the memory does not hold both caches, stock comes between two halves of ours. Floor: bytes
over the copy bandwidth or operations over the matmul rate, the larger; both measured in the run.
End to end: as many requests as the largest decode step holds, with prompts and completions of one
length.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_timing import copy_bandwidth, header
from engine_cases import (
    CASES,
    PARTS,
    TINY_CASES,
    TINY_PARTS,
    TINY_SIZES,
    Case,
    fill_cache,
    random_weights,
    settings_for,
    step_of,
)
from engine_peer import make_caches, make_step, peer_params
from engine_profile import by_class, by_name, kernels_of
from flax import nnx

from bi_jax import Engine, RequestOutput, SamplingParams, ops, runner, versions
from bi_jax.batch import TokenArrays
from bi_jax.kv_cache import make_cache
from bi_jax.models import build_transformer
from bi_jax.models.families.qwen3 import QWEN3_8B
from bi_jax.pallas_kernels.primitive import REFERENCE
from bi_jax.program_store import enable_program_store

ROUNDS = 9  # of a decode step; single ones wander by two per cent
ROUNDS_OF_LONG_STEPS = 5
ROUND_SECONDS = 0.3
SPARE_BYTES = 3 << 30  # that steps need besides caches and weights


def process_age() -> float:
    """Seconds since this process began, imports included; 0 where the system does not say."""
    try:
        fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        age = now - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
    return age if 0 < age < 600 else 0.0


START = time.perf_counter() - process_age()


def note(*words: Any) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s]", *words, flush=True)


def make_engine(arguments: argparse.Namespace, cases: tuple[Case, ...]) -> Engine:
    tiny = arguments.tiny
    config = QWEN3_8B
    if tiny:
        config = config.replace(**TINY_SIZES)
    params = random_weights(config)
    jax.block_until_ready(params)
    note(f"{sum(p.nbytes for p in params.values()) / 1e9:.2f} GB of weights")
    settings = settings_for(
        cases, decode_steps=arguments.decode_steps, audit=not arguments.no_audit
    )
    return Engine(build_transformer(config, params), config=settings)


def first_token(engine: Engine, tokens: int) -> dict[str, float]:
    """Seconds from the start of the process to the first token of a first request."""
    built = time.perf_counter() - START
    prompt = np.random.default_rng(3).integers(0, engine.model_config.vocab_size, tokens).tolist()
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=1, ignore_eos=True)
    engine.add_request(engine.make_request(prompt, params))
    engine.step()
    done = time.perf_counter() - START
    audit = engine.runner.step_program.audit_seconds
    found = {"engine_built": built, "first_token": done, "of_which_audit": audit}
    return {name: round(seconds, 2) for name, seconds in found.items()}


class Ours:
    """A case's step in the engine."""

    def __init__(self, engine: Engine, case: Case) -> None:
        self.engine = engine
        step = step_of(engine, case)
        tokens = {name: jax.device_put(array) for name, array in vars(step.tokens).items()}
        self.step = dataclasses.replace(
            step, tokens=TokenArrays(**tokens), rows=jax.device_put(step.rows)
        )

    def compile(self) -> None:
        self.engine.runner.compile(self.step)

    def run(self) -> Any:
        return self.engine.runner.launch(self.step)

    @property
    def program(self) -> str:
        return self.engine.runner.step_program.text(self.step.program)


class Peer:
    """A case's step in stock XLA."""

    def __init__(self, engine: Engine, case: Case, params: Any, attention: str) -> None:
        self.case, self.params = case, params
        self.config = engine.model_config
        self.step = make_step(self.config, case, attention=attention)
        rng = np.random.default_rng(0)
        self.tokens = jnp.asarray(rng.integers(0, 500, case.tokens), jnp.int32)
        self.caches: Any = jax.eval_shape(lambda: make_caches(self.config, case))

    def compile(self) -> None:
        self.compiled = self.step.lower(self.params, self.caches, self.tokens).compile()

    def prepare(self) -> None:
        self.caches = make_caches(self.config, self.case)

    def run(self) -> Any:
        self.caches, token = self.compiled(self.params, self.caches, self.tokens)
        return token

    @property
    def program(self) -> str:
        return self.compiled.as_text()


class Rounds:
    """A side's seconds a step, round by round, steps handed over in a row."""

    def __init__(self, side: Ours | Peer) -> None:
        self.side, self.seconds = side, []
        jax.block_until_ready(side.run())
        start = time.perf_counter()
        jax.block_until_ready([side.run() for _ in range(2)])
        self._count = max(2, int(2 * ROUND_SECONDS / (time.perf_counter() - start)))

    def run(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            jax.block_until_ready(self.side.run())  # the other side may have run before
            start = time.perf_counter()
            for _ in range(self._count):
                last = self.side.run()
            jax.block_until_ready(last)
            self.seconds.append((time.perf_counter() - start) / self._count)

    def found(self, *, profiled: bool) -> dict[str, Any]:
        """The median and every round, in milliseconds, and perhaps where they go."""
        ms = [round(1e3 * seconds, 4) for seconds in self.seconds]
        found = {"ms": round(statistics.median(ms), 4), "rounds_ms": ms}
        return found | (profile(self.side) if profiled else {})


def step_seconds(side: Ours | Peer, rounds: int = 3) -> list[float]:
    """Seconds a step in each of the rounds."""
    mine = Rounds(side)
    mine.run(rounds)
    return mine.seconds


def measure(side: Ours | Peer, *, profiled: bool, rounds: int = 3) -> dict[str, Any]:
    """One side alone, as `Rounds.found`."""
    mine = Rounds(side)
    mine.run(rounds)
    return mine.found(profiled=profiled)


def race(
    ours: Ours, peer: Peer, rounds: int, *, profiled: bool, peer_profiled: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both sides by turns, if the memory holds both caches; else the peer between halves of ours.

    Ours has a cache of random numbers before and after, and the peer none.
    """
    runner, mine = ours.engine.runner, Rounds(ours)
    together = room_for(peer)
    if not together:
        mine.run(rounds - rounds // 2)
        runner._cache = None
    peer.prepare()
    theirs = Rounds(peer)
    for _ in range(rounds):
        if together:
            mine.run()
        theirs.run()
    found = theirs.found(profiled=peer_profiled)
    peer.caches = None
    if not together:
        runner.reset_cache()
        fill_cache(runner)
        mine.run(rounds // 2)
    return mine.found(profiled=profiled), found


def room_for(peer: Peer) -> bool:
    """Whether the memory holds the peer's caches beside what is there."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return True
    shapes = jax.tree.leaves(jax.eval_shape(lambda: make_caches(peer.config, peer.case)))
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in shapes) + SPARE_BYTES
    return needed <= stats["bytes_limit"] - stats["bytes_in_use"]


def profile(side: Ours | Peer) -> dict[str, Any]:
    """Where a step's time goes; nothing where the profiler fails, since the times stand alone."""
    try:
        kernels = kernels_of(side.run, side.program)
    except Exception as error:
        note("no profile:", repr(error)[:300])
        return {}
    rows = [[name[:60], round(at, 1), round(us, 2)] for name, at, us in kernels]
    return {
        "kernels_ms": round(sum(us for *_, us in kernels) / 1e3, 4),
        "classes_us": by_class(kernels),
        "kernels": by_name(kernels)[:40],
        "order": rows[:90] + rows[-40:],
    }


def matmul_rate(tiny: bool) -> float:
    """Operations a second of one large bfloat16 product of random values."""
    size, count = (256 if tiny else 8192), 10
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
    product = jax.jit(lambda a, b: a @ b)
    jax.block_until_ready(product(a, b))
    start = time.perf_counter()
    jax.block_until_ready([product(a, b) for _ in range(count)])
    return 2 * size**3 * count / (time.perf_counter() - start)


def end_to_end(engine: Engine, arguments: argparse.Namespace, steps: dict[str, float]) -> Any:
    """Output tokens a second of one full load, and what the times of its steps alone allow."""
    requests = arguments.requests or engine.config.max_num_seqs
    prompt, new = arguments.prompt, arguments.new
    rng = np.random.default_rng(4)
    vocab = engine.model_config.vocab_size
    prompts = [rng.integers(0, vocab, prompt).tolist() for _ in range(requests)]

    def sampling(count: int) -> list[SamplingParams]:
        kinds = {"max_tokens": count, "ignore_eos": True}
        return [SamplingParams(temperature=float(i % 2), seed=i, **kinds) for i in range(requests)]

    few = min(8, requests)
    engine.generate(prompts[:few], sampling(4)[:few])
    engine.scheduler.cache.clear(weights_version=0)
    before, start = engine.metrics(), time.perf_counter()
    outputs = engine.generate(prompts, sampling(new))
    seconds, after = time.perf_counter() - start, engine.metrics()
    engine.scheduler.cache.clear(weights_version=0)
    alone = engine.generate(prompts[:few], sampling(min(256, new))[:few])
    tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    prefills = -(-requests * prompt // engine.config.max_num_batched_tokens)
    decodes = after.steps - before.steps - prefills
    allowed = prefills * steps["prefill"] + new * (steps["early"] + steps["late"]) / 2
    return {
        "requests": requests,
        "prompt_tokens": prompt,
        "new_tokens": new,
        "decode_steps": engine.config.decode_steps,
        "distinct_tokens": len({t for o in outputs for t in o.outputs[0].token_ids}),
        "seconds": round(seconds, 3),
        "tokens_a_second": round(tokens / seconds, 1),
        "dispatches": after.steps - before.steps,
        "other_dispatches": decodes,
        "steps_alone_seconds": round(allowed, 3),
        "share_of_what_steps_allow": round(allowed / seconds, 4),
        "step_ms": after.step_ms,
        "preemptions": after.preemptions - before.preemptions,
        "completions_alone": len(alone),
        "of_them_with_other_bits": sum(map(differs, alone, outputs)),
    }


def differs(shorter: RequestOutput, longer: RequestOutput) -> bool:
    """Whether a completion is not, to the bit, the beginning of another."""
    a, b = shorter.outputs[0], longer.outputs[0]
    count = len(a.token_ids)
    same_ids = list(a.token_ids) == list(b.token_ids[:count])
    return not (same_ids and a.logprobs.tobytes() == b.logprobs[:count].tobytes())


def shapes_only(config: Any, **shape: Any) -> Any:
    """`make_cache` without the memory."""
    return jax.eval_shape(lambda: make_cache(config, **shape))


def compile_all(ours: dict[Case, Ours], peers: dict[Case, Peer]) -> dict[str, float]:
    """Seconds by program; peers one after the other, since they are autotuned on the chip."""
    seconds: dict[str, float] = {}

    def build(name: str, side: Ours | Peer) -> None:
        start = time.perf_counter()
        side.compile()
        seconds[name] = round(time.perf_counter() - start, 2)
        note("compiled", name, seconds[name])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(lambda: [build(f"stock {c.name}", s) for c, s in peers.items()])]
        jobs += [pool.submit(build, f"ours {case.name}", side) for case, side in ours.items()]
        for job in jobs:
            job.result()
    return seconds


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    cases, parts = (TINY_CASES, TINY_PARTS) if arguments.tiny else (CASES, PARTS)
    if arguments.hold:  # nothing large is made before it is let go
        runner.make_cache = shapes_only
    engine = make_engine(arguments, (*cases, *parts))
    result: dict[str, Any] = {}
    if not arguments.hold:
        result["start"] = first_token(engine, min(1024, cases[0].context))
        note("first token", result["start"])
    if arguments.first_token_only:
        return result
    config = engine.model_config
    params = peer_params(nnx.merge(engine.runner._graph, engine.runner.state))
    attention = "xla" if arguments.tiny else "cudnn"
    ours = {case: Ours(engine, case) for case in (*cases, *parts)}
    peers = {case: Peer(engine, case, params, attention) for case in cases}
    result["compile_seconds"] = compile_all(ours, {} if arguments.no_peer else peers)
    _ = engine.identity  # hashing the weights is done before anything is timed
    note("weights hashed")
    result["identity"] = engine.identity.short
    if arguments.hold:
        note("waiting for", arguments.hold)
        while not arguments.hold.exists():
            time.sleep(0.2)
        runner.make_cache = make_cache
        engine.runner.reset_cache()
    bandwidth = 1e10 if arguments.tiny else copy_bandwidth()
    rate = matmul_rate(arguments.tiny)
    note(f"copy {bandwidth / 1e12:.3f} TB/s, product {rate / 1e12:.1f} TFLOP/s")
    libraries = dict(versions.library_versions(jax.default_backend()))
    result["header"] = header(bandwidth, sys.argv) | {"versions": libraries}
    result["matmul_tflop_s"] = round(rate / 1e12, 1)
    result["model"] = str(config)
    result["ops"] = dict(engine.ops.description)
    fill_cache(engine.runner)
    rows = result["rows"] = []
    times = {}
    for case, side in ours.items():
        floor = round(1e3 * case.floor_seconds(config, bandwidth, rate), 4)
        row: dict[str, Any] = {"case": case.name, "aim": case.aim, "floor_ms": floor}
        rows.append(row)
        rounds = ROUNDS if case.new == 1 and case in cases else ROUNDS_OF_LONG_STEPS
        profiled = case in cases and not arguments.tiny
        if arguments.no_peer or case not in peers:
            row["ours"] = measure(side, profiled=profiled, rounds=rounds)
        else:
            both = profiled and arguments.profile_stock
            row["ours"], row["stock"] = race(
                side, peers[case], rounds, profiled=profiled, peer_profiled=both
            )
            row["stock_over_floor"] = round(row["stock"]["ms"] / floor, 4)
            row["ours_over_stock"] = round(row["ours"]["ms"] / row["stock"]["ms"], 4)
        times[case] = row["ours"]["ms"] / 1e3
        row["ours_over_floor"] = round(row["ours"]["ms"] / floor, 4)
        row["memory"] = engine.runner.step_program.memory(side.step.program)
        for name in ("ours", "stock"):
            if name in row:
                note(case.name, name, row[name]["ms"], "ms,", row[f"{name}_over_floor"], "of floor")
                note("   ", row[name].get("classes_us"))
        note("   ", row.get("ours_over_stock"), "ours/stock")
        save(result, arguments)
    steps = {"prefill": times[parts[1]], "early": times[parts[0]], "late": times[cases[2]]}
    if not arguments.no_end_to_end:
        result["end_to_end"] = end_to_end(engine, arguments, steps)
        note("end to end", result["end_to_end"])
        save(result, arguments)
    return result


def save(result: dict[str, Any], arguments: argparse.Namespace) -> None:
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--first-token-only", action="store_true")
    parser.add_argument("--token-choice", choices=("hopper", "reference"), default="hopper")
    parser.add_argument("--hold", type=pathlib.Path, help="compile, then wait for this file")
    parser.add_argument("--profile-stock", action="store_true")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--no-audit", action="store_true")
    parser.add_argument(
        "--program-store", type=pathlib.Path, help="where audited programs are kept"
    )
    parser.add_argument("--no-end-to-end", action="store_true")
    parser.add_argument("--decode-steps", type=int, default=1)
    parser.add_argument("--requests", type=int, help="end to end; unset: as many as fit a step")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, default=1024)
    arguments = parser.parse_args()
    if arguments.program_store:
        enable_program_store(arguments.program_store)
    if arguments.token_choice == "reference":
        names = dict(log_softmax=REFERENCE, sampling=REFERENCE)
        ops.ON_HOPPER = dataclasses.replace(ops.ON_HOPPER, **names)
    save(run(arguments), arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
