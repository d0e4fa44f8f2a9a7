"""Programs lowered to files on any machine, by several processes, for a run on the chip."""

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys


def to_json(program) -> dict:
    fields = {f.name: getattr(program, f.name) for f in dataclasses.fields(program)}
    if program.schedule is not None:
        fields["schedule"] = dataclasses.asdict(program.schedule)
    return fields


def lower(programs, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    manifest = []
    for index, program in enumerate(programs):
        row = dict(program=to_json(program), file=f"p{index:04d}")
        try:
            (folder / row["file"]).write_bytes(program.serialized())
        except Exception as error:
            row["error"] = str(error)[:300]
            print(program, row["error"])
        manifest.append(row)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    print(f"{len(manifest)} programs")


def lower_by_processes(script: str, folder: pathlib.Path, workers: int) -> None:
    """`script lower folder` in parts, a process each, and one manifest of them all.

    On a machine with a GPU, JAX_PLATFORMS=cpu keeps the processes off it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, script, "lower", str(folder), "--workers", str(workers)]
    jobs = [subprocess.Popen([*command, "--part", str(part)]) for part in range(workers)]
    failures = [job.wait() for job in jobs]  # all of them, before anything is said
    if any(failures):
        raise SystemExit("a process that lowers has failed")
    manifest = []
    for part in range(workers):
        rows = json.loads((folder / str(part) / "manifest.json").read_text())
        manifest += [row | dict(file=f"{part}/{row['file']}") for row in rows]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def lower_command(args, script: str, programs) -> None:
    """Of this script and the sweep: everything here, in parts, or one part."""
    if args.part is not None:
        lower(programs[args.part :: args.workers], args.programs / str(args.part))
    elif args.workers > 1:
        lower_by_processes(script, args.programs, args.workers)
    else:
        lower(programs, args.programs)


def add_lowering_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("programs", type=pathlib.Path)
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
