"""A narrow sweep of matmul schedules on the card that survives a candidate which hangs.

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
from lower_programs import add_lowering_options, lower_command

from bi_jax.pallas_kernels.matmul.schedule import Schedule, fitted, schedule_for

SILENCE = 25.0  # seconds that one program may take for its first run
DOWNS = ("llama_down", "qwen_down")
GATE_UPS = ("llama_gate_up", "qwen_gate_up")


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


def few_rows(m: int) -> list[Schedule]:
    found = [swapped(m, 64, tile_k=k, cluster_n=c) for k in (128, 256) for c in (1, 2)]
    found += [plain(64, 32, tile_k=128, cluster_n=c) for c in (1, 4)]
    return [*found, plain(64, 32, tile_k=256, cluster_n=2), plain(64, 32, tile_k=256)]


def a_little_more_than_256(name: str) -> list[Schedule]:
    """Two swapped tiles of 136 rows or three of 88; or warpgroups that pass empty rows over."""
    if name == "lm_head":
        found = [pair(128, n, pass_empty=True, ctas=131) for n in (192, 256)]
        found += [turns(64, 256, ctas=131), swapped(136, 256, 2), swapped(136, 192, 3)]
        return [*found, swapped(136, 256, 2, cluster_m=2)]
    if name in GATE_UPS:
        found = [swapped(136, n, n // 64) for n in (128, 192)]
        found += [swapped(136, n, n // 64, cluster_m=2) for n in (128, 192)]
        found += [swapped(136, 256, 2, cluster_m=c) for c in (1, 2)]
        return [*found, swapped(88, 384, 3), swapped(88, 256, 2)]
    found = [swapped(136, 64, cluster_m=c) for c in (1, 2)]
    found += [swapped(136, 128, 2), swapped(136, 128, 2, cluster_m=2)]
    if name == "qkv":
        found += [swapped(88, 192, 3), swapped(88, 128, 2)]
    return found


def two_of_160(name: str) -> list[Schedule]:
    """320 rows."""
    if name in ("out", *DOWNS):
        return [swapped(160, 64)]
    if name == "qkv":
        return [swapped(160, 128, 2)]
    return [swapped(160, 128, 2), swapped(160, 192, 3), swapped(160, 256, 2)]


def a_full_bucket(name: str) -> list[Schedule]:
    """256 rows: what one multiprocessor can take in is the limit, so tiles shared in clusters."""
    if name == "qkv":
        found = [pair(128, 96, cluster_m=m, cluster_n=n) for m, n in ((1, 1), (2, 1), (1, 2))]
        return [*found, plain(64, 192, cluster_m=2), plain(64, 192, cluster_m=4)]
    if name in ("out", *DOWNS):
        found = [plain(64, 128, cluster_m=m, cluster_n=n) for m, n in ((2, 1), (4, 1), (1, 2))]
        return [*found, plain(64, 128, cluster_m=2, cluster_n=2), swapped(128, 64)]
    if name == "lm_head":
        found = [pair(256, 192, cluster_n=2), pair(128, 256), pair(128, 256, cluster_m=2)]
        found += [pair(256, 192, inflight=0), pair(128, 192, cluster_m=2)]
        return [*found, turns(128, 192), turns(128, 192, ctas=128), swapped(128, 256, 2)]
    width = 224 if name == "llama_gate_up" else 192
    found = [pair(128, width), pair(128, width, cluster_m=2), turns(128, width)]
    if width == 192:
        found += [pair(256, width, cluster_n=2), pair(256, width, inflight=0)]
    return found


def swiglu(name: str, m: int) -> list[Schedule]:
    if m == 256:
        width = 112 if name == "llama_swiglu" else 96
        found = [pair(128, width), pair(128, width, cluster_m=2), turns(128, width)]
        if width == 96:
            found += [pair(256, width, cluster_n=2), pair(256, width, inflight=0)]
        return found
    found = [turns(128, 96), pair(128, 128), pair(256, 96), pair(256, 96, out_slots=3)]
    return [*found, turns(128, 96, out_slots=3)]


def many_rows() -> list[Schedule]:
    return [pair(256, 192), turns(128, 192), pair(128, 256), pair(128, 256, cluster_m=2)]


def cells() -> dict[tuple[str, str, int], list[Schedule]]:
    """(kind, shape, rows) -> schedules to try beside the table's."""
    found = {("matmul", "out", m): few_rows(m) for m in (16, 32, 64)}
    for name in bench.SHAPES:
        found["matmul", name, 256] = a_full_bucket(name)
        found["matmul", name, 257] = a_little_more_than_256(name)
        found["matmul", name, 320] = two_of_160(name)
    for name in bench.SWIGLU_SHAPES:
        for m in (256, 1024, 4096, 8192):
            found["swiglu", name, m] = swiglu(name, m)
    for m in (1000, 2048, 4096):
        found["matmul", "llama_gate_up", m] = many_rows()
    found["matmul", "lm_head", 2048] = many_rows()
    return found


def sweep_programs() -> list[bench.Program]:
    programs: dict[bench.Program, None] = {}
    for (kind, name, m), schedules in cells().items():
        parts = 2 if kind == "swiglu" else 1
        n, k = (bench.SHAPES | bench.SWIGLU_SHAPES)[name]
        out = "float32" if name == "lm_head" else "bfloat16"
        new = functools.partial(bench.Program, kind=kind, shape=name, n=n, k=k, out=out)
        rows = bench.bucket(m)
        programs[new(m=m)] = None
        current = schedule_for(rows, n, k, parts=parts, out_dtype=out)
        programs[new(m=rows, schedule=current)] = None
        for s in schedules:
            depth = fitted(s, parts, 4 if out == "float32" else 2)
            programs[new(m=rows, schedule=depth)] = None
    found = list(programs)
    return found + bench.proof_programs(found)


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
    print([bench.label(s) if s else s for s in differing])
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
            f"{t['us']:.1f} ({t['us'] / peer:.3f}) {bench.label(t['schedule'])}"
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
