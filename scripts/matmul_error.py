"""Errors of matrix products against float64, ours beside cuBLAS through XLA, on the card.

    python scripts/matmul_error.py --json out.json

Normal operands, bfloat16 in, bfloat16 or float32 out; |y - exact| / |exact| (norms) with exact in
float64. `kernels` are the names of what XLA ran, so that a peer that splits K can be told; and
`differing` counts the elements in which the peer's bits are not ours.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import time

import bench_kernels as bench
import jax
import jax.numpy as jnp
from device_timing import copy_bandwidth, header

from bi_jax.pallas_kernels.matmul.schedule import schedule_for

ROWS = (1024, 64, 4096, 1, 256)
SIZES = ((28672, 4096), (4096, 12288), (4096, 4096), (4096, 14336), (151936, 4096))
OUTS = ("float32", "bfloat16")


@jax.jit
def operand_pair(seed, x_shape_like, w_shape_like):
    a, b = jax.random.split(jax.random.key(seed))
    draw = jax.random.normal
    return (
        draw(a, x_shape_like.shape, jnp.bfloat16),
        draw(b, w_shape_like.shape, jnp.bfloat16),
    )


def exact_product(x, w):
    with jax.enable_x64(True):
        wide = (a.astype(jnp.float64) for a in (x, w))
        return jnp.einsum("mk,nk->mn", *wide)


def error(y, exact) -> float:
    with jax.enable_x64(True):
        difference = jnp.linalg.norm(y.astype(jnp.float64) - exact)
        return float(difference / jnp.linalg.norm(exact))


def kernel_names(call, *args) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call(*args))
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
        return [
            e.name[:120]
            for plane in profile.planes
            if "GPU" in plane.name
            for line in plane.lines
            if line.name.startswith("Stream")
            for e in line.events
        ]


def one_size(rows: int, n: int, k: int, options: dict) -> list[dict]:
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, k), (n, k))]
    x, w = jax.jit(lambda s: operand_pair.__wrapped__(s, *shapes))(rows + n + k)
    exact = exact_product(x, w)
    found = []
    for out in OUTS:
        schedule = schedule_for(rows, n, k, out_dtype=out)
        ours = bench._ours(x, w, out, schedule)
        peer_call = jax.jit(lambda x, w, out=out: bench._peer(x, w, out))
        peer_call = peer_call.lower(x, w).compile(compiler_options=options)
        peer = peer_call(x, w)
        word = jnp.int16 if out == "bfloat16" else jnp.int32
        bits = [jax.lax.bitcast_convert_type(y, word) for y in (ours, peer)]
        row = dict(rows=rows, n=n, k=k, out=out, ours=error(ours, exact), peer=error(peer, exact))
        row |= dict(differing=int((bits[0] != bits[1]).sum()), elements=rows * n)
        row["ratio"] = row["ours"] / row["peer"]
        try:
            row["kernels"] = kernel_names(peer_call, x, w)
        except Exception as failure:
            row["kernels"] = [repr(failure)[:100]]
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--budget", type=float, default=90.0, help="seconds")
    args = parser.parse_args()
    begin, options = time.time(), bench._cublas_only()
    report: dict = dict(header=header(copy_bandwidth(), sys.argv), rows=[])
    for rows in ROWS:
        for n, k in SIZES:
            if time.time() - begin > args.budget or rows * n > 400e6:
                continue
            for row in one_size(rows, n, k, options):
                report["rows"].append(row)
                short = {key: v for key, v in row.items() if key != "kernels"}
                print(short, row["kernels"][:3], flush=True)
            args.json.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
