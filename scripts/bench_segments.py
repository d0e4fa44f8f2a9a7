"""Times products in segments of K: one launch against one accumulator, cuBLAS, separate products.

    python scripts/bench_segments.py lower programs/ [--workers 14] # anywhere
    python scripts/bench_segments.py run programs/ --json raw.json  # on the chip
    python scripts/bench_segments.py report raw.json --json out.json

Ours is the op `segmented_matmul` of a whole model (8 segments, rounded) and of a rank of two or
four (4 or 2 segments, float32 sums). Programs, times and the proof of equal bits are those of
bench_kernels.py.
"""

import argparse
import functools
import json
import pathlib
from typing import Any

import bench_kernels as bench
from lower_programs import add_lowering_options, lower_command

from bi_jax.pallas_kernels.matmul.schedule import schedule_for, segmented_schedule_for

NAMES = ("out", "qwen_down", "llama_down")
ROWS = {
    8: (64, 128, 256, 264, 512, 1024, 2048, 4096, 8192),
    4: (256, 264, 8192),
    2: (256, 264, 8192),
}
SEPARATE = ("qwen_down", 8), (256, 8192)  # (case, segments) and rows of the way without the kernel
PEAK = 989e12


def cell(name: str, segments: int, m: int) -> dict[str, bench.Program]:
    """Who is timed: "ours", "one" accumulator, "cublas", "separate" products and a tree."""
    n, whole = bench.SHAPES[name]
    k, out = whole * segments // 8, "bfloat16" if segments == 8 else "float32"
    new = functools.partial(bench.Program, shape=f"{name} {segments}", m=m, n=n, k=k, out=out)
    several = functools.partial(new, kind="segments", segments=segments)
    ours = segmented_schedule_for(m, n, k, segments=segments, out_dtype=out)
    found = dict(ours=several(schedule=ours))
    found["one"] = new(kind="matmul", schedule=schedule_for(m, n, k, out_dtype=out))
    if segments == 8:
        found["cublas"] = new(kind="matmul")
    if (name, segments) == SEPARATE[0] and m in SEPARATE[1]:
        found["separate"] = several()
    return found


def cells() -> list[dict[str, bench.Program]]:
    return [cell(name, s, m) for s, rows in ROWS.items() for name in NAMES for m in rows]


def programs() -> list[bench.Program]:
    timed = [program for members in cells() for program in members.values()]
    return bench.proof_programs(timed) + timed


def floor_us(p: bench.Program, bandwidth: float) -> float:
    """The larger of the bytes over a copy's speed and the operations over the peak."""
    moved = 2 * p.k * (p.n + p.m) + (2 if p.out == "bfloat16" else 4) * p.m * p.n
    return 1e6 * max(moved / bandwidth, 2 * p.m * p.n * p.k / PEAK)


def row_of(members: dict[str, bench.Program], times: dict[Any, float], bandwidth: float) -> Any:
    """A row of the report, or None where ours or its peer was not timed."""
    us = {who: round(times[key_of(p)], 2) for who, p in members.items() if key_of(p) in times}
    if not {"ours", "one"} <= us.keys():
        return None
    p = members["ours"]
    name = f"{p.shape.split()[0]}_{p.segments}_segments"
    row: dict[str, Any] = dict(op="segmented_matmul", case=name, rows=p.m, dtype="bfloat16")
    row |= dict(out_dtype=p.out, ours_us=us["ours"], peer="our own product of one segment")
    row |= dict(peer_us=us["one"], ratio=round(us["ours"] / us["one"], 4))
    row["ceiling_fraction"] = round(floor_us(p, bandwidth) / us["ours"], 4)
    return row | {f"{who}_us": us[who] for who in ("cublas", "separate") if who in us}


def key_of(p: bench.Program) -> tuple:
    return p.kind, p.shape, p.m, p.schedule is None


def report(raw: pathlib.Path, path: pathlib.Path) -> None:
    result = json.loads(raw.read_text())
    times = {
        (t["kind"], t["shape"], t["m"], t["schedule"] is None): t["us"] for t in result["times"]
    }
    bandwidth = result["header"]["copy_bandwidth_tb_s"] * 1e12
    found = (row_of(members, times, bandwidth) for members in cells())
    rows = [row for row in found if row]
    print(*map(json.dumps, rows), sep="\n")
    bench.write_report(path, dict(bits=[]) | result, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    add_lowering_options(commands.add_parser("lower", help="needs no GPU"))
    bench.add_run_options(commands.add_parser("run", help="compile, time and compare"))
    reporting = commands.add_parser("report", help="one row a cell from what `run` wrote")
    reporting.add_argument("raw", type=pathlib.Path)
    reporting.add_argument("--json", type=pathlib.Path, required=True)
    args = parser.parse_args()
    if args.command == "lower":
        lower_command(args, __file__, programs())
    elif args.command == "run":
        bench.run(args)
    else:
        report(args.raw, args.json)


if __name__ == "__main__":
    main()
