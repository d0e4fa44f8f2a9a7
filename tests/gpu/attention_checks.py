"""Bits and accuracy of the Hopper attention kernel on a card; also `python -m` with numbers.

python -m tests.gpu.attention_checks [--accuracy] [--json FILE] [case number ...]
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from bi_jax.pallas_kernels.attention.kernel_hopper import attention_hopper
from bi_jax.pallas_kernels.attention.schedule import HEADS, MOST_HALF, Schedule, schedule_for
from bi_jax.pallas_kernels.ragged import RaggedBatch

KV_BLOCK, PAGE = 128, 64
PREFILL = Schedule(consumers=2, stages=2)
AHEAD = Schedule(consumers=2, stages=2, overlap="scores")
ONE = Schedule(consumers=1, stages=2)
DECODE = Schedule(consumers=1, stages=2, overlap="scores")  # float32 o takes a third stage's room


@dataclasses.dataclass(frozen=True, kw_only=True)
class BitCase:
    """Shapes of one proof; every fixture has many pages and KV blocks."""

    kv_heads: int
    group: int
    head_dim: int = 128
    dtype: str = "bfloat16"
    window: int | None = None
    length: int = 1600
    kv_split: int | None = None

    @property
    def element(self) -> np.dtype:
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))


CASES = (
    BitCase(kv_heads=2, group=4),
    BitCase(kv_heads=2, group=4, window=300),
    BitCase(kv_heads=1, group=8),
    BitCase(kv_heads=3, group=3, head_dim=64, dtype="float16"),
    BitCase(kv_heads=4, group=1, dtype="float16"),
    BitCase(kv_heads=2, group=2, head_dim=64, window=129),
    BitCase(kv_heads=2, group=7),
    BitCase(kv_heads=1, group=4, length=32_768),
    BitCase(kv_heads=2, group=4, kv_split=256),
    BitCase(kv_heads=3, group=3, head_dim=64, window=300, kv_split=512),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequence:
    """One request's queries [S, Nkv, G, Dh], keys and values [S, Nkv, Dh], on the host."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def make_sequence(rng: np.random.Generator, length: int, case: BitCase) -> Sequence:
    """Normal values times powers of two, so that another order of additions shows."""

    def spread(*shape: int) -> np.ndarray:
        scale = np.exp2(rng.uniform(-4, 2, shape)).astype(np.float32)
        return (rng.standard_normal(shape, np.float32) * scale).astype(case.element)

    kv = (length, case.kv_heads, case.head_dim)
    return Sequence(
        q=spread(length, case.kv_heads, case.group, case.head_dim), k=spread(*kv), v=spread(*kv)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """Sizes of a batch's arrays, used or not: runs with the same room share their programs."""

    tokens: int
    requests: int
    keys: int
    longest: int

    @staticmethod
    def of(*batches) -> "Room":
        """Room for each of several lists of parts."""
        return Room(
            tokens=max(sum(last - first for _, first, last in parts) for parts in batches) + 3,
            requests=max(map(len, batches)),
            keys=max(sum(_in_pages(last, 128) for *_, last in parts) for parts in batches) + 384,
            longest=max(_in_pages(last, 128) for parts in batches for *_, last in parts) + 128,
        )


def _in_pages(keys: int, page: int) -> int:
    return -(-keys // page) * page


def run_parts(
    parts,
    case: BitCase,
    *,
    schedule,
    room: Room | None = None,
    page=PAGE,
    seed=0,
    kv_block=KV_BLOCK,
    out_dtype=jnp.float32,
):
    """Runs (sequence, first, last) parts as one ragged batch on shuffled pages.

    What nobody wrote is NaN: padding queries, rows behind a request's last token, spare pages.
    Unused entries of the page table are random. Returns o and lse, one row a token of the parts;
    o in float32, before a rounding that could hide a difference, unless `out_dtype` says otherwise.
    """
    rng, room = np.random.default_rng(seed), room or Room.of(parts)
    counts = [-(-last // page) for _, _, last in parts]
    order = rng.permutation(room.keys // page)
    shape = (len(order), page, case.kv_heads, case.head_dim)
    keys, values = (np.full(shape, np.nan, case.element) for _ in range(2))
    table = rng.integers(0, 2**30, (room.requests, room.longest // page)).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum([last - first for _, first, last in parts])])
    tokens, used = int(starts[-1]), 0
    starts = np.concatenate([starts, np.full(room.requests - len(parts), tokens)])
    queries = np.full((room.tokens, case.kv_heads, case.group, case.head_dim), np.nan, case.element)
    positions, request = (np.full(room.tokens, 2**30) for _ in range(2))
    for b, (sequence, first, last) in enumerate(parts):
        table[b, : counts[b]] = order[used : used + counts[b]]
        used += counts[b]
        for n, p in enumerate(table[b, : counts[b]]):
            take = min(page, last - n * page)
            keys[p, :take] = sequence.k[n * page : n * page + take]
            values[p, :take] = sequence.v[n * page : n * page + take]
        rows = slice(starts[b], starts[b + 1])
        queries[rows], positions[rows] = sequence.q[first:last], np.arange(first, last)
        request[rows] = b
    batch = RaggedBatch(
        positions=jnp.asarray(positions, jnp.int32),
        request=jnp.asarray(request, jnp.int32),
        query_start=jnp.asarray(starts, jnp.int32),
        page_table=jnp.asarray(table),
        num_tokens=jnp.int32(tokens),
    )
    k_pages, v_pages = (
        jnp.asarray(np.ascontiguousarray(x.transpose(0, 2, 1, 3))) for x in (keys, values)
    )
    o, lse = attention_hopper(
        jnp.asarray(queries),
        k_pages,
        v_pages,
        batch,
        scale=case.head_dim**-0.5,
        window=case.window,
        kv_block=kv_block,
        kv_split=case.kv_split,
        schedule=schedule,
        out_dtype=out_dtype,
    )
    return np.asarray(o)[:tokens], np.asarray(lse)[:tokens]


def differing(a: np.ndarray, b: np.ndarray) -> int:
    """Elements whose bit patterns differ; NaN counts as different from everything."""
    width = {2: np.uint16, 4: np.uint32}[a.dtype.itemsize]
    same = np.ascontiguousarray(a).view(width) == np.ascontiguousarray(b).view(width)
    return int(np.sum(~same | np.isnan(a.astype(np.float32)) | np.isnan(b.astype(np.float32))))


def edges(length: int) -> list[int]:
    """Positions around the edges of pages, blocks and tiles, to the end of the sequence."""
    marks = (0, 64, 128, 192, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
    around = {mark + d for mark in marks for d in (-2, -1, 0, 1)}
    return sorted({p for p in around if 0 <= p < length} | {length - 1})


def check_case(case: BitCase) -> dict:
    """Compares one whole prefill with every other way to the same rows: [o, lse] differing.

    In float32; "rounded" compares what the model gets, with the float32 result rounded here.
    """
    rng, length = np.random.default_rng(11), case.length
    sequence, other = make_sequence(rng, length, case), make_sequence(rng, 700, case)
    whole, every = [(sequence, 0, length)], slice(None)
    places = edges(length)
    if length > 10_000:  # every decode row brings a cache of its own
        places = [p for p in places if p > 8000 or p < 300]
    steps, pieces = [(sequence, p, p + 1) for p in places], chunks(sequence, other, rng)
    room = Room.of(whole, steps, *(parts for parts, _ in pieces))
    run = functools.partial(run_parts, case=case, room=room)
    o, lse = run(whole, schedule=PREFILL)
    differ: dict[str, list[int]] = {}

    def compare(name, got, rows):
        differ[name] = [differing(got[0], o[rows]), differing(got[1], lse[rows])]

    def compare_rounded(name, parts, rows, tokens):
        """With the table's schedule for that many tokens."""
        chosen = schedule_for(
            tokens=tokens,
            requests=tokens,
            kv_heads=case.kv_heads,
            group=case.group,
            head_dim=case.head_dim,
        )
        got, _ = run(parts, schedule=chosen, seed=6, out_dtype=None)
        differ[name] = [differing(got, o[rows].astype(case.element)), 0]

    compare("again", run(whole, schedule=PREFILL, seed=1), every)
    compare("one_warpgroup", run(whole, schedule=ONE, seed=2), every)
    compare("overlap_scores", run(whole, schedule=AHEAD, seed=4), every)
    compare("pages_of_128", run(whole, schedule=PREFILL, seed=3, page=128), every)
    compare("by_heads", run(whole, schedule=dataclasses.replace(PREFILL, order="heads")), every)
    compare("few_ctas", run(whole, schedule=Schedule(ctas=7), seed=3), every)
    rounded, _ = run(whole, schedule=PREFILL, seed=5, out_dtype=None)
    differ["rounded"] = [differing(rounded, o.astype(case.element)), 0]
    found = []
    for seed, (parts, rows) in enumerate(pieces):
        got = run(parts, schedule=PREFILL, seed=seed)
        found.append([x[rows] for x in got])
    compare("chunks", [np.concatenate(x) for x in zip(*found, strict=True)], every)
    compare("decode", run(steps, schedule=DECODE), places)
    for name, schedule in decode_schedules(case).items():
        compare(name, run(steps, schedule=schedule, seed=7), places)
    if case.kv_split is None:
        for tokens in (1, 8, 64, 256):
            compare_rounded(f"decode_rounded_like_{tokens}", steps, places, tokens)
    compare("decode_two_wg", run(steps[::-1], schedule=PREFILL), places[::-1])
    compare("alone", run(steps[-1:], schedule=DECODE), places[-1:])
    control = run(whole, schedule=ONE, kv_block=64)
    control = [differing(control[0], o), differing(control[1], lse)]
    if case.kv_split is not None:  # one chain of blocks is another order of additions
        chain = run(whole, case=dataclasses.replace(case, kv_split=None), schedule=PREFILL)
        control = [
            min(control[0], differing(chain[0], o)),
            min(control[1], differing(chain[1], lse)),
        ]
    finite = bool(np.isfinite(lse).all() and np.isfinite(o.astype(np.float32)).all())
    equal = all(counts == [0, 0] for counts in differ.values())
    return dict(
        case=str(case),
        digest=hashlib.sha256(o.tobytes() + lse.tobytes()).hexdigest()[:16],
        differing=differ,
        control_kv_block_64=control,
        elements=[o.size, lse.size],
        ok=equal and finite and control[0] > 0 and control[1] > 0,
    )


def decode_schedules(case: BitCase) -> dict[str, Schedule]:
    """Further schedules for decode, by name, with room for a float32 o."""
    blocks = dataclasses.replace(DECODE, overlap="blocks")
    turned = dataclasses.replace(DECODE, overlap="scores", turned=True)
    found = {}
    if HEADS % case.group == 0:
        found = {"turned": turned, "turned_few_ctas": dataclasses.replace(turned, ctas=7)}
        if case.head_dim == 128:
            found["turned_2_parts"] = dataclasses.replace(turned, columns=2)
            found["turned_blocks_2_parts"] = dataclasses.replace(
                turned, overlap="blocks", columns=2
            )
    if case.group > MOST_HALF:
        return found | {"blocks": blocks}
    half = dataclasses.replace(DECODE, half_rows=True)
    found["half_rows_few_ctas"] = dataclasses.replace(half, ctas=7)
    found["half_rows_quiet"] = dataclasses.replace(half, quiet=True)
    for columns in (1, 2, 4) if case.head_dim == 128 else (1, 2):
        found[f"half_rows_{columns}_parts"] = dataclasses.replace(half, columns=columns)
    blocks = dataclasses.replace(blocks, half_rows=True)
    found |= {"half_blocks": blocks, "half_blocks_2_parts": dataclasses.replace(blocks, columns=2)}
    if case.head_dim == 128:
        found["half_blocks_2_or_4_parts"] = dataclasses.replace(blocks, columns=2, most_columns=4)
    return found


def chunks(sequence: Sequence, other: Sequence, rng) -> list[tuple[list, slice]]:
    """The sequence in chunks cut at random places, each among strangers of changing length.

    One batch a chunk, and the chunk's rows in it.
    """
    length = len(sequence.q)
    cuts = np.sort(rng.choice(np.arange(1, length), 4 if length < 10_000 else 2, replace=False))
    ends, found = [0, *map(int, cuts), length], []
    for i in range(len(ends) - 1):
        before, size = 1 + 37 * i, ends[i + 1] - ends[i]
        parts = [(other, 0, before), (sequence, ends[i], ends[i + 1]), (other, 0, 90)]
        found.append((parts, slice(before, before + size)))
    return found


def check_accuracy() -> list[dict]:
    """Relative error against float64, ours and cuDNN's, on the same inputs."""
    return [_accuracy(jnp.dtype(name)) for name in ("bfloat16", "float16")]


def _accuracy(dtype) -> dict:
    length, kv_heads, group, dim = 2048, 8, 4, 128
    heads, scale = kv_heads * group, dim**-0.5
    q, k, v = (
        jax.random.normal(jax.random.key(seed), (length, h, dim), dtype)
        for seed, h in ((1, heads), (2, kv_heads), (3, kv_heads))
    )
    sequence = Sequence(
        q=np.asarray(q).reshape(length, kv_heads, group, dim), k=np.asarray(k), v=np.asarray(v)
    )
    case = BitCase(kv_heads=kv_heads, group=group, dtype=dtype.name, length=length)
    o, lse = run_parts([(sequence, 0, length)], case, schedule=PREFILL, out_dtype=None)
    theirs = jax.nn.dot_product_attention(
        q[None], k[None], v[None], is_causal=True, implementation="cudnn"
    )
    picks = [0, 1, 5, 63, 64, 127, 128, 500, 777, 1023, 1024, 1500, 1999, 2046, 2047]
    true_o, true_lse = np.zeros((len(picks), heads, dim)), np.zeros((len(picks), heads))
    q64, k64, v64 = (np.asarray(x, np.float64) for x in (q, k, v))
    for i, p in enumerate(picks):
        for h in range(heads):
            s = k64[: p + 1, h // group] @ q64[p, h] * scale
            e = np.exp(s - s.max())
            true_o[i, h] = e @ v64[: p + 1, h // group] / e.sum()
            true_lse[i, h] = s.max() + np.log(e.sum())

    def error(x) -> float:
        difference = np.asarray(x, np.float64)[picks].reshape(true_o.shape) - true_o
        return float(np.linalg.norm(difference) / np.linalg.norm(true_o))

    ours, cudnn = error(o), error(np.asarray(theirs)[0])
    lse_error = np.abs(lse[picks].reshape(true_lse.shape) - true_lse).max()
    return dict(
        dtype=dtype.name, ours=ours, cudnn=cudnn, ratio=ours / cudnn, lse_max_error=float(lse_error)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int, help="cases of CASES")
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    report = dict(bits=[check_case(CASES[i]) for i in options.numbers])
    if options.accuracy:
        report["accuracy"] = check_accuracy()
    for rows in report.values():
        for row in rows:
            print(row, flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
    return 0 if all(row["ok"] for row in report["bits"]) else 1


if __name__ == "__main__":
    sys.exit(main())
