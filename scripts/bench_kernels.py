"""Times the Hopper kernels against the libraries, on the chip, and proves equal bits.

Two steps, so that a machine without a GPU does the tracing:

    python scripts/bench_kernels.py lower programs/ [--workers 14] # anywhere
    python scripts/bench_kernels.py run programs/ --json out.json  # on the chip

Device time: the durations of the kernels of a program, from the profiler; medians of seven calls,
in which ours and its peers take turns, cells of few rows first (large products heat the card).
Peers are compiled, which tries their algorithms, while nothing else runs. Every launch of a program
has weights and rows of its own, several times the L2 cache together, and equal launches cannot be
merged. Ours runs in a row bucket, as in an engine (8 to 256 by powers of two, then multiples of 8);
the peer, XLA's dot through autotuned cuBLAS, at the exact number of rows.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import re
import statistics
import time

import jax
import jax.experimental.pallas.mosaic_gpu  # loads the kernels' runtime
import jax.numpy as jnp
import numpy as np
from device_timing import copy_bandwidth, device_times_by_turns, header, operand, wall_times
from jax import export, lax
from kernel_cells import bucket, cells, fastest_cells, summary, write_report
from lower_programs import add_lowering_options, lower_command, to_json

# (N, K) of the products of Llama-3.1-8B and Qwen3-8B; the first two are in both.
SHAPES = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "llama_gate_up": (28672, 4096),
    "llama_down": (4096, 14336),
    "qwen_gate_up": (24576, 4096),
    "qwen_down": (4096, 12288),
    "lm_head": (151936, 4096),
}
SWIGLU_SHAPES = {"llama_swiglu": (14336, 4096), "qwen_swiglu": (12288, 4096)}
ROWS = (1, 2, 3, 4, 8, 16, 32, 33, 64, 100, 128, 256, 257, 512, 1000, 1024, 2048, 4096, 8192)
SWIGLU_ROWS = (1, 8, 64, 256, 1024, 4096, 8192)
CALLS = 7  # of each program, by turns with those of its cell
ROTATED_BYTES = 250e6  # weights of one program, against an L2 of 50 to 60 MB
PROOF = dict(m=264, n=1024, k=2048)  # of the proof of equal bits; last tiles of few rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One program to time or to compare: `launches` products of one kind.

    Attributes:
      kind: "matmul", "swiglu", "segments", or a proof: "bits", "bits_swiglu", "bits_segments",
        "control_reversed", "control_split".
      schedule: None for the peer; in segments, for separate products and a tree over them.
      segments: of K, [segments, N, K / segments] weights.
    """

    kind: str
    shape: str
    m: int
    n: int
    k: int
    out: str
    schedule: object = None
    segments: int = 1

    @property
    def parts(self) -> int:
        return 2 if "swiglu" in self.kind else 1

    @property
    def proof(self) -> bool:
        return self.kind.startswith(("bits", "control"))

    @property
    def launches(self) -> int:
        wanted = np.ceil(ROTATED_BYTES / (2 * self.parts * self.n * self.k))
        return 1 if self.proof else int(np.clip(wanted, 2, 10))

    @property
    def group(self) -> str:
        """What must agree in every bit has one name."""
        if self.segments > 1:
            return f"{self.segments} segments"
        return "swiglu" if self.parts == 2 else "matmul"

    def operand_shapes(self):
        pieces, depth = self.parts * self.segments, self.k // self.segments
        w = (self.n, depth) if pieces == 1 else (pieces, self.n, depth)
        return [((self.m, self.k), w)] * self.launches

    def product(self, x, w):
        if self.kind == "control_reversed":
            x, w = x[:, ::-1], w[:, ::-1]
        if self.kind == "control_split":
            half = self.k // 2
            ours = functools.partial(dataclasses.replace(self, kind="bits").product)
            return ours(x[:, :half], w[:, :half]) + ours(x[:, half:], w[:, half:])
        if self.schedule is not None:
            return _ours(x, w, self.out, self.schedule, self.segments)
        if self.segments > 1:
            return _separate(x, w, self.out)
        return _peer(x, w, self.out)

    def body(self, *operands):
        return tuple(self.product(x, w) for x, w in zip(operands[::2], operands[1::2], strict=True))

    def serialized(self) -> bytes:
        flat = [s for pair in self.operand_shapes() for s in pair]
        args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in flat]
        checks = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
        exporter = export.export(jax.jit(self.body), platforms=["cuda"], disabled_checks=checks)
        return bytes(exporter(*args).serialize())


def _ours(x, w, out, schedule, segments=1):
    from bi_jax.pallas_kernels.matmul import kernel_hopper

    if w.ndim == 3 and segments == 1:
        return kernel_hopper.swiglu_matmul_hopper(x, w, out_dtype=out, schedule=schedule)
    ours = kernel_hopper.matmul_hopper
    return ours(x, w, out_dtype=out, schedule=schedule, segments=segments)


def _separate(x, w, out):
    """A float32 product for each segment, then the tree over them: two ops."""
    from bi_jax.pallas_kernels.matmul.schedule import schedule_for
    from bi_jax.pallas_kernels.merge import tree_sum
    from bi_jax.pallas_kernels.primitive import HOPPER

    schedule = schedule_for(x.shape[0], *w.shape[1:], out_dtype="float32")
    columns = jnp.split(x, w.shape[0], axis=1)
    parts = [_ours(a, b, "float32", schedule) for a, b in zip(columns, w, strict=True)]
    return tree_sum(jnp.stack(parts), out_dtype=out, backend=HOPPER)


def _peer(x, w, out):
    dims = (((1,), (w.ndim - 1,)), ((), ()))
    if w.ndim == 2:
        return lax.dot_general(x, w, dims, preferred_element_type=jnp.dtype(out))
    y = lax.dot_general(x, w.reshape(-1, w.shape[-1]), (((1,), (1,)), ((), ())))
    gate, up = (half.astype(jnp.float32) for half in jnp.split(y, 2, axis=1))
    return (gate / (1 + jnp.exp(-gate)) * up).astype(out)


def bench_programs() -> list[Program]:
    from bi_jax.pallas_kernels.matmul.schedule import schedule_for

    programs = {}
    for kind, shapes, rows in (("matmul", SHAPES, ROWS), ("swiglu", SWIGLU_SHAPES, SWIGLU_ROWS)):
        for name, (n, k) in shapes.items():
            out = "float32" if name == "lm_head" else "bfloat16"
            new = functools.partial(Program, kind=kind, shape=name, n=n, k=k, out=out)
            for m in rows:
                parts = 2 if kind == "swiglu" else 1
                schedule = schedule_for(bucket(m), n, k, parts=parts, out_dtype=out)
                programs[new(m=bucket(m), schedule=schedule)] = None
                programs[new(m=m)] = None
    return list(programs)


def proof_programs(programs) -> list[Program]:
    """Every schedule among the programs, in float32 on one set of spread operands."""
    from bi_jax.pallas_kernels.matmul.schedule import with_room

    new = functools.partial(Program, shape="proof", out="float32", **PROOF)
    proofs = {}
    groups: dict[str, list[Program]] = {}
    for p in programs:
        if p.schedule is not None:
            groups.setdefault(p.group, []).append(p)
    for group, members in groups.items():
        parts, segments = members[0].parts, members[0].segments
        kind = {"matmul": "bits", "swiglu": "bits_swiglu"}.get(group, "bits_segments")
        proofs[new(kind=kind, segments=segments)] = None
        for p in members:
            schedule = with_room(p.schedule, parts, "float32")
            proofs[new(kind=kind, schedule=schedule, segments=segments)] = None
        if group == "matmul":
            for control in ("control_reversed", "control_split"):
                proofs[new(kind=control, schedule=with_room(members[0].schedule, 1, "float32"))] = (
                    None
                )
    return list(proofs)


def operands(program: Program) -> list:
    wide = program.proof
    return [
        operand(seed, shape, wide)
        for index, pair in enumerate(program.operand_shapes())
        for seed, shape in zip((2 * index, 2 * index + 1), pair, strict=True)
    ]


def compile_program(path: pathlib.Path, program: Program, peer_options: dict):
    exported = export.deserialize(bytearray(path.read_bytes()))
    lowered = jax.jit(exported.call).lower(*exported.in_avals)
    if program.schedule is not None or program.proof:
        return lowered.compile()
    return lowered.compile(compiler_options=peer_options)


def compare_bits(proofs) -> list[dict]:
    """Each schedule's float32 bits against the first's; error against float64 beside the peer's."""
    rows, first, exact = [], {}, {}
    for program, compiled in proofs:
        x, w = operands(program)
        y = np.asarray(compiled(x, w)[0])
        group = program.group
        if group not in exact:
            exact[group] = _float64(x, w, program)
        row = {key: to_json(program)[key] for key in ("kind", "schedule", "segments")}
        norm = np.linalg.norm(exact[group])
        row["error"] = float(np.linalg.norm(y.astype(np.float64) - exact[group]) / norm)
        if program.schedule is not None or program.segments > 1:
            reference = first.setdefault(group, y)
            row["differing"] = int((reference.view(np.int32) != y.view(np.int32)).sum())
        rows.append(row)
    return rows


def _float64(x, w, program: Program):
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    if program.segments > 1:
        w = np.concatenate(list(w), axis=1)
    if w.ndim == 2:
        return x @ w.T
    gate, up = x @ w[0].T, x @ w[1].T
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate)) * up


def run(args) -> None:
    rows = json.loads((args.programs / "manifest.json").read_text())
    todo = [(_from_json(r["program"]), args.programs / r["file"]) for r in rows if "error" not in r]
    begin = time.time()
    for program, _ in todo:
        operands(program)
    print(f"operands after {time.time() - begin:.0f} s", flush=True)
    peer_options = {} if args.any_peer else _cublas_only()

    def build(item):
        return compile_program(item[1], item[0], peer_options)

    ours = [item for item in todo if item[0].schedule is not None or item[0].proof]
    built = _in_threads(build, ours, begin + 0.4 * args.budget, os.cpu_count())
    print(f"{len(built)} of {len(ours)} built after {time.time() - begin:.0f} s", flush=True)
    peers = [item for item in todo if item not in ours]
    built += _in_threads(build, peers, begin + 0.75 * args.budget, 1)
    print(f"{len(built)} of {len(todo)} built after {time.time() - begin:.0f} s", flush=True)
    ready = _warmed(built, dict(todo), args)
    print(f"{len(ready)} ready after {time.time() - begin:.0f} s", flush=True)

    bandwidth = copy_bandwidth()
    blocks = collections.defaultdict(list)
    for p, c in ready:
        if not p.proof:
            blocks[bucket(p.m), p.kind, p.shape].append((p, c))
    cells_in_turn = [blocks[key] for key in sorted(blocks)]
    runs = [[(c, operands(p), p.launches) for p, c in cell] for cell in cells_in_turn]
    try:
        micros = device_times_by_turns(runs, CALLS)
    except Exception as error:
        print("no profile:", repr(error)[:1500], flush=True)
        micros = [[us] for cell in runs for us in wall_times(cell)]
    timed = [p for cell in cells_in_turn for p, _ in cell]
    rows = "ours in its row bucket (2^n from 8 to 256, then multiples of 8), the peer exact"
    result: dict = dict(header=header(bandwidth) | dict(rows=rows))
    result["times"] = [
        dict(to_json(p), launches=p.launches, us=statistics.median(us), calls=us)
        for p, us in zip(timed, micros, strict=True)
    ]
    args.json.write_text(json.dumps(result))
    print(f"timed after {time.time() - begin:.0f} s", flush=True)
    result["bits"] = compare_bits([(p, c) for p, c in ready if p.proof])
    args.json.write_text(json.dumps(result))
    summary(cells(result), result["bits"])
    os._exit(0)  # threads that still compile must not hold the chip


def _warmed(built, paths, args) -> list:
    """Runs each once, one after the other; the note says which, for whoever waits in vain."""
    for program, compiled in built:
        if args.note:
            path = paths[program]
            args.note.write_text(str(path.relative_to(args.programs)))
        jax.block_until_ready(compiled(*operands(program)))
    if args.note:
        args.note.write_text("")
    return built


def _from_json(row: dict) -> Program:
    """A manifest row back to its program; the chip's Python needs no bi_jax for that."""
    schedule = row["schedule"]
    program = Program(**{**row, "schedule": None})
    if schedule is None:
        return program
    fields = [(key, type(value)) for key, value in schedule.items()]
    plain = dataclasses.make_dataclass("Schedule", fields, frozen=True)
    return dataclasses.replace(program, schedule=plain(**schedule))


def _cublas_only() -> dict:
    """Keeps XLA's own Triton products out of the race, where this XLA still has the option."""
    options = {"xla_gpu_enable_triton_gemm": False}
    try:
        one = jax.ShapeDtypeStruct((), jnp.float32)
        jax.jit(jnp.cos).lower(one).compile(compiler_options=options)
    except Exception as error:
        print("peers are XLA's choice:", repr(error)[:200])
        return {}
    return options


def _in_threads(work, items, deadline: float, threads) -> list:
    """(program, work(item)) for the items that finish in time; prints why others do not."""
    pool = concurrent.futures.ThreadPoolExecutor(threads)
    futures = [pool.submit(work, item) for item in items]
    concurrent.futures.wait(futures, timeout=max(deadline - time.time(), 1))
    pool.shutdown(wait=False, cancel_futures=True)
    done, failed = [], collections.Counter()
    for item, future in zip(items, futures, strict=True):
        if not future.done() or future.cancelled():
            failed["late"] += 1
        elif future.exception():
            failed[f"{item[0].kind} {item[0].schedule}: {future.exception()!r}"[:400]] += 1
        else:
            done.append((item[0], future.result()))
    if failed:
        print(failed.most_common(12), flush=True)
    return done


def add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("programs", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds")
    parser.add_argument("--note", type=pathlib.Path, help="file for the name of what runs now")
    parser.add_argument("--any-peer", action="store_true", help="XLA may use its own kernels too")


def main() -> None:
    parser = argparse.ArgumentParser(description=re.sub(r"\n\n.*", "", __doc__, flags=re.S))
    commands = parser.add_subparsers(dest="command", required=True)
    add_lowering_options(commands.add_parser("lower", help="trace and lower all; needs no GPU"))
    add_run_options(commands.add_parser("run", help="compile, time and compare; needs the chip"))
    reporting = commands.add_parser("report", help="one row a cell from what `run` wrote")
    reporting.add_argument("raw", type=pathlib.Path, nargs="+", help="of one or several runs")
    reporting.add_argument("--json", type=pathlib.Path, required=True)
    args = parser.parse_args()
    if args.command == "lower":
        programs = bench_programs()
        lower_command(args, __file__, programs + proof_programs(programs))
    elif args.command == "run":
        run(args)
    else:
        results = [json.loads(path.read_text()) for path in args.raw]
        result = results[0] | dict(bits=[row for r in results for row in r["bits"]])
        rows = fastest_cells(results)
        summary(rows, result["bits"])
        write_report(args.json, result, rows)


if __name__ == "__main__":
    main()
