"""Errors of matrix products against float64, ours beside cuBLAS through XLA, on the card.

    python scripts/matmul_error.py --json out.json

Normal operands, bfloat16 in, bfloat16 or float32 out; |y - exact| / |exact| (norms) with exact in
float64. `kernels` are the names of what the peer ran, so that one that splits K can be told; and
`differing` counts the elements in which the peer's bits are not ours. At one row XLA multiplies and
adds in a kernel of its own; `torch` says what cuBLAS does there, where PyTorch is installed.
`segments` are the errors of ours in 2, 4 and 8 segments of K.
"""

import argparse
import concurrent.futures
import functools
import json
import pathlib
import sys
import tempfile
import time

import bench_kernels as bench
import jax
import jax.numpy as jnp
from device_timing import copy_bandwidth, header

from bi_jax.pallas_kernels.matmul.kernel_hopper import matmul_hopper
from bi_jax.pallas_kernels.matmul.schedule import schedule_for, segmented_schedule_for

ROWS = (1, 64, 256, 1024, 4096)
SIZES = ((28672, 4096), (4096, 12288), (4096, 4096), (4096, 14336), (151936, 4096))
OUTS = ("float32", "bfloat16")
SEGMENTS = (2, 4, 8)

try:
    import torch  # nothing here depends on it
except ImportError:
    torch = None


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


def through_torch(x, w, out: str):
    """x w^T by PyTorch, which calls cuBLAS at every number of rows."""
    a, b = (torch.from_dlpack(operand) for operand in (x, w))
    y = torch.mm(a, b.T, out_dtype=getattr(torch, out))
    torch.cuda.synchronize()
    return jnp.asarray(jax.dlpack.from_dlpack(y))


def differing(a, b) -> int:
    word = jnp.int16 if a.dtype.itemsize == 2 else jnp.int32
    a, b = (jax.lax.bitcast_convert_type(y, word) for y in (a, b))
    return int((a != b).sum())


def ours(out: str, segments: int, rows: int, n: int, k: int):
    if segments == 1:
        schedule = schedule_for(rows, n, k, out_dtype=out)
    else:
        schedule = segmented_schedule_for(rows, n, k, segments=segments, out_dtype=out)
    return functools.partial(matmul_hopper, out_dtype=out, segments=segments, schedule=schedule)


def compiled_calls(x, w, options: dict) -> dict:
    """(who, out) -> a compiled product, all built side by side; segments go by their number."""
    sizes = x.shape[0], *w.shape
    calls = {("peer", out): functools.partial(bench._peer, out=out) for out in OUTS}
    calls |= {(1, out): ours(out, 1, *sizes) for out in OUTS}
    calls |= {(s, "float32"): ours("float32", s, *sizes) for s in SEGMENTS}

    def build(item):
        (who, _), call = item
        lowered = jax.jit(call).lower(x, w)
        return lowered.compile(compiler_options=options if who == "peer" else None)

    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return dict(zip(calls, pool.map(build, calls.items()), strict=True))


def one_size(rows: int, n: int, k: int, options: dict) -> list[dict]:
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, k), (n, k))]
    x, w = jax.jit(lambda s: operand_pair.__wrapped__(s, *shapes))(rows + n + k)
    exact = exact_product(x, w)
    calls = compiled_calls(x, w, options)
    found = []
    for out in OUTS:
        mine, peer = calls[1, out](x, w), calls["peer", out](x, w)
        row = dict(rows=rows, n=n, k=k, out=out, ours=error(mine, exact), peer=error(peer, exact))
        row |= dict(differing=differing(mine, peer), elements=rows * n)
        row["ratio"] = row["ours"] / row["peer"]
        if out == "float32":
            row["segments"] = {s: error(calls[s, out](x, w), exact) for s in SEGMENTS}
        if rows == 1 and out == "float32" and torch is not None:
            cublas = through_torch(x, w, out)
            row["torch"] = dict(error=error(cublas, exact), differing=differing(mine, cublas))
        try:
            row["kernels"] = kernel_names(calls["peer", out], x, w)
        except Exception as failure:
            row["kernels"] = [repr(failure)[:100]]
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--budget", type=float, default=90.0, help="seconds")
    parser.add_argument("--rows", type=int, nargs="+", choices=ROWS, default=list(ROWS))
    args = parser.parse_args()
    begin, options = time.time(), bench._cublas_only()
    report: dict = dict(header=header(copy_bandwidth(), sys.argv), rows=[])
    for rows in args.rows:
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
