#!/usr/bin/env python3
"""Times sums over devices in a fixed order against psum of float32 and of bfloat16.

    python scripts/bench_collectives.py --json docs/benchmarks/collectives_h200x2.json
    python scripts/bench_collectives.py --virtual 4 --largest-kib 256      # a CPU: does it run

A program holds a chain of sums, each the next one's operand, so that launches are not timed; a
figure is the median over rounds in which the contestants take turns. Bus bandwidth is that of an
all-reduce: 2 (n - 1) / n of a term's bytes over the time, by the bytes of the contestant's dtype.
"""

import argparse
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
ROUND_SECONDS = 0.05

PEERS = "peer memory"  # one kernel that reads the peers' terms; only where it is asked for by name
XLA_GATHER = "ordered one-shot, XLA gather kernel"
GATHER_OPTIONS = {
    "xla_gpu_experimental_use_collective_kernels": "COLLECTIVE_KERNEL_ALL_GATHER",
    "xla_gpu_experimental_enable_tiling_propagation": True,
}

Sum = Callable[[jax.Array], jax.Array]


def contestants(backend: str, ranks: int) -> dict[str, tuple[str, Sum]]:
    """Name -> dtype and the sum of a rank's term; every result in the term's dtype."""
    from bi_jax import collectives
    from bi_jax.pallas_kernels.merge import MergeTopology
    from bi_jax.pallas_kernels.merge.hopper_peers import merge_peers_hopper

    ordered = functools.partial(collectives.ordered_psum, axis_name="tp", backend=backend)
    one_shot = functools.partial(ordered, one_shot_bytes=1 << 40)

    def tree(x: jax.Array) -> jax.Array:
        return collectives.tree_psum(x[None], "tp", backend=backend)

    def peers(x: jax.Array) -> jax.Array:
        topology = MergeTopology(order="ascending")
        return merge_peers_hopper(x, axis="tp", ranks=ranks, out_dtype="float32", topology=topology)

    return {
        "psum float32": ("float32", lambda x: lax.psum(x, "tp")),
        "psum bfloat16": ("bfloat16", lambda x: lax.psum(x, "tp")),
        "ordered one-shot": ("float32", one_shot),
        "ordered two-shot": ("float32", functools.partial(ordered, one_shot_bytes=0)),
        "ordered": ("float32", ordered),
        "tree": ("float32", tree),
        XLA_GATHER: ("float32", one_shot),
        PEERS: ("float32", peers),
    }


def chain(total: Sum, length: int, mesh: Any) -> Any:
    """`length` sums, each of the last one's result."""

    def body(x: jax.Array) -> jax.Array:
        x = x[0]
        for _ in range(length):
            x = lax.optimization_barrier(total(x))
        return x[None]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False)
    return jax.jit(mapped)


def check(total: Sum, mesh: Any, options: dict[str, Any]) -> None:
    """Raises unless a sum that adds in rank order does so, before it is timed."""
    from bi_jax.testing import assert_same_bits, operands

    terms = operands.spread((mesh.size, 16, 1024), seed=1)
    expected = functools.reduce(np.add, list(terms))
    term = jax.device_put(terms, NamedSharding(mesh, P("tp")))
    got = chain(total, 1, mesh).lower(term).compile(compiler_options=options)(term)
    for shard in got.addressable_shards:
        assert_same_bits(np.asarray(shard.data)[0], expected)


def measure(kib: int, mesh: Any, backend: str, names: list[str]) -> dict[str, dict[str, float]]:
    """Microseconds and GB/s of every contestant, of a float32 term of `kib` KiB."""
    ranks, elements = mesh.size, kib * KIB // 4
    length = 32 if kib <= 2048 else 8
    place = NamedSharding(mesh, P("tp"))
    runs = {}
    for name, (dtype, total) in contestants(backend, ranks).items():
        if name not in names:
            continue
        # Zeros: a chain of sums of anything else overflows. What is moved and added is the same.
        term = jax.device_put(np.zeros((ranks, elements // 256, 256), jnp.dtype(dtype)), place)
        options = GATHER_OPTIONS if name == XLA_GATHER else {}
        compiled = chain(total, length, mesh).lower(term).compile(compiler_options=options)
        jax.block_until_ready(compiled(term))
        runs[name] = (compiled, term, elements * jnp.dtype(dtype).itemsize)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, (compiled, term, _) in runs.items():
            calls, start = 0, time.perf_counter()
            while calls == 0 or (calls < 50 and time.perf_counter() - start < ROUND_SECONDS):
                jax.block_until_ready(compiled(term))
                calls += 1
            seconds[name].append((time.perf_counter() - start) / (calls * length))
    found = {}
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

    from bi_jax.pallas_kernels.primitive import HOPPER, REFERENCE
    from bi_jax.sharding import make_mesh

    ranks = arguments.ranks or len(jax.devices())
    if ranks < 2:
        parser.error(f"a sum over devices needs two or more, and there are {len(jax.devices())}")
    mesh = make_mesh(tp=ranks)
    backend = REFERENCE if jax.default_backend() == "cpu" else HOPPER
    known = contestants(backend, ranks)
    names = arguments.only.split("/") if arguments.only else [n for n in known if n != PEERS]
    if not set(names) <= set(known):
        parser.error(f"--only must be of {'/'.join(known)}")
    for name in names:
        if name.startswith("ordered") or name == PEERS:
            check(known[name][1], mesh, GATHER_OPTIONS if name == XLA_GATHER else {})
    report: dict[str, Any] = {**run_header(__file__), "ranks": ranks, "rounds": ROUNDS, "sizes": []}
    print(f"{ranks} x {report['device']}; microseconds (bus GB/s)", flush=True)
    for kib in SIZES_KIB:
        if kib > arguments.largest_kib:
            break
        found = measure(kib, mesh, backend, names)
        report["sizes"].append({"kib": kib, "rows": found})
        figures = (f"{name} {row['us']:.1f} ({row['bus_gb_s']:.1f})" for name, row in found.items())
        print(f"{kib:7d} KiB: {', '.join(figures)}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
