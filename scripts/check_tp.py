#!/usr/bin/env python3
"""Checks everything that tensor parallelism promises, on whatever devices there are.

    python scripts/check_tp.py                      # all cards of this host, 8B shapes
    python scripts/check_tp.py --virtual 8          # eight virtual devices of a CPU, a small model
    python scripts/check_tp.py --layers 8 --quick   # cards, fewer layers and ways, for short leases
    python scripts/check_tp.py --cards 4 --parallel # compiles in a process for each part and degree

Degrees are the powers of two up to the number of devices, 8 at most. Exit status: 0 all claims are
shown; 1 one failed; 2 wrong arguments; 3 none failed, but some need what is not here (an order of
additions can only show among 4 ranks and more).
"""

import argparse
import json
import pathlib
import sys
import tempfile
from dataclasses import asdict
from typing import Any

import jax
from card_turns import Job, run_in_turns, side_by_side, wait_for_turn
from tp_claims import Claim, exit_status

PARTS = ("collectives", "peers", "engine", "trainer")
DEGREES = (1, 2, 4, 8)


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--virtual", type=int, metavar="N", help="N virtual devices of a CPU")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--degrees", help="such as 1,2,4; default: all that fit")
    parser.add_argument("--topologies", help="such as tp_invariant; default: both")
    parser.add_argument("--layers", type=int, help="of the model; default: all")
    parser.add_argument("--tokens", type=int, help="of a completion; default: 256, 128 on a CPU")
    parser.add_argument("--largest-kib", type=int, default=65_536, help="largest message")
    parser.add_argument("--quick", action="store_true", help="fewer ways of the battery")
    parser.add_argument("--json", type=pathlib.Path, help="file to write")
    parser.add_argument("--parallel", action="store_true", help="in processes that take turns")
    parser.add_argument("--cards", type=int, help="with --parallel: devices of this host")
    parser.add_argument("--begin", type=pathlib.Path, help="with --parallel: wait for this file")
    parser.add_argument("--unit", help=argparse.SUPPRESS)  # of the engine's part
    parser.add_argument("--turn", type=pathlib.Path, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = parser_of()
    arguments = parser.parse_args(argv)
    parts = arguments.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts must be of {', '.join(PARTS)}")
    if arguments.virtual:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", arguments.virtual)
    if arguments.parallel:
        devices = arguments.virtual or arguments.cards
        if devices is None:
            parser.error("--parallel needs --cards, since only the processes may open them")
    else:
        devices = len(jax.devices())
    there = min(8, devices)
    degrees = tuple(d for d in DEGREES if d <= there)
    if arguments.degrees:
        degrees = tuple(sorted({int(d) for d in arguments.degrees.split(",")}))
        if not set(degrees) <= set(DEGREES) or degrees[-1] > there:
            parser.error(f"--degrees must be of 1, 2, 4, 8, and there are {there} devices")
    if arguments.parallel:
        return in_processes(arguments, parts, degrees, devices, parser)
    return here(arguments, parts, degrees, parser)


def topologies_of(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> Any:
    from tp_check_engine import TOPOLOGIES

    found = tuple(arguments.topologies.split(",")) if arguments.topologies else TOPOLOGIES
    if not set(found) <= set(TOPOLOGIES):
        parser.error(f"--topologies must be of {', '.join(TOPOLOGIES)}")
    return found


def here(
    arguments: argparse.Namespace,
    parts: list[str],
    degrees: tuple[int, ...],
    parser: argparse.ArgumentParser,
) -> int:
    """All parts in this process, one after the other."""
    # After the number of devices is settled: these ask for them.
    import tp_check_collectives
    import tp_check_engine
    import tp_check_peers
    import tp_check_trainer
    from run_header import run_header

    from bi_jax.ops import pick_backends

    on_cpu = jax.default_backend() == "cpu"
    config = tp_check_engine.SMALL if on_cpu else tp_check_engine.LARGE
    if arguments.layers:
        config = config.replace(num_layers=arguments.layers)
    plan = tp_check_engine.Plan(
        config=config,
        tokens=arguments.tokens or (128 if on_cpu else 256),
        rows=16,
        buckets=(16, 64) if on_cpu else (16, 256),
        quick=arguments.quick,
        turn=arguments.turn,
    )
    head = run_header(__file__)
    print(f"{head['devices']} x {head['device']}, degrees {degrees}", flush=True)
    claims: list[Claim] = []
    digests: dict[str, str] = {}
    if not arguments.unit and arguments.turn:
        wait_for_turn(arguments.turn)
    if "collectives" in parts:
        backend = pick_backends(jax.devices()[0], config.dtype).merge
        claims += tp_check_collectives.checks(degrees, backend, largest_kib=arguments.largest_kib)
    if "peers" in parts:
        claims += tp_check_peers.checks(degrees, largest_kib=arguments.largest_kib)
    if "engine" in parts:
        topologies = topologies_of(arguments, parser)
        units = tp_check_engine.units(topologies, degrees)
        if arguments.unit:
            units = [unit for unit in units if unit.name == arguments.unit]
        claims += tp_check_engine.checks(plan, units, digests)
        if not arguments.unit:
            claims += tp_check_engine.checks_across(topologies, degrees, digests)
    if "trainer" in parts:
        claims += tp_check_trainer.checks(config.replace(**tp_check_engine.TRAINED))
    return report(arguments, head, claims, digests)


def report(
    arguments: argparse.Namespace, head: Any, claims: list[Claim], digests: dict[str, str]
) -> int:
    status = exit_status(claims)
    if arguments.json:
        found = {"status": status, "claims": [asdict(c) for c in claims], "digests": digests}
        arguments.json.write_text(json.dumps({**head, **found}, indent=1) + "\n")
    if not arguments.turn:
        print(f"exit status {status}")
    return status


def in_processes(
    arguments: argparse.Namespace,
    parts: list[str],
    degrees: tuple[int, ...],
    devices: int,
    parser: argparse.ArgumentParser,
) -> int:
    """A process for the sums, for each part of theirs, and for each engine; then what all found."""
    from tp_check_engine import checks_across, units

    topologies = topologies_of(arguments, parser)
    with tempfile.TemporaryDirectory() as folder:
        jobs: list[Job] = []

        def add(name: str, cards: tuple[int, ...], *words: str) -> None:
            own = pathlib.Path(folder) / name.replace(" ", "_")
            common = [*_words(arguments), *words, "--json", f"{own}.json", "--turn", f"{own}.turn"]
            command = (sys.executable, __file__, *common)
            turn = own.with_suffix(".turn")
            jobs.append(Job(name=name, command=command, cards=cards, turn=turn))

        every = tuple(range(devices))
        for part in parts:
            if part == "engine":
                places: dict[int, int] = {}
                for unit in sorted(units(topologies, degrees), key=lambda unit: unit.degree):
                    place = places[unit.degree] = places.get(unit.degree, -1) + 1
                    cards = side_by_side(unit.degree, devices, place)
                    words = ("--parts", part, "--degrees", str(unit.degree))
                    words += ("--topologies", unit.topology, "--unit", unit.name)
                    add(unit.name, cards, *words)
            elif part == "peers":
                for degree in (d for d in degrees if d > 1):
                    cards = tuple(range(degree))
                    add(f"{part} {degree}", cards, "--parts", part, "--degrees", str(degree))
            else:
                degrees_named = ",".join(map(str, degrees))
                add(part, every, "--parts", part, "--degrees", degrees_named)
        found: list[Any] = []

        def ended(job: Job) -> None:
            file = job.turn.with_suffix(".json")
            if file.exists():
                found.append(json.loads(file.read_text()))
                save(arguments, found)

        status = run_in_turns(jobs, ended=ended, begin=arguments.begin)
        lost = [job.name for job in jobs if not job.turn.with_suffix(".json").exists()]
    claims, digests = merged(found)
    if "engine" in parts:
        claims += checks_across(topologies, degrees, digests)
    for name in lost:
        print("exit status", status[name], "of", name)
    whole = {**found[0], "devices": devices} if found else {}
    code = report(arguments, own_words(whole), claims, digests)
    return 1 if lost else code


def _words(arguments: argparse.Namespace) -> list[str]:
    words = ["--quick"] if arguments.quick else []
    for name in ("virtual", "layers", "tokens", "largest_kib"):
        value = getattr(arguments, name)
        words += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    return words


def own_words(head: dict[str, Any]) -> dict[str, Any]:
    from run_header import command_line

    return {**head, "command": command_line(__file__)} if head else {}


def merged(found: list[Any]) -> tuple[list[Claim], dict[str, str]]:
    claims = [Claim(**claim) for each in found for claim in each["claims"]]
    return claims, {name: digest for each in found for name, digest in each["digests"].items()}


def save(arguments: argparse.Namespace, found: list[Any]) -> None:
    """What has been found so far: a run that is cut has that."""
    if arguments.json:
        claims, digests = merged(found)
        whole = {**own_words(found[0]), "status": None, "digests": digests}
        whole["claims"] = [asdict(claim) for claim in claims]
        arguments.json.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
