"""Races the Hopper token choice against XLA's argmax, log_softmax, categorical, top_k and sort.

    python scripts/bench_token_choice.py [--rows 1,8,64,256] [--vocab N] [--kinds A,B]
        [--all-schedules] [--only bits|times] [--reference] [--json FILE] [--dry-run]

First the bits: rows alone, among poisoned neighbours and under every schedule against the whole
batch, the shared step against the two ops, and a control with other blocks that has to differ. Then
device times from the profiler: several launches in one jitted program, each over logits of its own,
several times the L2 cache together; medians. ceiling_fraction is one read of the logits at the
speed of a copy measured in the same run, over the time. --reference notes what the cuts' reference
takes there, by the host's clock. --dry-run runs tiny cases in the interpreter on a CPU.
"""

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_timing import copy_bandwidth, device_times, header, wall_times

from bi_jax.pallas_kernels.float_order import LOWEST
from bi_jax.pallas_kernels.log_softmax import LogSoftmaxTopology
from bi_jax.pallas_kernels.log_softmax.kernel_hopper import target_logprobs_hopper
from bi_jax.pallas_kernels.log_softmax.schedule import Schedule, schedule_for
from bi_jax.pallas_kernels.primitive import REFERENCE
from bi_jax.pallas_kernels.sampling import (
    SamplingTopology,
    choose_token,
    find_cut,
    top_tokens,
    topology_for,
)
from bi_jax.pallas_kernels.sampling.kernel_cut_hopper import find_cut_hopper, top_tokens_hopper
from bi_jax.pallas_kernels.sampling.kernel_hopper import (
    choose_and_score_hopper,
    choose_token_hopper,
)
from bi_jax.testing import bit_difference

ROTATED_BYTES = 250e6  # logits of one program, against an L2 of 50 to 60 MB
CUT_SIZES = (1, 2, 3, 8, 33, 100)
WALKS = (1, 2, 4, 8, 16)  # blocks a CTA
P = 0.95
CUTS = {  # temperature, top-k, top-p
    "cut_top_k_top_p": (0.6, 20, P),
    "cut_top_p": (1.0, 0, P),
    "cut_top_k": (1.0, 20, 0.0),
}
TOPS = {"top_20": 20, "top_64": 64}
PEERS = dict.fromkeys((*CUTS, *TOPS), "XLA top_k") | {"cut_top_p": "XLA sort"}
CHOICES = ("greedy", "greedy_among_drawn", "drawn", "logprob_alone")
KINDS = (*CHOICES, *CUTS, *TOPS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Rows, columns, and where it runs."""

    rows: int
    vocab: int
    dry: bool

    @property
    def topology(self) -> SamplingTopology:
        return SamplingTopology(block=256) if self.dry else topology_for(vocab_size=self.vocab)

    @property
    def blocks(self) -> int:
        return -(-self.vocab // self.topology.block)

    @property
    def bytes(self) -> int:
        return self.rows * self.vocab * 4

    def options(self, schedule: Schedule) -> dict[str, Any]:
        return dict(topology=self.topology, schedule=schedule, interpret=self.dry)


def everything(rows: int, vocab: int) -> tuple[jax.Array, jax.Array]:
    return jnp.full((rows,), LOWEST, jnp.int32), jnp.full((rows,), vocab, jnp.int32)


@functools.partial(jax.jit, static_argnums=1)
def model_like(seed: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Flat and peaked rows, with ties; a peaked row shows every bit of its log-sum."""
    widths = jnp.resize(jnp.array([2.5, 6.0, 12.0], jnp.float32), (shape[0], 1))
    x = widths * jax.random.normal(jax.random.key(seed), shape, jnp.float32) + 7
    return jnp.round(x * 16) / 16


def words_of(rows: int) -> jax.Array:
    return jax.random.bits(jax.random.key(7), (rows, 2), jnp.uint32)


Call = Callable[..., Any]


def step(problem: Problem, schedule: Schedule, *, sampled: bool) -> Call:
    """(logits, words, inverse) -> token, bad, logprob, lse, in the shared step."""

    def call(logits, words, inverse):
        rows = logits.shape[0]
        cut = everything(rows, problem.vocab)
        arguments = logits, words, inverse, *cut, jnp.ones((rows,)), *cut, jnp.int32(rows)
        return choose_and_score_hopper(*arguments, sampled=sampled, **problem.options(schedule))

    return call


def apart(problem: Problem, schedule: Schedule) -> Call:
    """The same by the two ops."""

    def call(logits, words, inverse):
        rows = logits.shape[0]
        cut, count = everything(rows, problem.vocab), jnp.int32(rows)
        options = problem.options(schedule)
        token, bad = choose_token_hopper(logits, words, inverse, *cut, count, **options)
        options["topology"] = LogSoftmaxTopology(block=problem.topology.block, lanes=128)
        logprob, lse = target_logprobs_hopper(
            logits, token[:, None], jnp.ones((rows,)), *cut, count, **options
        )
        return token, bad, logprob[:, 0], lse

    return call


def logprob_alone(problem: Problem, schedule: Schedule) -> Call:
    def call(logits, words, inverse):
        del words
        rows = logits.shape[0]
        options = problem.options(schedule)
        options["topology"] = LogSoftmaxTopology(block=problem.topology.block, lanes=128)
        target = jnp.zeros((rows, 1), jnp.int32)
        cut = everything(rows, problem.vocab)
        return target_logprobs_hopper(logits, target, inverse, *cut, jnp.int32(rows), **options)

    return call


def filters(kind: str, rows: int) -> tuple[jax.Array, ...]:
    """inv_temperature, top_k, top_p and log_min_p of every row."""
    temperature, k, p = CUTS[kind]
    wanted = np.float32(1 / temperature), np.int32(k), np.uint32(p * 2**32), np.float32(-np.inf)
    return tuple(jnp.full((rows,), value) for value in wanted)


def cut(kind: str, problem: Problem, schedule: Schedule) -> Call:
    def call(logits, words, inverse):
        del words
        rows = logits.shape[0]
        inverse, k, p, gap = filters(kind, rows)
        options = problem.options(schedule)
        return find_cut_hopper(logits, inverse, k, p, gap, jnp.int32(rows), **options)

    return call


def top(kind: str, problem: Problem, schedule: Schedule) -> Call:
    def call(logits, words, inverse):
        del words, inverse
        count = jnp.int32(logits.shape[0])
        return top_tokens_hopper(logits, count, count=TOPS[kind], **problem.options(schedule))

    return call


def xla_cut(kind: str) -> Call:
    """The last token kept, as one would write it: by `top_k` where there is a k, else by a sort."""
    temperature, k, p = CUTS[kind]

    def call(logits, words, inverse):
        del words, inverse
        x = logits / temperature
        values, ids = jax.lax.top_k(x, k) if k else (-jnp.sort(-x, axis=1), None)
        if p:
            shares = jax.nn.softmax(values, axis=1)
            before = jnp.cumsum(shares, axis=1) - shares
            last = jnp.sum(before < p, axis=1, keepdims=True) - 1
        else:
            last = jnp.full((x.shape[0], 1), k - 1)
        found = [jnp.take_along_axis(a, last, axis=1) for a in (values, ids) if a is not None]
        return tuple(found)

    return call


def xla(kind: str) -> Call:
    """What a user of stock JAX would write."""
    if kind in CUTS:
        return xla_cut(kind)
    if kind in TOPS:
        return lambda logits, words, inverse: jax.lax.top_k(logits, TOPS[kind])

    def call(logits, words, inverse):
        if kind == "logprob_alone":
            token = jnp.zeros(logits.shape[:1], jnp.int32)
        elif kind == "drawn":
            key = jax.random.wrap_key_data(words[0], impl="threefry2x32")
            token = jax.random.categorical(key, logits * inverse[:, None])
        else:
            token = jnp.argmax(logits, axis=1)
        logprobs = jax.nn.log_softmax(logits, axis=1)
        return token, jnp.take_along_axis(logprobs, token[:, None], 1)

    return call


def ours(kind: str, problem: Problem, schedule: Schedule) -> Call:
    if kind in CUTS:
        return cut(kind, problem, schedule)
    if kind in TOPS:
        return top(kind, problem, schedule)
    if kind == "logprob_alone":
        return logprob_alone(problem, schedule)
    return step(problem, schedule, sampled=kind != "greedy")


def differing(a: Any, b: Any) -> int:
    """How many of two lists of arrays differ in a bit."""
    return sum(bit_difference(x, y) is not None for x, y in zip(a, b, strict=True))


def check_bits(problem: Problem) -> dict[str, Any]:
    """Every entry but the control, and tokens_unlike_reference's drawn ones, has to be 0."""
    rows = problem.rows
    logits = model_like(0, (rows, problem.vocab))
    words, inverse = (
        words_of(rows),
        jnp.asarray(np.resize(np.array([0, 1, 1.4, 0.5], np.float32), rows)),
    )
    one = schedule_for(rows=rows, blocks=problem.blocks)
    run = jax.jit(step(problem, one, sampled=True))
    whole = [np.asarray(a) for a in run(logits, words, inverse)]
    found: dict[str, Any] = {"again": differing(run(logits, words, inverse), whole)}
    for n in (n for n in CUT_SIZES if n < rows):
        part = run(logits[-n:], words[-n:], inverse[-n:])
        found[f"last_{n}_rows"] = differing(part, [a[-n:] for a in whole])
    poisoned = logits.at[: rows // 2].set(jnp.nan)
    beside = run(poisoned, words, inverse)
    found["poisoned"] = differing([a[rows // 2 :] for a in beside], [a[rows // 2 :] for a in whole])
    for n in WALKS:
        other = jax.jit(step(problem, Schedule(blocks_a_cta=n), sampled=True))
        found[f"walk_{n}"] = differing(other(logits, words, inverse), whole)
    found["two_ops"] = differing(jax.jit(apart(problem, one))(logits, words, inverse), whole)
    found["control"] = differing([control(problem, logits, whole[0])], [whole[2]])
    cut = everything(rows, problem.vocab)
    stated, _ = choose_token(logits, words, inverse, *cut, backend=REFERENCE)
    unlike = np.asarray(stated) != whole[0]  # the reference has XLA's exp: draws may differ
    greedy = np.asarray(inverse) == 0
    found["tokens_unlike_reference"] = dict(greedy=int(unlike[greedy].sum()), all=int(unlike.sum()))
    found["logprob_error"] = error_of(np.asarray(logits), whole[0], whole[2])
    return found


def control(problem: Problem, logits: jax.Array, token: np.ndarray) -> jax.Array:
    """Log-probabilities with blocks of half the size, or twice where those would be too many."""
    block = problem.topology.block
    block = block // 2 if 2 * problem.blocks <= 128 else block * 2
    rows = logits.shape[0]
    return target_logprobs_hopper(
        *(logits, jnp.asarray(token)[:, None], jnp.ones((rows,))),
        *everything(rows, problem.vocab),
        jnp.int32(rows),
        topology=LogSoftmaxTopology(block=block, lanes=128),
        interpret=problem.dry,
    )[0][:, 0]


def error_of(logits: np.ndarray, token: np.ndarray, logprob: np.ndarray) -> float:
    """The largest absolute error against float64."""
    x = logits.astype(np.float64)
    top = x.max(1)
    exact = x[np.arange(len(x)), token] - top - np.log(np.exp(x - top[:, None]).sum(1))
    return float(np.abs(logprob - exact).max())


@dataclasses.dataclass(frozen=True)
class Race:
    """Programs of one kind and size, ours by schedule and the peer's, on the same logits."""

    kind: str
    problem: Problem
    names: list[str]
    runs: list[tuple[Any, tuple, int]]  # compiled program, arguments, launches in it


def prepare(kind: str, problem: Problem, schedules: list[Schedule]) -> Race:
    launches = 2 if problem.dry else int(np.clip(ROTATED_BYTES / problem.bytes, 2, 8))
    drawn = kind in ("drawn", "logprob_alone")
    arguments = (
        [model_like(i, (problem.rows, problem.vocab)) for i in range(launches)],
        words_of(problem.rows),
        jnp.full((problem.rows,), 1.0 if drawn else 0.0),
    )
    calls = {str(s): ours(kind, problem, s) for s in schedules} | {"xla": xla(kind)}
    programs = [repeated(call).lower(*arguments).compile() for call in calls.values()]
    for program in programs:
        jax.block_until_ready(program(*arguments))
    return Race(kind, problem, list(calls), [(p, arguments, launches) for p in programs])


def repeated(call: Call) -> Any:
    return jax.jit(lambda logits, *rest: [call(x, *rest) for x in logits])


def finish(races: list[Race], copy: float) -> list[dict]:
    """One row a schedule, from device times of all programs."""
    runs = [run for race in races for run in race.runs]
    dry = races[0].problem.dry
    times = iter(wall_times(runs) if dry else device_times(runs))
    rows = []
    for race in races:
        found = {name: next(times) for name in race.names}
        peer = found.pop("xla")
        rows += [make_row(race, name, us, peer, copy) for name, us in found.items()]
    return rows


def make_row(race: Race, schedule: str, us: float, peer: float, copy: float) -> dict:
    problem = race.problem
    return dict(
        op="token_choice",
        case=f"{race.kind}_{problem.vocab}",
        rows=problem.rows,
        dtype="float32",
        ours_us=round(us, 2),
        peer=PEERS.get(race.kind, "XLA argmax, categorical and log_softmax"),
        peer_us=round(peer, 2),
        ratio=round(us / peer, 4),
        ceiling_fraction=round(problem.bytes / (copy * us / 1e6), 4),
        schedule=schedule,
    )


def reference_times(problem: Problem) -> list[dict]:
    """What the references of cuts and top tokens take, by the host's clock."""
    logits = model_like(0, (problem.rows, problem.vocab))
    found = []
    for kind in ("cut_top_k_top_p", "cut_top_p", "top_20"):

        def call(logits, kind=kind):
            if kind in TOPS:
                return top_tokens(logits, TOPS[kind], backend=REFERENCE)
            return find_cut(logits, *filters(kind, problem.rows), backend=REFERENCE)

        run = jax.jit(call)
        jax.block_until_ready(run(logits))
        us = wall_times([(run, (logits,), 1)])[0]
        found.append(dict(case=f"{kind}_{problem.vocab}", rows=problem.rows, us=round(us, 1)))
        print("reference", found[-1], flush=True)
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,8,64,256")
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--all-schedules", action="store_true")
    parser.add_argument("--only", choices=("bits", "times"), default="")
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--json", default="")
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args()


def main() -> int:
    options = parse()
    sizes = [int(r) for r in options.rows.split(",")]
    dry, vocab = options.dry_run, 1100 if options.dry_run else options.vocab
    copy = 1e12 if dry else copy_bandwidth()
    report: dict[str, Any] = dict(header={} if dry else header(copy, sys.argv))
    if options.only != "times":
        report["bits"] = check_bits(Problem(rows=max(sizes), vocab=vocab, dry=dry))
    print(report, flush=True)
    races = []
    for kind in options.kinds.split(",") if options.only != "bits" else ():
        for rows in sizes:
            problem = Problem(rows=rows, vocab=vocab, dry=dry)
            schedules = [schedule_for(rows=rows, blocks=problem.blocks)]
            if options.all_schedules:
                schedules = [Schedule(blocks_a_cta=n) for n in WALKS]
            races.append(prepare(kind, problem, schedules))
    report["rows"] = finish(races, copy) if races else []
    if options.reference:
        problems = [Problem(rows=rows, vocab=vocab, dry=dry) for rows in sizes]
        report["reference"] = [row for problem in problems for row in reference_times(problem)]
    for row in report["rows"]:
        print({k: v for k, v in row.items() if k != "op"}, flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
