#!/usr/bin/env python3
"""Checks everything that tensor parallelism promises, on whatever devices there are.

    python scripts/check_tp.py                      # all cards of this host, 8B shapes
    python scripts/check_tp.py --virtual 8          # eight virtual devices of a CPU, a small model
    python scripts/check_tp.py --layers 8 --quick   # cards, fewer layers and ways, for short leases

Degrees are the powers of two up to the number of devices, 8 at most. Exit status: 0 all claims are
shown; 1 one failed; 2 wrong arguments; 3 none failed, but some need what is not here (an order of
additions can only show among 4 ranks and more).
"""

import argparse
import json
import pathlib
import sys
from dataclasses import asdict

import jax

PARTS = ("collectives", "peers", "engine", "trainer")


def main(argv: list[str] | None = None) -> int:
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
    arguments = parser.parse_args(argv)
    if arguments.virtual:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", arguments.virtual)
    # After the number of devices is settled: these ask for them.
    import tp_check_collectives
    import tp_check_engine
    import tp_check_peers
    import tp_check_trainer
    from run_header import run_header
    from tp_claims import exit_status

    from bi_jax.ops import pick_backends

    there = min(8, len(jax.devices()))
    degrees = tuple(d for d in (1, 2, 4, 8) if d <= there)
    if arguments.degrees:
        degrees = tuple(sorted({int(d) for d in arguments.degrees.split(",")}))
        if not set(degrees) <= {1, 2, 4, 8} or degrees[-1] > there:
            parser.error(f"--degrees must be of 1, 2, 4, 8, and there are {there} devices")
    parts = arguments.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts must be of {', '.join(PARTS)}")
    topologies = tp_check_engine.TOPOLOGIES
    if arguments.topologies:
        topologies = tuple(arguments.topologies.split(","))
        if not set(topologies) <= set(tp_check_engine.TOPOLOGIES):
            parser.error(f"--topologies must be of {', '.join(tp_check_engine.TOPOLOGIES)}")
    on_cpu = jax.default_backend() == "cpu"
    config = tp_check_engine.SMALL if on_cpu else tp_check_engine.LARGE
    if arguments.layers:
        config = config.replace(num_layers=arguments.layers)
    plan = tp_check_engine.Plan(
        config=config,
        degrees=degrees,
        tokens=arguments.tokens or (128 if on_cpu else 256),
        rows=16,
        buckets=(16, 64) if on_cpu else (16, 256),
        quick=arguments.quick,
        topologies=topologies,
    )
    head = run_header(__file__)
    print(f"{head['devices']} x {head['device']}, degrees {degrees}", flush=True)
    claims = []
    if "collectives" in parts:
        backend = pick_backends(jax.devices()[0], config.dtype).merge
        claims += tp_check_collectives.checks(degrees, backend, largest_kib=arguments.largest_kib)
    if "peers" in parts:
        claims += tp_check_peers.checks(degrees, largest_kib=arguments.largest_kib)
    if "engine" in parts:
        claims += tp_check_engine.checks(plan)
    if "trainer" in parts:
        claims += tp_check_trainer.checks(config.replace(**tp_check_engine.TRAINED))
    status = exit_status(claims)
    print(f"exit status {status}")
    if arguments.json:
        report = {**head, "status": status, "claims": [asdict(claim) for claim in claims]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
