"""A sweep of matmul schedules on the card that survives a candidate which hangs.

    python scripts/sweep_matmul.py lower programs/ --workers 14      # anywhere
    python scripts/sweep_matmul.py run programs/ --json out.json     # on the chip
    python scripts/sweep_matmul.py report out.json                   # candidates by cell
    python scripts/tune_matmul.py table out.json                     # prints the table's entries

Candidates are lowered by several processes, then compiled, compared in float32 bits and timed by
one process beside cuBLAS. That process notes which program it is running; if one does not come
back, the process is ended, the program is left out, and the rest begins again.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
import time

import bench_kernels as bench
import bench_segments
import kernel_cells
from lower_programs import add_lowering_options, lower_command

from bi_jax.pallas_kernels.matmul.schedule import (
    SMS,
    Schedule,
    cdiv,
    fitted,
    schedule_for,
    segmented_schedule_for,
)

SILENCE = 25.0  # seconds that one program may take for its first run
ROWS = (8, 16, 32, 64, 128, 256, 257, 512, 1024, 4096, 8192)
SEGMENT_ROWS = (264, 4096)


def swapped(tile_m: int, tile_n: int, warpgroups: int = 1, **fields) -> Schedule:
    fields = dict(out_slots=1 if tile_m > 64 else 2) | fields
    return Schedule(
        tile_m=tile_m, tile_n=tile_n, swap=True, split="n", warpgroups=warpgroups, **fields
    )


def plain(tile_m: int, tile_n: int, **fields) -> Schedule:
    return Schedule(tile_m=tile_m, tile_n=tile_n, **dict(warpgroups=max(tile_m // 64, 1)) | fields)


def pair(tile_m: int, tile_n: int, **fields) -> Schedule:
    """Two warpgroups, also for 256 rows."""
    return plain(tile_m, tile_n, warpgroups=2, **fields)


def turns(tile_m: int, tile_n: int, **fields) -> Schedule:
    return pair(tile_m, tile_n, split="turns", **fields)


def both(*schedules: Schedule) -> list[Schedule]:
    """With a product left running when the next one is issued, and without."""
    return [dataclasses.replace(s, inflight=i) for s in schedules for i in (1, 0)]


def few_rows(m: int, n: int, parts: int) -> list[Schedule]:
    """One read of the weights."""
    even = cdiv(cdiv(n * parts, SMS), 16 * parts) * 16
    widths = [even] if even * parts <= 64 else [64 // parts, 128 // parts]
    found = both(*(plain(64, w, tile_k=128, cluster_n=c) for w in widths for c in (1, 2)))
    if even * parts <= 64:  # one block of results a CTA, and its slot may be a stage
        found += both(*(plain(64, even, tile_k=k, out_slots=1) for k in (64, 128, 256)))
    if 64 < even * parts <= 256:
        found += [plain(64, even), plain(64, even, tile_k=128, out_slots=1)]
    found += [swapped(m, 64, tile_k=k) for k in (128, 256)]
    return [*found, swapped(m, 128, 2, tile_k=128), swapped(m, 192, 3)]


def some_rows(m: int, n: int, parts: int) -> list[Schedule]:
    """One or two tiles of 128 rows, or of 136 or 160; widths that fill the multiprocessors."""
    if m > 256:
        tile = cdiv(m, 16) * 8
        if parts == 2:
            return []
        narrow = [swapped(tile, 64), swapped(tile, 128, 2)]
        wide = [swapped(tile, 128, 2), swapped(tile, 192, 3), swapped(tile, 256, 2)]
        tiles = narrow if n <= 6144 else wide
        return both(*tiles, *(dataclasses.replace(s, cluster_m=2) for s in tiles))
    found = []
    for tile_m in (64, 128, 256):
        share = n * parts * cdiv(m, tile_m) // SMS
        width = cdiv(share, 16 * parts) * 16
        if tile_m <= m and 32 <= width * parts <= (192 if tile_m == 256 else 256):
            found.append(plain(tile_m, width, warpgroups=min(tile_m // 64, 2)))
            if width * parts <= 96:
                found.append(dataclasses.replace(found[-1], tile_k=128))
    if n * parts > 32768:
        found += [pair(128, 256), pair(128, 192), pair(128, 128, cluster_n=2), turns(128, 192)]
    if parts == 1:
        found += [swapped(128, w, w // 64) for w in (64, 128, 192) if n / w * m / 128 < 3 * SMS]
    return both(*found)


def many_rows(m: int, n: int, parts: int) -> list[Schedule]:
    found = both(pair(256, 192 // parts), pair(128, 256 // parts), turns(128, 192 // parts))
    if m > 1024:
        return [*found, turns(128, 176 if parts == 1 else 80)]
    found += [pair(128, 192 // parts), pair(128, 128 // parts), turns(128, 128 // parts)]
    return [*found, pair(128, 224 // parts)]


def candidates(m: int, n: int, parts: int) -> list[Schedule]:
    maker = few_rows if m <= 64 else some_rows if m <= 320 else many_rows
    return list(dict.fromkeys(maker(m, n, parts)))


def cells() -> dict[tuple[str, str, int], list[Schedule]]:
    """(kind, shape, rows) -> schedules to try beside the table's."""
    found = {}
    for kind, shapes in (("matmul", bench.SHAPES), ("swiglu", bench.SWIGLU_SHAPES)):
        parts = 2 if kind == "swiglu" else 1
        for name, (n, _) in shapes.items():
            for m in ROWS:
                found[kind, name, m] = candidates(bench.bucket(m), n, parts)
    return found


def of_segments(m: int, segments: int) -> list[Schedule]:
    """Beside the table's: what holds the sums of so many segments in registers."""
    if 256 < m <= 272:
        narrow = [swapped(136, 64)] if segments < 8 else [swapped(88, 64)]
        return both(swapped(72, 128, 2), *narrow)
    if m < 2048 or segments < 8:
        return []
    now = segmented_schedule_for(m, 4096, 4096, segments=segments)
    others = (dict(inflight=0), dict(raster_width=4), dict(raster_width=16), dict(raster="n"))
    return [dataclasses.replace(now, **fields) for fields in others]


def segment_programs() -> list[bench.Program]:
    """Down and out projections in segments, whole and of a rank of 2 and 4, and in one."""
    programs = {}
    for segments in bench_segments.ROWS:
        for name in bench_segments.NAMES:
            for m in SEGMENT_ROWS:
                members = bench_segments.cell(name, segments, m)
                programs |= dict.fromkeys(members[who] for who in ("ours", "one"))
                ours = members["ours"]
                for s in of_segments(m, segments):
                    s = fitted(s, 1, 2 if ours.out == "bfloat16" else 4)
                    programs[dataclasses.replace(ours, schedule=s)] = None
    return list(programs)


def sweep_programs() -> list[bench.Program]:
    """The table's schedules for every cell of the benchmark, the peer's, and candidates."""
    programs = dict.fromkeys(bench.bench_programs())
    for (kind, name, m), schedules in cells().items():
        parts = 2 if kind == "swiglu" else 1
        n, k = (bench.SHAPES | bench.SWIGLU_SHAPES)[name]
        out = "float32" if name == "lm_head" else "bfloat16"
        new = functools.partial(bench.Program, kind=kind, shape=name, n=n, k=k, out=out)
        rows = bench.bucket(m)
        programs[new(m=m)] = None
        current = schedule_for(rows, n, k, parts=parts, out_dtype=out)
        for s in [current, *both(current), *schedules]:
            depth = fitted(s, parts, 4 if out == "float32" else 2)
            programs[new(m=rows, schedule=depth)] = None
    found = list(programs) + segment_programs()
    return bench.proof_programs(found) + found


def watched_run(folder: pathlib.Path, out: pathlib.Path, budget: float) -> str | None:
    """One process that compiles, times and compares; the program it hung in, or None."""
    note = out.with_suffix(".now")
    note.write_text("")
    script = str(pathlib.Path(bench.__file__))
    command = [sys.executable, script, "run", str(folder), "--json", str(out)]
    process = subprocess.Popen([*command, "--budget", str(budget), "--note", str(note)])
    while process.poll() is None:
        time.sleep(1)
        name = note.read_text()
        if name and time.time() - note.stat().st_mtime > SILENCE:
            process.kill()
            process.wait()
            return name
    return None


def run(args) -> None:
    begin, path = time.time(), args.programs / "manifest.json"
    while True:
        left = args.budget - (time.time() - begin)
        if left < 30 or (hung := watched_run(args.programs, args.json, left)) is None:
            return
        manifest = json.loads(path.read_text())
        print("HUNG", next(row["program"] for row in manifest if row["file"] == hung), flush=True)
        path.write_text(json.dumps([row for row in manifest if row["file"] != hung]))


def report(path: pathlib.Path) -> None:
    """Each cell's candidates, the fastest first, over the peer."""
    result = json.loads(path.read_text())
    peers = {(t["shape"], t["m"]): t["us"] for t in result["times"] if t["schedule"] is None}
    differing = [b["schedule"] for b in result.get("bits", []) if b.get("differing")]
    print(f"{len(result.get('bits', []))} proofs; with other bits (controls included):")
    print([kernel_cells.label(s) if s else s for s in differing])
    for (kind, name, m), _ in cells().items():
        n, k = (bench.SHAPES | bench.SWIGLU_SHAPES)[name]
        rows, out = bench.bucket(m), "float32" if name == "lm_head" else "bfloat16"
        parts = 2 if kind == "swiglu" else 1
        now = dataclasses.asdict(schedule_for(rows, n, k, parts=parts, out_dtype=out))
        found = [
            t for t in result["times"] if t["shape"] == name and t["m"] == rows and t["schedule"]
        ]
        found.sort(key=lambda t: t["us"])
        peer = peers.get((name, m), float("nan"))
        texts = [
            f"{t['us']:.1f} ({t['us'] / peer:.3f}) {kernel_cells.label(t['schedule'])}"
            + (" <- now" if t["schedule"] == now else "")
            for t in found
        ]
        print(f"{name} {m}: peer {peer:.1f}\n   " + "\n   ".join(texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    add_lowering_options(commands.add_parser("lower"))
    running = commands.add_parser("run")
    running.add_argument("programs", type=pathlib.Path)
    running.add_argument("--json", type=pathlib.Path, required=True)
    running.add_argument("--budget", type=float, default=280.0, help="seconds")
    reporting = commands.add_parser("report")
    reporting.add_argument("json", type=pathlib.Path)
    args = parser.parse_args()
    if args.command == "lower":
        lower_command(args, __file__, sweep_programs())
    elif args.command == "run":
        run(args)
    else:
        report(args.json)


if __name__ == "__main__":
    main()
