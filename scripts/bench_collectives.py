#!/usr/bin/env python3
"""Times sums over devices in a fixed order against psum of float32 and of bfloat16.

    python scripts/bench_collectives.py --json docs/benchmarks/collectives_h200x2.json
    python scripts/bench_collectives.py --virtual 4 --largest-kib 256      # a CPU: does it run

A program holds a chain of sums, each the next one's operand, so that launches are not timed; a
figure is the median over rounds in which the contestants take turns. Bus bandwidth is that of an
all-reduce: 2 (n - 1) / n of a term's bytes over the time, by the bytes of the contestant's dtype.
"""

import argparse
import concurrent.futures
import functools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

KIB = 1024
SIZES_KIB = (4, 8, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16_384, 65_536, 131_072)
ROUNDS = 9
ROUND_SECONDS = 0.03
KEPT: list[Any] = []  # memory that programs write to without JAX knowing it

PEERS = "peers"  # one kernel that writes into the peers' memory; by size, or in one of its forms
FORM_NAMES = tuple(f"{PEERS} {form}" for form in ("words", "terms", "shares"))
LARGEST_BY_FORM = {FORM_NAMES[0]: 512 * KIB, FORM_NAMES[1]: 2048 * KIB}
XLA_GATHER = "ordered one-shot, XLA gather kernel"
GATHER_OPTIONS = {
    "xla_gpu_experimental_use_collective_kernels": "COLLECTIVE_KERNEL_ALL_GATHER",
    "xla_gpu_experimental_enable_tiling_propagation": True,
}

Sum = Callable[..., jax.Array]  # (a rank's term, its row of the peers' table)


def contestants(backend: str) -> dict[str, tuple[str, Sum]]:
    """Name -> dtype and the sum of a rank's term; every result in the term's dtype."""
    from bi_jax import collectives
    from bi_jax.pallas_kernels.merge import MergeTopology
    from bi_jax.pallas_kernels.merge.hopper_peers import merge_peers_hopper
    from bi_jax.pallas_kernels.merge.peer_layout import pick_peer_schedule
    from bi_jax.pallas_kernels.primitive import HOPPER

    ordered = functools.partial(collectives.ordered_psum, axis_name="tp", backend=backend)
    one_shot = functools.partial(ordered, one_shot_bytes=1 << 40)
    two_shot = functools.partial(ordered, one_shot_bytes=0)

    def peers(x: jax.Array, table: jax.Array, form: str | None = None) -> jax.Array:
        ranks = table.shape[0] - 1
        kinds = dict(out_dtype="float32", topology=MergeTopology(order="ascending"))
        schedule = pick_peer_schedule(elements=x.size, ranks=ranks, form=form)
        return merge_peers_hopper(x, table, **kinds, schedule=schedule)

    sums: dict[str, tuple[str, Sum]] = {
        "psum float32": ("float32", lambda x, _: lax.psum(x, "tp")),
        "psum bfloat16": ("bfloat16", lambda x, _: lax.psum(x, "tp")),
        "ordered one-shot": ("float32", lambda x, _: one_shot(x)),
        "ordered two-shot": ("float32", lambda x, _: two_shot(x)),
        "ordered": ("float32", lambda x, _: ordered(x)),
        "tree": ("float32", lambda x, _: collectives.tree_psum(x[None], "tp", backend=backend)),
        XLA_GATHER: ("float32", lambda x, _: one_shot(x)),
    }
    if backend == HOPPER:
        sums[PEERS] = ("float32", peers)
        for name in FORM_NAMES:
            sums[name] = ("float32", functools.partial(peers, form=name.split()[1]))
    return sums


def chain(total: Sum, length: int, mesh: Any) -> Any:
    """`length` sums, each of the last one's result."""
    from bi_jax.peer_memory import peers_table

    def body(x: jax.Array, addresses: jax.Array) -> Any:
        x, table = x[0], peers_table(addresses, "tp")
        # One collective of the compiler's own in every program, as the peers' kernel wants it.
        started = lax.psum(addresses[0, 0], "tp")
        for _ in range(length):
            x = lax.optimization_barrier(total(x, table))
        return x[None], started[None]

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P("tp"), P()), out_specs=(P("tp"), P("tp")), check_vma=False
    )
    return jax.jit(mapped)


def addresses_of(mesh: Any) -> jax.Array:
    """Of the peers' memory; zeros where there is none."""
    from bi_jax.peer_memory import peer_memory

    found = peer_memory(mesh, "tp")
    if found is not None:
        KEPT.append(found)
        return found.addresses
    return jax.device_put(np.zeros((mesh.size, 2), np.uint32), NamedSharding(mesh, P()))


def options_of(name: str) -> dict[str, Any]:
    return GATHER_OPTIONS if name == XLA_GATHER else {}


def check(name: str, total: Sum, mesh: Any, addresses: jax.Array) -> None:
    """Raises unless a sum that adds in rank order does so, before it is timed, again and again."""
    from bi_jax.testing import assert_same_bits, operands

    terms = operands.spread((mesh.size, 17, 1024), seed=1)
    expected = functools.reduce(np.add, list(terms))
    term = jax.device_put(terms, NamedSharding(mesh, P("tp")))
    run = chain(total, 1, mesh).lower(term, addresses).compile(compiler_options=options_of(name))
    for _ in range(5):
        for shard in run(term, addresses)[0].addressable_shards:
            assert_same_bits(np.asarray(shard.data)[0], expected)


Program = tuple[Any, jax.Array, int]  # compiled, its operand, bytes of a term


def build(kib: int, name: str, known: Any, mesh: Any, addresses: jax.Array) -> Program:
    """The chain of one contestant at one size."""
    dtype, total = known[name]
    elements = kib * KIB // 4
    # Zeros: a chain of sums of anything else overflows. What is moved and added is the same.
    shape = (mesh.size, elements // 256, 256)
    term = jax.device_put(np.zeros(shape, jnp.dtype(dtype)), NamedSharding(mesh, P("tp")))
    lowered = chain(total, length_of(kib), mesh).lower(term, addresses)
    compiled = lowered.compile(compiler_options=options_of(name))
    return compiled, term, elements * jnp.dtype(dtype).itemsize


def length_of(kib: int) -> int:
    return 32 if kib <= 2048 else 8


def measure(
    kib: int, runs: dict[str, Program], addresses: jax.Array
) -> dict[str, dict[str, float]]:
    """Microseconds and GB/s of every contestant, of a float32 term of `kib` KiB."""
    length = length_of(kib)
    for compiled, term, _ in runs.values():
        for _ in range(3):
            jax.block_until_ready(compiled(term, addresses))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, (compiled, term, _) in runs.items():
            calls, start = 0, time.perf_counter()
            while calls == 0 or (calls < 50 and time.perf_counter() - start < ROUND_SECONDS):
                jax.block_until_ready(compiled(term, addresses))
                calls += 1
            seconds[name].append((time.perf_counter() - start) / (calls * length))
    found = {}
    ranks = addresses.shape[0]
    for name, (_, _, size) in runs.items():
        taken = statistics.median(seconds[name])
        found[name] = {
            "us": round(taken * 1e6, 2),
            "bus_gb_s": round(2 * (ranks - 1) / ranks * size / taken / 1e9, 2),
        }
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--virtual", type=int, metavar="N", help="N virtual devices of a CPU")
    parser.add_argument("--ranks", type=int, help="default: all devices")
    parser.add_argument("--largest-kib", type=int, default=SIZES_KIB[-1])
    parser.add_argument("--only", help="names of contestants, with / between them")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args(argv)
    if arguments.virtual:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", arguments.virtual)
    from run_header import run_header

    from bi_jax.flags import process_flags
    from bi_jax.pallas_kernels.primitive import HOPPER, REFERENCE
    from bi_jax.sharding import make_mesh

    ranks = arguments.ranks or len(jax.devices())
    if ranks < 2:
        parser.error(f"a sum over devices needs two or more, and there are {len(jax.devices())}")
    mesh = make_mesh(tp=ranks)
    backend = REFERENCE if jax.default_backend() == "cpu" else HOPPER
    known, addresses = contestants(backend), addresses_of(mesh)
    usual = [name for name in known if name not in (XLA_GATHER, *FORM_NAMES)]
    names = arguments.only.split("/") if arguments.only else usual
    if not set(names) <= set(known):
        parser.error(f"--only must be of {'/'.join(known)}")
    for name in names:
        if name.startswith(("ordered", PEERS)):
            check(name, known[name][1], mesh, addresses)
            print("right bits:", name, flush=True)
    report: dict[str, Any] = {**run_header(__file__), "ranks": ranks, "rounds": ROUNDS, "sizes": []}
    report["XLA_FLAGS"] = process_flags()
    sizes = [kib for kib in SIZES_KIB if kib <= arguments.largest_kib]
    fits = {
        (kib, name): kib * KIB <= LARGEST_BY_FORM.get(name, 1 << 40)
        for kib in sizes
        for name in names
    }
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = {
            key: pool.submit(build, *key, known, mesh, addresses)
            for key, good in fits.items()
            if good
        }
        print(f"{ranks} x {report['device']}; microseconds (bus GB/s)", flush=True)
        for job in jobs.values():
            job.result()
    for kib in sizes:
        runs = {name: jobs[kib, name].result() for name in names if fits[kib, name]}
        found = measure(kib, runs, addresses)
        report["sizes"].append({"kib": kib, "rows": found})
        figures = (f"{name} {row['us']:.1f} ({row['bus_gb_s']:.1f})" for name, row in found.items())
        print(f"{kib:7d} KiB: {', '.join(figures)}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
