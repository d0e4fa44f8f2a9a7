"""Races the Hopper RMS norm with its residual add against XLA's fused one on one card.

    python scripts/bench_norms.py [--rows 1,8,64] [--hidden 4096] [--json FILE]

Device times from the profiler: several launches in one jitted program, each with operands of its
own; medians. ceiling_fraction is the bytes read and written once, at the speed of a copy measured
in the same run, over the time; below some hundred rows everything stays in the L2 cache and the
fraction means little.
"""

import argparse
import json
import sys

import jax
import jax.numpy as jnp
from device_timing import copy_bandwidth, device_times, header, race_row

from bi_jax.pallas_kernels.rms_norm.kernel_hopper import add_rms_norm_hopper

EPS = 1e-5
LAUNCHES = 8
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def ours(x, residual, scale):
    return add_rms_norm_hopper(x, residual, scale, eps=EPS)


def xla(x, residual, scale):
    """What a user of stock JAX would write, with the same roundings."""
    wide = jnp.float32
    stream = (x.astype(wide) + residual.astype(wide)).astype(x.dtype)
    total = stream.astype(wide)
    factor = jax.lax.rsqrt(jnp.mean(total * total, axis=-1, keepdims=True) + EPS)
    return (total * factor * scale.astype(wide)).astype(x.dtype), stream


def program(norm, rows: int, hidden: int):
    """(compiled program, arguments, launches)."""
    keys = range(2 * LAUNCHES)
    arrays = [jax.random.normal(jax.random.key(i), (rows, hidden), jnp.bfloat16) for i in keys]
    scale = jnp.ones((hidden,), jnp.bfloat16)

    def run(arrays, scale):
        pairs = zip(arrays[:LAUNCHES], arrays[LAUNCHES:], strict=True)
        return [norm(x, residual, scale) for x, residual in pairs]

    compiled = jax.jit(run).lower(arrays, scale).compile()
    jax.block_until_ready(compiled(arrays, scale))
    return compiled, (arrays, scale), LAUNCHES


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    sizes, hidden = [int(r) for r in options.rows.split(",")], options.hidden
    runs = [program(norm, rows, hidden) for rows in sizes for norm in (ours, xla)]
    copy = copy_bandwidth()
    times = device_times(runs)
    found = []
    for rows, us, peer in zip(sizes, times[::2], times[1::2], strict=True):
        moved = (4 * rows + 1) * hidden * 2
        names = dict(op="add_rms_norm", case=f"hidden_{hidden}", peer="XLA's fused add and norm")
        found.append(race_row(**names, rows=rows, us=us, peer_us=peer, moved=moved, copy=copy))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(dict(header=header(copy, sys.argv), rows=found), file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
