"""Races the Hopper attention kernel against cuDNN on one card.

    python scripts/bench_attention.py [--cases a,b] [--all-schedules] [--rounds N] [--json FILE]

Times are device times, from the profiler, of several launches in one jitted program: all kernels of
the program, over its launches. Each launch has queries of its own and the caches take turns, so
that keys and values come from memory; rounds alternate between ours and cuDNN; medians over rounds.
cuDNN is reached through jax.nn.dot_product_attention(implementation="cudnn"), on contiguous caches,
one sequence after the other where lengths differ. Bits and accuracy are checked in tests/gpu.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_timing import device_times

from bi_jax.pallas_kernels.attention.kernel_hopper import attention_hopper
from bi_jax.pallas_kernels.attention.schedule import Schedule, schedule_for
from bi_jax.pallas_kernels.ragged import RaggedBatch

KV_BLOCK, PAGE = 128, 64
COPY_TERABYTES, MATMUL_TERAFLOPS = 4.27, 788.0  # a large copy and a large bf16 product, H200
KV_HEADS, GROUP, HEAD_DIM = 8, 4, 128  # Llama 3.1 8B, Qwen3 8B


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Query tokens and context of each request of one step."""

    name: str
    queries: tuple[int, ...]
    contexts: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.queries)

    @property
    def rows(self) -> int:
        """Rows of the engine's bucket: a multiple of 8."""
        return -(-self.tokens // 8) * 8

    @property
    def decode(self) -> bool:
        return max(self.queries) == 1

    @property
    def flops(self) -> float:
        """Of the keys that each query sees, both products."""
        pairs = zip(self.queries, self.contexts, strict=True)
        return 4.0 * sum(q * (2 * c - q + 1) / 2 for q, c in pairs) * HEAD_DIM * KV_HEADS * GROUP

    @property
    def cache_bytes(self) -> int:
        return sum(self.contexts) * KV_HEADS * HEAD_DIM * 4


def prefill(name: str, *lengths: int) -> Case:
    return Case(name=name, queries=lengths, contexts=lengths)


def decode(requests: int, context: int) -> Case:
    return Case(
        name=f"decode_{requests}x{context}",
        queries=(1,) * requests,
        contexts=(context,) * requests,
    )


CASES = (
    prefill("prefill_2k", 2048),
    prefill("prefill_8k", 8192),
    prefill("prefill_32k", 32_768),
    prefill("prefill_mix", 4096, 1000, 2500, 333, 6000, 77),
    decode(1, 1024),
    decode(1, 4096),
    decode(8, 4096),
    decode(64, 1024),
    decode(64, 4096),
    decode(256, 1024),
    decode(256, 2048),
)


def make_batch(case: Case) -> tuple[RaggedBatch, int]:
    """The metadata of a case on shuffled pages, and how many pages there are."""
    counts = [-(-c // PAGE) for c in case.contexts]
    order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    table = np.zeros((len(counts), max(counts)), np.int32)
    for b, n in enumerate(counts):
        table[b, :n] = order[sum(counts[:b]) :][:n]
    pairs = zip(case.queries, case.contexts, strict=True)
    positions, request = np.zeros((2, case.rows), np.int32)
    positions[: case.tokens] = np.concatenate([np.arange(c - q, c) for q, c in pairs])
    request[: case.tokens] = np.repeat(np.arange(len(counts)), case.queries)
    batch = RaggedBatch(
        positions=jnp.asarray(positions),
        request=jnp.asarray(request),
        query_start=jnp.asarray(np.concatenate([[0], np.cumsum(case.queries)]), jnp.int32),
        page_table=jnp.asarray(table),
        num_tokens=jnp.int32(case.tokens),
    )
    return batch, len(order)


@functools.partial(jax.jit, static_argnums=1)
def normal(seed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How often a case is launched in a program, and how many caches take turns."""

    launches: int
    caches: int

    @staticmethod
    def of(case: Case) -> "Plan":
        floor_us = max(case.flops / 600e6, case.cache_bytes / 4.2e6) + 5
        # cuDNN takes sequences of different lengths one by one: many calls to compile.
        most = 2 if len(set(case.queries)) > 1 else 40 if floor_us < 60 else 12
        launches = int(np.clip(3000 / floor_us, 3, most)) if most > 2 else 2
        return Plan(
            launches=launches,
            caches=min(launches, int(np.clip(200e6 / case.cache_bytes, 2, 40))),
        )


Program = tuple[Callable[..., Any], tuple[Any, ...]]  # compiled, with its arguments


def repeated(call: Callable[..., Any], plan: Plan, arguments: tuple[Any, ...]) -> Program:
    """One program of `launches` calls; call i gets its own queries and the caches in turn."""

    def program(queries, keys, values):
        turns = [(queries[i], i % plan.caches) for i in range(plan.launches)]
        return [call(q, keys[n], values[n]) for q, n in turns]

    return jax.jit(program).lower(*arguments).compile(), arguments


def ours(case: Case, plan: Plan, schedules: list[Schedule]) -> dict[str, Program]:
    batch, pages = make_batch(case)
    cache = (pages, KV_HEADS, PAGE, HEAD_DIM)
    shape = (case.rows, KV_HEADS, GROUP, HEAD_DIM)
    arguments = (
        [normal(i, shape) for i in range(plan.launches)],
        [normal(1000 + i, cache) for i in range(plan.caches)],
        [normal(2000 + i, cache) for i in range(plan.caches)],
    )

    def call(q, k, v, *, schedule):
        return attention_hopper(
            q, k, v, batch, scale=HEAD_DIM**-0.5, window=None, kv_block=KV_BLOCK, schedule=schedule
        )[0]

    return {
        str(s): repeated(functools.partial(call, schedule=s), plan, arguments) for s in schedules
    }


def cudnn(case: Case, plan: Plan) -> Program:
    if case.decode:
        shapes = [(len(case.queries), 1, case.contexts[0])]
    else:
        shapes = [(1, q, c) for q, c in zip(case.queries, case.contexts, strict=True)]

    def queries(seed):
        return [
            normal(seed + i, (b, q, KV_HEADS * GROUP, HEAD_DIM))
            for i, (b, q, _) in enumerate(shapes)
        ]

    def cache(seed):
        return [normal(seed + i, (b, c, KV_HEADS, HEAD_DIM)) for i, (b, _, c) in enumerate(shapes)]

    def call(qs, ks, vs):
        attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
        return [
            attend(q, k, v, is_causal=not case.decode) for q, k, v in zip(qs, ks, vs, strict=True)
        ]

    arguments = (
        [queries(10_000 + 100 * i) for i in range(plan.launches)],
        [cache(20_000 + 100 * i) for i in range(plan.caches)],
        [cache(30_000 + 100 * i) for i in range(plan.caches)],
    )
    return repeated(call, plan, arguments)


def race(case: Case, schedules: list[Schedule], *, rounds: int) -> list[dict]:
    """One row a schedule; every cell is present."""
    plan = Plan.of(case)
    programs = ours(case, plan, schedules) | {"cudnn": cudnn(case, plan)}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for run, arguments in programs.values():
        jax.block_until_ready(run(*arguments))
    for _ in range(rounds):
        found = device_times([(*program, plan.launches) for program in programs.values()])
        for name, us in zip(programs, found, strict=True):
            times[name].append(us)
    peer = statistics.median(times["cudnn"])
    return [make_row(case, name, times[name], peer) for name in programs if name != "cudnn"]


def make_row(case: Case, schedule: str, times: list[float], peer: float) -> dict:
    us = statistics.median(times)
    unit = "terabytes_a_second" if case.decode else "teraflops"
    reached = (case.cache_bytes if case.decode else case.flops) / us / 1e6
    ceiling = COPY_TERABYTES if case.decode else MATMUL_TERAFLOPS
    return dict(
        op="attention",
        case=case.name,
        rows=case.tokens,
        dtype="bfloat16",
        ours_us=round(us, 2),
        peer="cudnn",
        peer_us=round(peer, 2),
        ratio=round(us / peer, 4),
        ceiling_fraction=round(reached / ceiling, 3),
        schedule=schedule,
        rounds_us=[round(t, 2) for t in times],
    ) | {unit: round(reached, 3)}


def driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]


def candidates(case: Case, *, every: bool) -> list[Schedule]:
    chosen = schedule_for(
        tokens=case.rows,
        requests=max(len(case.queries), case.rows if case.decode else 0),
        kv_heads=KV_HEADS,
        group=GROUP,
        head_dim=HEAD_DIM,
    )
    if not every:
        return [chosen]
    if case.decode:
        other = dataclasses.replace(chosen, half_rows=False, columns=1, stages=3)
    else:
        other = dataclasses.replace(
            chosen, overlap="turns" if chosen.overlap == "scores" else "scores"
        )
    return [chosen, other]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(c.name for c in CASES))
    parser.add_argument("--all-schedules", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    rows: list[dict] = []
    report = dict(
        date=time.strftime("%Y-%m-%d"),
        chip=jax.devices()[0].device_kind,
        driver=driver_version(),
        versions=dict(jax=jax.__version__, python=sys.version.split()[0]),
        command=" ".join(sys.argv),
        rows=rows,
    )
    for case in CASES:
        if case.name not in options.cases.split(","):
            continue
        schedules = candidates(case, every=options.all_schedules)
        rows += race(case, schedules, rounds=options.rounds)
        for row in rows[-len(schedules) :]:
            print({k: v for k, v in row.items() if k not in ("op", "rounds_us")}, flush=True)
        if options.json:
            with open(options.json, "w") as file:
                json.dump(report, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
