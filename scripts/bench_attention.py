"""Races the Hopper attention kernel against cuDNN, and checks its bits and its accuracy.

    python scripts/bench_attention.py [--bits] [--accuracy] [--times] [--quick] [--json FILE]

Times are device times of many launches in one jitted program: `launches` calls with their own queries and rotated
caches, the program enqueued `repeats` times back to back; the median over rounds that alternate between ours and
cuDNN. cuDNN is reached through jax.nn.dot_product_attention(implementation="cudnn") on contiguous caches.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from bi_jax.pallas_kernels.attention.kernel_hopper import attention_hopper
from bi_jax.pallas_kernels.attention.schedule import Schedule, schedule_for
from bi_jax.pallas_kernels.ragged import RaggedBatch

KV_BLOCK = 128
PAGE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Query and context lengths of the requests of one step."""

    name: str
    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128

    @property
    def tokens(self) -> int:
        return sum(self.queries)

    @property
    def flops(self) -> float:
        seen = sum(q * (2 * c - q + 1) / 2 for q, c in zip(self.queries, self.contexts, strict=True))
        return 4.0 * seen * self.head_dim * self.kv_heads * self.group

    @property
    def cache_bytes(self) -> int:
        return sum(self.contexts) * self.kv_heads * self.head_dim * 4


def whole(*lengths: int) -> dict:
    return dict(queries=lengths, contexts=lengths)


MIX = (4096, 1000, 2500, 333, 6000, 77)
CASES = (
    Case(name="prefill_2k", **whole(2048)),
    Case(name="prefill_8k", **whole(8192)),
    Case(name="prefill_32k", **whole(32768)),
    Case(name="prefill_mix", **whole(*MIX)),
    Case(name="decode_1x4096", queries=(1,), contexts=(4096,)),
    Case(name="decode_8x4096", queries=(1,) * 8, contexts=(4096,) * 8),
    Case(name="decode_64x4096", queries=(1,) * 64, contexts=(4096,) * 64),
    Case(name="decode_256x2048", queries=(1,) * 256, contexts=(2048,) * 256),
)


def make_batch(case: Case, *, seed: int = 0, page: int = PAGE) -> tuple[RaggedBatch, int]:
    """The metadata of a case with shuffled pages, and the number of pages."""
    rng = np.random.default_rng(seed)
    counts = [-(-c // page) for c in case.contexts]
    order = rng.permutation(sum(counts)).astype(np.int32)
    table = np.zeros((len(counts), max(counts)), np.int32)
    start = 0
    for b, n in enumerate(counts):
        table[b, :n] = order[start : start + n]
        start += n
    positions = np.concatenate([np.arange(c - q, c) for q, c in zip(case.queries, case.contexts, strict=True)])
    request = np.repeat(np.arange(len(counts)), case.queries)
    starts = np.concatenate([[0], np.cumsum(case.queries)])
    batch = RaggedBatch(
        positions=jnp.asarray(positions, jnp.int32),
        request=jnp.asarray(request, jnp.int32),
        query_start=jnp.asarray(starts, jnp.int32),
        page_table=jnp.asarray(table),
        num_tokens=jnp.int32(case.tokens),
    )
    return batch, start


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(seed, shape: tuple[int, ...], dtype) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def normal(seed: int, shape: tuple[int, ...], dtype=jnp.bfloat16) -> jax.Array:
    return _normal(jnp.int32(seed), shape, jnp.dtype(dtype))


def ours(case: Case, batch, schedule: Schedule, kv_block: int = KV_BLOCK, window=None):
    def call(q, k, v):
        scale = case.head_dim**-0.5
        return attention_hopper(
            q, k, v, batch, scale=scale, window=window, kv_block=kv_block, schedule=schedule
        )

    return call


def cudnn(case: Case):
    """cuDNN on one sequence after the other (prefill) or on the whole batch (decode)."""
    def call(qs, ks, vs):
        causal = case.queries[0] > 1
        outs = []
        for q, k, v in zip(qs, ks, vs, strict=True):
            outs.append(
                jax.nn.dot_product_attention(q, k, v, is_causal=causal and q.shape[1] > 1, implementation="cudnn")
            )
        return outs

    return call


def cudnn_inputs(case: Case, seed: int):
    heads = case.kv_heads * case.group
    if max(case.queries) == 1:
        shapes = [(len(case.queries), 1, case.contexts[0])]
    else:
        shapes = [(1, q, c) for q, c in zip(case.queries, case.contexts, strict=True)]
    qs = [normal(seed + i, (b, q, heads, case.head_dim)) for i, (b, q, _) in enumerate(shapes)]
    ks = [normal(seed + 100 + i, (b, c, case.kv_heads, case.head_dim)) for i, (b, _, c) in enumerate(shapes)]
    vs = [normal(seed + 200 + i, (b, c, case.kv_heads, case.head_dim)) for i, (b, _, c) in enumerate(shapes)]
    return qs, ks, vs


def repeated(call, launches: int):
    """One program with `launches` calls; call i gets its own queries and the caches in turn."""
    def program(queries, keys, values):
        return [call(queries[i], keys[i % len(keys)], values[i % len(values)]) for i in range(launches)]

    return jax.jit(program)


def time_once(program, arguments, launches: int, repeats: int) -> float:
    """Microseconds a call."""
    start = time.perf_counter()
    for _ in range(repeats):
        out = program(*arguments)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / repeats / launches * 1e6


def plan_launches(case: Case) -> tuple[int, int, int]:
    """Launches a program, repeats, caches rotated, so that a round takes some tens of milliseconds."""
    floor_us = max(case.flops / 600e6, case.cache_bytes / 4.2e6) + 5
    ragged = len(set(case.queries)) > 1  # cuDNN runs its sequences one by one: many calls to compile
    launches = 2 if ragged else int(np.clip(3000 / floor_us, 3, 12))
    repeats = int(np.clip(20_000 / (floor_us * launches), 2, 30))
    caches = int(np.clip(200e6 / case.cache_bytes, 2, 16))
    return launches, repeats, min(caches, launches)


def race(case: Case, schedules: list[Schedule], *, rounds: int) -> list[dict]:
    launches, repeats, caches = plan_launches(case)
    batch, pages = make_batch(case)
    programs = {}
    shape = (pages, case.kv_heads, PAGE, case.head_dim)
    q_shape = (case.tokens, case.kv_heads, case.group, case.head_dim)
    mine = (
        [normal(i, q_shape) for i in range(launches)],
        [normal(1000 + i, shape) for i in range(caches)],
        [normal(2000 + i, shape) for i in range(caches)],
    )
    for schedule in schedules:
        call = ours(case, batch, schedule)
        programs[str(schedule)] = (repeated(lambda q, k, v, call=call: call(q, k, v)[0], launches), mine)
    sets = [cudnn_inputs(case, 10_000 * (i + 1)) for i in range(caches)]
    theirs = (
        [[normal(77 + 13 * i + j, q.shape) for j, q in enumerate(sets[0][0])] for i in range(launches)],
        [s[1] for s in sets],
        [s[2] for s in sets],
    )
    programs["cudnn"] = (repeated(cudnn(case), launches), theirs)
    times = {name: [] for name in programs}
    failed = {}
    for name, (program, arguments) in programs.items():
        try:
            jax.block_until_ready(program(*arguments))
        except Exception as error:  # reported in the table: one variant must not end the run
            failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
    for _ in range(rounds):
        for name, (program, arguments) in programs.items():
            if name not in failed:
                times[name].append(time_once(program, arguments, launches, repeats))
    rows = []
    peer = statistics.median(times["cudnn"]) if times["cudnn"] else float("nan")
    for name in programs:
        if name == "cudnn":
            continue
        row = dict(op="attention", case=case.name, rows=case.tokens, dtype="bfloat16", schedule=name, peer="cudnn",
                   peer_us=round(peer, 2))
        if name in failed:
            rows.append(row | dict(error=failed[name]))
            continue
        us = statistics.median(times[name])
        decode = max(case.queries) == 1
        reached = case.cache_bytes / us / 1e6 if decode else case.flops / us / 1e6
        row |= dict(ours_us=round(us, 2), ratio=round(us / peer, 4), spread_us=[round(t, 2) for t in times[name]],
                    peer_spread_us=[round(t, 2) for t in times["cudnn"]])
        row |= dict(terabytes_a_second=round(reached, 3)) if decode else dict(teraflops=round(reached, 1))
        rows.append(row)
    if "cudnn" in failed:
        rows.append(dict(case=case.name, error="cudnn: " + failed["cudnn"]))
    return rows


# --- bits ---------------------------------------------------------------------------------------


def spread(rng, shape) -> np.ndarray:
    """Normal values times powers of two, so that another order of additions shows."""
    return rng.standard_normal(shape, np.float32) * np.exp2(rng.uniform(-4, 2, shape)).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequence:
    """One request's queries, keys and values on the host."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def make_sequence(rng, length: int, case: Case, dtype) -> Sequence:
    kv = (length, case.kv_heads, case.head_dim)
    q = spread(rng, (length, case.kv_heads, case.group, case.head_dim))
    return Sequence(q=q.astype(dtype), k=spread(rng, kv).astype(dtype), v=spread(rng, kv).astype(dtype))


def run_parts(parts, case: Case, *, schedule, dtype, page=PAGE, seed=0, kv_block=KV_BLOCK, pad=0, window=None):
    """Runs (sequence, first, last) parts as one ragged batch; everything not written is NaN.

    Returns o and lse as numpy, one row a query token of the parts in order.
    """
    rng = np.random.default_rng(seed)
    counts = [-(-last // page) for _, _, last in parts]
    order = rng.permutation(sum(counts) + 3)
    shape = (sum(counts) + 3, page, case.kv_heads, case.head_dim)
    keys, values = np.full(shape, np.nan, dtype), np.full(shape, np.nan, dtype)
    table = rng.integers(0, shape[0], (len(parts), max(counts) + 2)).astype(np.int32)
    used, tokens = 0, sum(last - first for _, first, last in parts)
    queries = np.full((tokens + pad, case.kv_heads, case.group, case.head_dim), np.nan, dtype)
    positions, request, starts = [], [], [0]
    for b, (sequence, first, last) in enumerate(parts):
        pages = order[used : used + counts[b]]
        used += counts[b]
        table[b, : counts[b]] = pages
        for n, p in enumerate(pages):
            take = min(page, last - n * page)
            keys[p, :take] = sequence.k[n * page : n * page + take]
            values[p, :take] = sequence.v[n * page : n * page + take]
        queries[starts[-1] : starts[-1] + last - first] = sequence.q[first:last]
        positions.append(np.arange(first, last))
        request.append(np.full(last - first, b))
        starts.append(starts[-1] + last - first)
    junk = np.full(pad, 2**30)
    batch = RaggedBatch(
        positions=jnp.asarray(np.concatenate([*positions, junk]), jnp.int32),
        request=jnp.asarray(np.concatenate([*request, junk]), jnp.int32),
        query_start=jnp.asarray(starts, jnp.int32),
        page_table=jnp.asarray(table),
        num_tokens=jnp.int32(tokens),
    )
    move = lambda x: jnp.asarray(np.ascontiguousarray(x.transpose(0, 2, 1, 3)))  # noqa: E731
    o, lse = attention_hopper(
        jnp.asarray(queries), move(keys), move(values), batch, scale=case.head_dim**-0.5, window=window,
        kv_block=kv_block, schedule=schedule,
    )
    return np.asarray(o)[:tokens], np.asarray(lse)[:tokens]


def differing(a: np.ndarray, b: np.ndarray) -> int:
    """Elements whose bit patterns differ; NaN counts as different from everything."""
    width = {2: np.uint16, 4: np.uint32}[a.dtype.itemsize]
    same = np.ascontiguousarray(a).view(width) == np.ascontiguousarray(b).view(width)
    return int(np.sum(~same | np.isnan(a.astype(np.float32)) | np.isnan(b.astype(np.float32))))


PREFILL, PREFILL_ONE = Schedule(consumers=2, stages=2), Schedule(consumers=1, stages=2)
PREFILL_SCORES = Schedule(consumers=2, stages=2, overlap="scores")
DECODE = Schedule(consumers=1, stages=3, overlap="scores")


def edges(length: int) -> list[int]:
    """Positions around page, block and tile edges."""
    around = {n + d for n in (0, 64, 128, 192, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768) for d in (-2, -1, 0, 1)}
    return sorted({p for p in around if 0 <= p < length} | {length - 1})


BIT_CASES = (  # KV heads, group, head size, dtype, window, length
    (2, 4, 128, "bfloat16", None, 1600),
    (2, 4, 128, "bfloat16", 300, 1600),
    (1, 8, 128, "bfloat16", None, 1600),
    (3, 3, 64, "float16", None, 1600),
    (4, 1, 128, "float16", None, 1600),
    (2, 2, 64, "bfloat16", 129, 1600),
    (2, 7, 128, "bfloat16", None, 1600),
    (1, 4, 128, "bfloat16", None, 32_768),
)


def check_bits(picks: list[int]) -> list[dict]:
    import ml_dtypes

    results = []
    for kv_heads, group, head_dim, name, window, length in (BIT_CASES[i] for i in picks):
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        case = Case(name="bits", queries=(1,), contexts=(1,), kv_heads=kv_heads, group=group, head_dim=head_dim)
        results.append(check_case(case, dtype, window, length=length, cuts=4 if length < 10_000 else 2))
    return results


def check_case(case: Case, dtype, window, *, length: int, cuts: int) -> dict:
    rng = np.random.default_rng(11)
    sequence, other = make_sequence(rng, length, case, dtype), make_sequence(rng, 700, case, dtype)
    run = lambda parts, **kw: run_parts(parts, case, dtype=dtype, window=window, **kw)  # noqa: E731
    o, lse = run([(sequence, 0, length)], schedule=PREFILL)
    found = dict(case=f"{case.kv_heads}x{case.group}x{case.head_dim} {dtype.name} window={window} length={length}")
    found["digest"] = hashlib.sha256(o.tobytes() + lse.tobytes()).hexdigest()[:16]
    found["nonfinite"] = int(np.sum(~np.isfinite(lse)) + np.sum(~np.isfinite(o.astype(np.float32))))

    def compare(name, got, rows):
        found[name] = [differing(got[0], o[rows]), differing(got[1], lse[rows])]

    compare("again", run([(sequence, 0, length)], schedule=PREFILL, seed=1), slice(None))
    compare("one_warpgroup", run([(sequence, 0, length)], schedule=PREFILL_ONE, seed=2), slice(None))
    compare("overlap_scores", run([(sequence, 0, length)], schedule=PREFILL_SCORES, seed=4), slice(None))
    compare("pages_of_128", run([(sequence, 0, length)], schedule=PREFILL, seed=3, page=128), slice(None))
    compare("few_ctas", run([(sequence, 0, length)], schedule=Schedule(ctas=7), seed=3), slice(None))
    # Chunks of one sequence, each in a batch with strangers before and after it.
    marks = np.sort(rng.choice(np.arange(1, length), cuts, replace=False))
    ends = [0, *map(int, marks), length]
    pieces = []
    for i, (first, last) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
        before = 1 + 37 * i
        got = run([(other, 0, before), (sequence, first, last), (other, 0, 90)], schedule=PREFILL, seed=i, pad=5 * i)
        pieces.append([x[before : before + last - first] for x in got])
    compare("chunks", [np.concatenate(x) for x in zip(*pieces, strict=True)], slice(None))
    # Decode: only the keys up to the position exist, everything behind is NaN.
    places = [p for p in edges(length)]
    if length > 10_000:
        places = [p for p in places if p > 8000 or p < 300]
    compare("decode", run([(sequence, p, p + 1) for p in places], schedule=DECODE, pad=3), places)
    compare("decode_two_wg", run([(sequence, p, p + 1) for p in places[::-1]], schedule=PREFILL), places[::-1])
    compare("alone", run([(sequence, places[-1], places[-1] + 1)], schedule=DECODE), places[-1:])
    control = run([(sequence, 0, length)], schedule=PREFILL_ONE, kv_block=64)
    compare("control_kv_block_64", control, slice(None))
    found["elements"] = [o.size, lse.size]
    good = all(v == [0, 0] for k, v in found.items() if k in (
        "again", "one_warpgroup", "overlap_scores", "pages_of_128", "few_ctas", "chunks", "decode", "decode_two_wg", "alone"))
    found["ok"] = good and found["control_kv_block_64"][0] > 0 and found["nonfinite"] == 0
    return found


# --- accuracy -----------------------------------------------------------------------------------


def check_accuracy() -> list[dict]:
    """Relative error against float64 of ours and of cuDNN, on the same inputs."""
    rows = []
    for dtype in (jnp.bfloat16, jnp.float16):
        case = Case(name="accuracy", **whole(2048))
        batch, pages = make_batch(case)
        heads = case.kv_heads * case.group
        q, k, v = (normal(s, (1, 2048, h, 128), dtype) for s, h in ((1, heads), (2, 8), (3, 8)))
        paged = lambda x: jnp.zeros((pages, 8, PAGE, 128), dtype).at[batch.page_table[0]].set(  # noqa: E731
            x[0].reshape(-1, PAGE, 8, 128).transpose(0, 2, 1, 3))
        mine, lse = ours(case, batch, PREFILL)(q.reshape(2048, 8, 4, 128), paged(k), paged(v))
        theirs = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        picks = np.array([0, 1, 5, 63, 64, 127, 128, 500, 777, 1023, 1024, 1500, 1999, 2046, 2047])
        q64, k64, v64 = (np.asarray(x[0], np.float64) for x in (q, k, v))
        expected = np.zeros((len(picks), heads, 128))
        expected_lse = np.zeros((len(picks), heads))
        for i, p in enumerate(picks):
            for h in range(heads):
                s = k64[: p + 1, h // 4] @ q64[p, h] * 128**-0.5
                e = np.exp(s - s.max())
                expected[i, h] = e @ v64[: p + 1, h // 4] / e.sum()
                expected_lse[i, h] = s.max() + np.log(e.sum())
        error = lambda x: float(np.linalg.norm(np.asarray(x, np.float64) - expected) / np.linalg.norm(expected))  # noqa: E731
        a, b = error(mine.reshape(2048, heads, 128)[picks]), error(theirs[0][picks])
        lse_error = float(np.max(np.abs(np.asarray(lse.reshape(2048, heads)[picks], np.float64) - expected_lse)))
        rows.append(dict(dtype=jnp.dtype(dtype).name, ours=a, cudnn=b, ratio=a / b, lse_max_error=lse_error))
    return rows


def candidates(case: Case, quick: bool) -> list[Schedule]:
    chosen = schedule_for(tokens=case.tokens, requests=len(case.queries), head_dim=case.head_dim)
    if quick:
        return [chosen]
    other = "turns" if chosen.overlap == "scores" else "scores"
    return [chosen, dataclasses.replace(chosen, overlap=other)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("bits", "accuracy", "times", "quick"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--cases", default="", help="comma-separated names; all by default")
    parser.add_argument("--only", default="", help="numbers of the bit cases; all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    device = jax.devices()[0]
    report = dict(date=time.strftime("%Y-%m-%d"), chip=device.device_kind, jax=jax.__version__,
                  command=" ".join(sys.argv))
    start = time.time()

    def save():
        if options.json:
            with open(options.json, "w") as file:
                json.dump(report, file, indent=1)

    if options.accuracy:
        report["accuracy"] = check_accuracy()
        for row in report["accuracy"]:
            print(row, flush=True)
        save()
    if options.bits:
        picks = [int(i) for i in options.only.split(",")] if options.only else range(len(BIT_CASES))
        report["bits"] = check_bits(list(picks))
        for row in report["bits"]:
            print(row, flush=True)
        save()
        print(f"bits done at {time.time() - start:.0f} s", flush=True)
    if options.times:
        report["rows"] = []
        names = options.cases.split(",") if options.cases else [c.name for c in CASES]
        for case in CASES:
            if case.name in names:
                for row in race(case, candidates(case, options.quick), rounds=options.rounds):
                    report["rows"].append(row)
                    print({k: v for k, v in row.items() if "spread" not in k}, flush=True)
                save()
                print(f"{case.name} done at {time.time() - start:.0f} s", flush=True)
    return 0 if all(row["ok"] for row in report.get("bits", [])) else 1


if __name__ == "__main__":
    sys.exit(main())
