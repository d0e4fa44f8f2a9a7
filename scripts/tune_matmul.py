"""Offline tuning of the Hopper matmul's schedule table.

    python scripts/tune_matmul.py lower programs/                  # anywhere
    python scripts/bench_kernels.py run programs/ --json out.json  # on the chip
    python scripts/tune_matmul.py table out.json                   # prints the table's entries

A schedule whose float32 bits differ from the others' on spread operands is refused. Candidates come
from a model of the time of one output tile, so that few have to be compiled. sweep_matmul.py tries
candidates around what the table has, and survives one that hangs.
"""

import argparse
import dataclasses
import functools
import json
import math
import pathlib

import bench_kernels as bench
from lower_programs import lower

from bi_jax.pallas_kernels.matmul.schedule import Schedule, cdiv, fitted, normal_schedule

SMS = 132
# tile_m -> (us, us a column) of one wave of tiles at K = 4096, fitted to a first sweep on an H200.
TILE_US = {64: (8.5, 0.072), 128: (9.5, 0.133), 256: (12.0, 0.256)}
WIDEST = {64: 256, 128: 256, 256: 192}
BUCKETS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
CLOSE = 1.06  # a second candidate is worth compiling when the model puts it this near


def modelled(m: int, n: int, tile_m: int, tile_n: int) -> float:
    fixed, column = TILE_US[tile_m]
    tiles = cdiv(m, tile_m) * cdiv(n, tile_n)
    return cdiv(tiles, SMS) * (fixed + column * tile_n)


def tiles_of(m: int, n: int, parts: int) -> list[tuple[int, int]]:
    """(tile_m, columns of the product as it is multiplied), the best by the model first."""
    found = []
    for tile_m, widest in WIDEST.items():
        if tile_m > 64 and tile_m >= 2 * m:
            continue
        step = 16 * parts
        for tile_n in range(32, widest + 1, step):
            penalty = 1.0 if tile_n % (64 * parts) == 0 else 1.01 if tile_n % 32 == 0 else 1.03
            found.append((modelled(m, n * parts, tile_m, tile_n) * penalty, tile_m, tile_n))
    found.sort()
    best = found[0][0]
    near = [f for f in found[1:] if f[0] <= best * CLOSE]
    picks = [found[0], *[f for f in near if f[1] != found[0][1]][:1]]
    if m >= 2048 and n * parts > 8192:
        picks += [f for f in near if f not in picks][:1]
    return [(tile_m, tile_n) for _, tile_m, tile_n in picks]


def candidates(m: int, n: int, k: int, parts: int, several: bool) -> list[Schedule]:
    if m <= 64:
        found = few_rows(m, n, k, parts)
    elif m <= 320:
        found = some_rows(m, n, k, parts)
    else:
        found = many_rows(m, n, k, parts)
    return list(dict.fromkeys(found)) if several else found[:1]


def few_rows(m: int, n: int, k: int, parts: int) -> list[Schedule]:
    """One read of the weights: an equal share for every SM, or 64 columns of swapped operands."""
    new = functools.partial(normal_schedule, parts=parts, k=k)
    even = cdiv(cdiv(n * parts, SMS), 16 * parts) * 16
    if even * parts <= 64:
        found = [new(64, even, tile_k=128, cluster_n=2), new(64, even, tile_k=128)]
    elif even * parts <= 256:
        found = [new(64, 128 // parts, tile_k=128, cluster_n=2), new(64, even)]
    else:
        found = [new(64, 64, tile_k=128, cluster_n=2), new(64, 128, tile_k=128)]
    if parts == 1:
        for tile_k in (256, 128):
            found.append(Schedule(tile_m=m, tile_n=64, tile_k=tile_k, swap=True, split="n"))
    if even * parts <= 32:
        found += [new(64, even, tile_k=256), new(64, even, tile_k=256, cluster_n=2)]
        found.append(new(64, even, tile_k=128, cluster_n=4))
    return found


def some_rows(m: int, n: int, k: int, parts: int) -> list[Schedule]:
    new = functools.partial(normal_schedule, parts=parts, k=k)
    found = [new(tile_m, tile_n // parts) for tile_m, tile_n in tiles_of(m, n, parts)]
    if m > 256 and parts == 1:
        return found + little_more_than_a_tile(m, n, k)
    if m <= 128:
        narrow = [t for t in found if t.tile_m == 64 and t.tile_n <= 96]
        found = [new(64, t.tile_n, tile_k=128) for t in narrow] + found
        if n > 32768:
            found = [new(128, 128, cluster_n=2), *found]
        elif n > 8192:
            found.append(new(64, 224 // parts, cluster_m=2))
    elif 8192 < n <= 32768:
        found.append(new(256, 112 // parts))
    return found


def little_more_than_a_tile(m: int, n: int, k: int) -> list[Schedule]:
    """Rows that leave most of the last tile empty."""
    half = cdiv(m, 16) * 8  # swapped tiles are multiples of 8 rows
    swapped = functools.partial(Schedule, tile_m=half, swap=True, split="n", out_slots=1)
    if n <= 6144:
        return [swapped(tile_n=64), swapped(tile_n=128, warpgroups=2)]
    found = [swapped(tile_n=64 * w, warpgroups=w) for w in (2, 3)]
    # A warpgroup without rows passes its tile over. With 132 CTAs and three tiles along M, every
    # third CTA would get nothing but such tiles.
    for tile_n in (192, 224, 256):
        found.append(normal_schedule(128, tile_n, parts=1, k=k, ctas=131, pass_empty=True))
    found.append(Schedule(tile_m=64, tile_n=256, warpgroups=2, split="turns", ctas=131))
    return found


def many_rows(m: int, n: int, k: int, parts: int) -> list[Schedule]:
    new = functools.partial(normal_schedule, parts=parts, k=k)
    found = [new(tile_m, tile_n // parts) for tile_m, tile_n in tiles_of(m, n, parts)]
    if m >= 1024:
        found.append(new(128, 192 // parts, split="turns"))
        found.append(new(256, 192 // parts))
    if parts == 2:
        found.append(new(128, 128))
    return found


def tuning_programs() -> list[bench.Program]:
    programs = {}
    for kind, shapes, rows in (
        ("matmul", bench.SHAPES, bench.ROWS),
        ("swiglu", bench.SWIGLU_SHAPES, bench.SWIGLU_ROWS),
    ):
        parts = 2 if kind == "swiglu" else 1
        for name, (n, k) in shapes.items():
            out = "float32" if name == "lm_head" else "bfloat16"
            new = functools.partial(bench.Program, kind=kind, shape=name, n=n, k=k, out=out)
            for m in rows:
                rows_here = bench.bucket(m)
                several = rows_here in (*BUCKETS, 264)
                for s in candidates(rows_here, n, k, parts, several):
                    if out == "float32" and s.swap:
                        continue
                    programs[new(m=rows_here, schedule=fitted(s, parts))] = None
                programs[new(m=m)] = None
    return list(programs)


def table(paths: list[pathlib.Path]) -> None:
    """Prints {(N, K, parts): ((up to rows, schedule fields), ...)} of the fastest schedules."""
    results = [json.loads(path.read_text()) for path in paths]
    bits = [b for result in results for b in result["bits"]]
    ours = [b for b in bits if b["schedule"] and b["kind"].startswith("bits")]
    refused = [b["schedule"] for b in ours if b["differing"]]
    if refused:
        raise SystemExit(f"{len(refused)} schedules change bits: {refused[:2]}")
    best = {}
    for t in (t for result in results for t in result["times"]):
        if t["schedule"] is None:
            continue
        key = (t["n"], t["k"], 2 if t["kind"] == "swiglu" else 1)
        cell = best.setdefault(key, {})
        if t["us"] < cell.get(t["m"], (math.inf, None))[0]:
            cell[t["m"]] = (t["us"], t["schedule"])
    for key, cell in best.items():
        print(f"    {key}: (")
        rows = [m for m in sorted(cell) if m in (*BUCKETS, 264)]
        fields = [_changed(cell[m][1]) for m in rows]
        for m, here, following in zip(rows, fields, [*fields[1:], None], strict=True):
            if here != following:
                limit = 320 if m == 264 else "MANY" if following is None else m
                print(f"        ({limit}, Schedule({here})),")
        print("    ),")


def _changed(schedule: dict) -> str:
    defaults = {f.name: f.default for f in dataclasses.fields(Schedule)}
    return ", ".join(f"{k}={v!r}" for k, v in schedule.items() if v != defaults[k])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    lowering = commands.add_parser("lower")
    lowering.add_argument("programs", type=pathlib.Path)
    printing = commands.add_parser("table")
    printing.add_argument("json", type=pathlib.Path, nargs="+")
    args = parser.parse_args()
    if args.command == "table":
        table(args.json)
        return
    programs = tuning_programs()
    lower(programs + bench.proof_programs(programs), args.programs)


if __name__ == "__main__":
    main()
