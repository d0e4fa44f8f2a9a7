"""Races the Hopper attention kernel against cuDNN on one card.

    python scripts/bench_attention.py [--cases a,b] [--further a,b] [--rounds N] [--json FILE]

Times are device times, from the profiler, of several launches in one jitted program: all kernels of
the program, over its launches. Each launch has queries of its own and the caches take turns, so
that keys and values come from memory; rounds alternate between ours and cuDNN; medians over rounds.
cuDNN is reached through jax.nn.dot_product_attention(implementation="cudnn"), on contiguous caches,
one sequence after the other where lengths differ. Bits and accuracy are checked in tests/gpu.

Every case is built in a process of its own, all of them together; once all are built, each times
its programs while the others wait.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_timing import copy_bandwidth, device_times, header

from bi_jax import flags
from bi_jax.pallas_kernels.attention.kernel_hopper import attention_hopper, attention_hopper_op
from bi_jax.pallas_kernels.attention.schedule import Schedule, schedule_for
from bi_jax.pallas_kernels.attention.topology import AttentionTopology
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
    kv_split: int | None = None

    @property
    def tokens(self) -> int:
        return sum(self.queries)

    @property
    def rows(self) -> int:
        """Rows of the engine's bucket: a multiple of 8."""
        return -(-self.tokens // 8) * 8

    @property
    def requests(self) -> int:
        """Requests that the step has room for; an engine's have room for as many as rows."""
        return max(len(self.queries), self.rows if self.decode else 0)

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


def decode(requests: int, context: int, kv_split: int | None = None) -> Case:
    return Case(
        name=f"decode_{requests}x{context}" + (f"_split_{kv_split}" if kv_split else ""),
        queries=(1,) * requests,
        contexts=(context,) * requests,
        kv_split=kv_split,
    )


CASES = (
    prefill("prefill_2k", 2048),
    prefill("prefill_8k", 8192),
    prefill("prefill_32k", 32_768),
    prefill("prefill_mix", 4096, 1000, 2500, 333, 6000, 77),
    decode(64, 1024),
    decode(64, 4096),
    decode(256, 1024),
    decode(256, 2048),
    decode(8, 4096),
    decode(1, 1024),
    decode(1, 4096),
    decode(1, 32_768),
    decode(1, 32_768, kv_split=2048),
)


def make_batch(case: Case) -> tuple[RaggedBatch, int]:
    """The metadata of a case on shuffled pages, and how many pages there are."""
    counts = [-(-c // PAGE) for c in case.contexts]
    order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    table = np.zeros((case.requests, max(counts)), np.int32)
    for b, n in enumerate(counts):
        table[b, :n] = order[sum(counts[:b]) :][:n]
    pairs = zip(case.queries, case.contexts, strict=True)
    positions, request = np.zeros((2, case.rows), np.int32)
    positions[: case.tokens] = np.concatenate([np.arange(c - q, c) for q, c in pairs])
    request[: case.tokens] = np.repeat(np.arange(len(counts)), case.queries)
    starts = np.full(case.requests + 1, case.tokens, np.int32)
    starts[: len(counts)] = np.cumsum([0, *case.queries[:-1]])
    batch = RaggedBatch(
        positions=jnp.asarray(positions),
        request=jnp.asarray(request),
        query_start=jnp.asarray(starts),
        page_table=jnp.asarray(table),
        num_tokens=jnp.int32(case.tokens),
    )
    return batch, len(order)


def spec(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


@functools.cache
def generator(shape: tuple[int, ...]) -> Callable[[int], jax.Array]:
    """seed -> normal values; compiled here."""

    def normal(seed):
        return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)

    return jax.jit(normal).lower(0).compile()


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled program of several launches, and what its operands look like."""

    run: Callable[..., Any]
    specs: Any

    @staticmethod
    def of(call: Callable[..., Any], plan: Plan, specs: Any) -> "Program":
        """Call i of `call` gets its own queries and the caches in turn."""

        def program(queries, keys, values):
            turns = [(queries[i], i % plan.caches) for i in range(plan.launches)]
            return [call(q, keys[n], values[n]) for q, n in turns]

        for leaf in jax.tree.leaves(specs):
            generator(leaf.shape)
        return Program(run=jax.jit(program).lower(*specs).compile(), specs=specs)

    def operands(self) -> Any:
        leaves, tree = jax.tree.flatten(self.specs)
        return tree.unflatten(generator(leaf.shape)(seed) for seed, leaf in enumerate(leaves))


def ours(case: Case, plan: Plan, schedules: list[Schedule]) -> dict[str, Program]:
    batch, pages = make_batch(case)
    cache = spec(pages, KV_HEADS, PAGE, HEAD_DIM)
    queries = [spec(case.rows, KV_HEADS, GROUP, HEAD_DIM)] * plan.launches
    specs = queries, [cache] * plan.caches, [cache] * plan.caches

    def call(q, k, v, *, schedule):
        options = dict(scale=HEAD_DIM**-0.5, window=None)
        if case.kv_split is not None:
            fields = [getattr(batch, f.name) for f in dataclasses.fields(batch)]
            topology = AttentionTopology(kv_block=KV_BLOCK, kv_split=case.kv_split)
            return attention_hopper_op(q, k, v, *fields, **options, topology=topology)[0]
        return attention_hopper(q, k, v, batch, **options, kv_block=KV_BLOCK, schedule=schedule)[0]

    if case.kv_split is not None:
        return {"the op's": Program.of(functools.partial(call, schedule=None), plan, specs)}
    return {str(s): Program.of(functools.partial(call, schedule=s), plan, specs) for s in schedules}


def cudnn(case: Case, plan: Plan) -> Program:
    if case.decode:
        shapes = [(len(case.queries), 1, case.contexts[0])]
    else:
        shapes = [(1, q, c) for q, c in zip(case.queries, case.contexts, strict=True)]
    queries = [spec(b, q, KV_HEADS * GROUP, HEAD_DIM) for b, q, _ in shapes]
    cache = [spec(b, c, KV_HEADS, HEAD_DIM) for b, _, c in shapes]

    def call(qs, ks, vs):
        attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
        return [
            attend(q, k, v, is_causal=not case.decode) for q, k, v in zip(qs, ks, vs, strict=True)
        ]

    return Program.of(
        call, plan, ([queries] * plan.launches, [cache] * plan.caches, [cache] * plan.caches)
    )


def race(case: Case, options: argparse.Namespace) -> None:
    """Builds a case's programs, says so, times them when told to, prints the rows."""
    plan = Plan.of(case)
    programs = ours(case, plan, candidates(case, every=case.name in options.further.split(",")))
    programs["cudnn"] = cudnn(case, plan)
    print("built", flush=True)
    sys.stdin.readline()
    operands = {name: program.operands() for name, program in programs.items()}
    runs = [(programs[name].run, operands[name], plan.launches) for name in programs]
    for run, arguments, _ in runs:
        jax.block_until_ready(run(*arguments))
    rounds = [device_times(runs) for _ in range(options.rounds)]
    times = dict(zip(programs, zip(*rounds, strict=True), strict=True))
    peer = statistics.median(times.pop("cudnn"))
    rows = [make_row(case, name, list(found), peer) for name, found in times.items()]
    print(json.dumps(rows), flush=True)


def start(case: Case) -> subprocess.Popen:
    """A process of this script for one case."""
    command = [*flags.words_for_cards([0]), sys.executable, *sys.argv, "--one", case.name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def say(child: subprocess.Popen) -> None:
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()


def hear(child: subprocess.Popen) -> str:
    """A line of a child's."""
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"{child.args} ended with {child.wait()}")
    return line


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


def candidates(case: Case, *, every: bool) -> list[Schedule]:
    chosen = schedule_for(
        tokens=case.rows,
        requests=case.requests,
        kv_heads=KV_HEADS,
        group=GROUP,
        head_dim=HEAD_DIM,
    )
    if not every:
        return [chosen]
    if not case.decode:
        other = "turns" if chosen.overlap == "scores" else "scores"
        return [chosen, dataclasses.replace(chosen, overlap=other)]
    half = dataclasses.replace(chosen, turned=False, half_rows=True)
    if chosen.columns == 1:
        return [chosen, dataclasses.replace(half, quiet=True)]
    chain = dataclasses.replace(chosen, columns=1, stages=3, overlap="scores")
    return [chosen, chain, dataclasses.replace(half, stages=3, most_columns=4)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(c.name for c in CASES))
    parser.add_argument("--further", default="", help="cases whose other schedules race too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", default="")
    parser.add_argument("--one", default="", help="for the processes that this starts")
    options = parser.parse_args()
    if options.one:
        race(next(c for c in CASES if c.name == options.one), options)
        return 0
    names = options.cases.split(",")
    children = {case.name: start(case) for case in CASES if case.name in names}
    for child in children.values():
        hear(child)
    rows: list[dict] = []
    for child in children.values():
        say(child)
        rows += json.loads(hear(child))
        child.wait()
        print({k: v for k, v in rows[-1].items() if k not in ("op", "rounds_us")}, flush=True)
        write(options.json, dict(rows=rows))
    write(options.json, header(copy_bandwidth(), sys.argv) | dict(rows=rows))
    return 0


def write(path: str, report: dict) -> None:
    if path:
        with open(path, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
