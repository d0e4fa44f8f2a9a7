#!/usr/bin/env python3
"""Times products in segments of K: one launch against one accumulator, cuBLAS, separate products.

    python scripts/bench_segments.py --json out.json            # on the chip
    python scripts/bench_segments.py --lower                    # anywhere: only lowers the programs

Ours is the op `segmented_matmul` of a whole model (8 segments, rounded) and of a rank of two or
four (4 or 2 segments, float32 sums). Device times of the profiler, medians; every launch of a
program has rows and weights of its own.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
from device_timing import copy_bandwidth, device_times, header, operand
from jax import lax

from bi_jax.pallas_kernels.matmul import matmul, segmented_matmul
from bi_jax.pallas_kernels.merge import tree_sum
from bi_jax.pallas_kernels.primitive import HOPPER

N = 4096
DEPTHS = {"out": 4096, "qwen_down": 12288, "llama_down": 14336}  # K of the whole model
ROWS = (64, 128, 256, 264, 512, 1024, 4096, 8192)
SEGMENTS = 8
DEGREES = (1, 2, 4)
ROTATED_BYTES = 250e6  # weights of one program, against an L2 of 50 to 60 MB
PEAK = 989e12
CONTESTANTS = ("ours", "one accumulator", "cuBLAS", "separate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """`launches` products of one contestant, each [rows, depth] x [N, depth]."""

    contestant: str
    case: str
    rows: int
    degree: int

    @property
    def segments(self) -> int:
        return SEGMENTS // self.degree

    @property
    def depth(self) -> int:
        return DEPTHS[self.case] // self.degree

    @property
    def out(self) -> str:
        return "bfloat16" if self.degree == 1 else "float32"

    @property
    def launches(self) -> int:
        return min(8, max(2, int(ROTATED_BYTES // (2 * N * self.depth))))

    def operand_shapes(self) -> list[tuple[int, ...]]:
        w = (N, self.depth)
        if self.contestant in ("ours", "separate"):
            w = (self.segments, N, self.depth // self.segments)
        return [(self.rows, self.depth), w] * self.launches

    def product(self, x: jax.Array, w: jax.Array) -> jax.Array:
        if self.contestant == "ours":
            return segmented_matmul(x, w, backend=HOPPER, out_dtype=self.out)
        if self.contestant == "one accumulator":
            return matmul(x, w, backend=HOPPER, out_dtype=self.out)
        if self.contestant == "separate":
            columns = jnp.split(x, self.segments, axis=1)
            new = functools.partial(matmul, backend=HOPPER, out_dtype="float32")
            parts = [new(part, piece) for part, piece in zip(columns, w, strict=True)]
            return tree_sum(jnp.stack(parts), out_dtype=self.out, backend=HOPPER)
        dims = (((1,), (1,)), ((), ()))
        return lax.dot_general(x, w, dims, preferred_element_type=jnp.dtype(self.out))

    def lowered(self) -> Any:
        def body(*operands: jax.Array) -> tuple[jax.Array, ...]:
            pairs = zip(operands[::2], operands[1::2], strict=True)
            return tuple(self.product(x, w) for x, w in pairs)

        shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in self.operand_shapes()]
        return jax.jit(body).trace(*shapes).lower(lowering_platforms=("cuda",))

    def operands(self) -> list[jax.Array]:
        return [operand(i, shape, False) for i, shape in enumerate(self.operand_shapes())]

    def floor_us(self, bandwidth: float) -> float:
        """The larger of the bytes over a copy's speed and the operations over the peak."""
        width = jnp.dtype(self.out).itemsize
        moved = 2 * self.depth * (N + self.rows) + width * self.rows * N
        return 1e6 * max(moved / bandwidth, 2 * self.rows * N * self.depth / PEAK)


def programs(only: list[int]) -> list[Program]:
    found = []
    for degree in DEGREES:
        for case in DEPTHS:
            for rows in ROWS if degree == 1 else (256, 8192):
                for contestant in CONTESTANTS if rows in only else ():
                    if degree > 1 and contestant == "cuBLAS":
                        continue
                    if contestant == "separate" and (
                        rows not in (256, 8192) or case != "qwen_down"
                    ):
                        continue
                    new = functools.partial(Program, case=case, rows=rows, degree=degree)
                    found.append(new(contestant=contestant))
    return found


def row_of(ours: Program, us: dict[str, float], bandwidth: float) -> dict[str, Any]:
    name = f"{ours.case}_{ours.segments}_segments"
    row: dict[str, Any] = dict(op="segmented_matmul", case=name, rows=ours.rows, dtype="bfloat16")
    row |= dict(out_dtype=ours.out, ours_us=round(us["ours"], 2))
    row |= dict(peer="our own product of one segment", peer_us=round(us["one accumulator"], 2))
    row["ratio"] = round(us["ours"] / us["one accumulator"], 4)
    row["ceiling_fraction"] = round(ours.floor_us(bandwidth) / us["ours"], 4)
    for contestant in ("cuBLAS", "separate"):
        if contestant in us:
            row[f"{contestant.lower()}_us"] = round(us[contestant], 2)
    return row


def run(path: pathlib.Path, todo: list[Program]) -> None:
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    # Lowering holds Python's lock; what is lowered compiles beside it.
    futures = [pool.submit(program.lowered().compile) for program in todo]
    bandwidth = copy_bandwidth()
    head = header(bandwidth, sys.argv)
    rows = []
    cells: dict[Any, list[Any]] = {}
    for program, future in zip(todo, futures, strict=True):
        cell = dataclasses.replace(program, contestant="ours")
        cells.setdefault(cell, []).append((program, future.result()))
    for cell, members in cells.items():
        runs = [(compiled, p.operands(), p.launches) for p, compiled in members]
        for compiled, operands, _ in runs:
            jax.block_until_ready(compiled(*operands))
        times = device_times(runs)
        us = {p.contestant: t for (p, _), t in zip(members, times, strict=True)}
        rows.append(row_of(cell, us, bandwidth))
        print(json.dumps(rows[-1]), flush=True)
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        path.write_text(f'{{"header": {json.dumps(head)},\n"rows": [\n  {lines}]}}\n')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--lower", action="store_true", help="lower every program, time nothing")
    parser.add_argument("--rows", type=int, nargs="+", choices=ROWS, default=list(ROWS))
    arguments = parser.parse_args()
    todo = programs(arguments.rows)
    if arguments.lower:
        print(sum(program.lowered() is not None for program in todo), "programs lowered")
    elif arguments.json is None:
        parser.error("give --json FILE or --lower")
    else:
        run(arguments.json, todo)
    return 0


if __name__ == "__main__":
    sys.exit(main())
