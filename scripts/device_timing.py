"""Device times, bandwidth and operands for the benchmarks of kernels."""

import collections
import datetime
import functools
import pathlib
import statistics
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bi_jax import versions

CALLS = 3
MARKER = "sine"  # a kernel of this name stands between two programs in the trace


@functools.partial(jax.jit, static_argnames=("shape", "wide"))
def _random(seed, *, shape: tuple, wide: bool):
    sign, scale = jax.random.split(jax.random.key(seed))
    values = jax.random.normal(sign, shape, jnp.bfloat16)
    if not wide:
        return values
    exponent = jax.random.uniform(scale, shape, minval=-20.0, maxval=20.0)
    return (values.astype(jnp.float32) * jnp.exp2(exponent)).astype(jnp.bfloat16)


@functools.cache
def _pool() -> np.ndarray:
    """Rows are cut from one host array: a generator for each number of rows would be compiled."""
    values = np.random.default_rng(0).standard_normal(1 << 22, np.float32)
    return np.asarray(values, jnp.bfloat16)


@functools.cache
def operand(seed: int, shape: tuple, wide: bool):
    """Normal values, or of both signs over 2^-20..2^20 so that another order of additions shows.

    Even seeds are rows of x, odd ones weights; a seed and a shape always give the same values.
    """
    if seed % 2 == 0 and not wide:
        return jax.device_put(np.resize(np.roll(_pool(), 1009 * seed), shape))
    return _random(seed, shape=shape, wide=wide)


def device_times(runs) -> list[float]:
    """Microseconds of kernels a launch, for (compiled, operands, launches) run in a row."""
    return [statistics.median(calls) for calls in device_times_by_turns([[run] for run in runs])]


def device_times_by_turns(cells, calls: int = CALLS) -> list[list[float]]:
    """Microseconds a launch, for each call of each (compiled, operands, launches).

    The runs of a cell take turns, so that a clock which falls falls for all of them.
    """
    order = turns([len(cell) for cell in cells], calls)
    runs = [run for cell in cells for run in cell]
    found: list[list[float]] = [[] for _ in runs]
    for index, total in zip(order, _traced(runs, order), strict=False):
        found[index].append(total / runs[index][2])
    return found


def turns(sizes, calls: int) -> list[int]:
    """Members of cells of these sizes, counted through, in the order in which they are called."""
    order, first = [], 0
    for size in sizes:
        members = range(first, first + size)
        for call in range(calls):
            order += members if call % 2 == 0 else reversed(members)
        first += size
    return order


def _traced(runs, order) -> list[float]:
    """Microseconds of all kernels of runs[i], for each i of `order`."""
    mark = jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((8,), jnp.float32)).compile()
    dot = jnp.ones(8, jnp.float32)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for index in order:
                compiled, args, _ = runs[index]
                jax.block_until_ready(mark(dot))
                jax.block_until_ready(compiled(*args))
            jax.block_until_ready(mark(dot))
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        events = _gpu_events(jax.profiler.ProfileData.from_file(str(path)))
    groups, current = [], None
    for name, duration in events:
        if MARKER in name:
            current = []
            groups.append(current)
        elif current is not None:
            current.append(duration)
    if len(groups) < len(order):
        names = collections.Counter(name for name, _ in events).most_common(9)
        raise RuntimeError(f"{len(groups)} markers in the trace, which holds {names}")
    return [sum(group) / 1e3 for group in groups]


def wall_times(runs) -> list[float]:
    """Microseconds a launch by the host's clock; only where the profiler gives nothing."""
    found = []
    for compiled, args, launches in runs:
        sets = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(4):
                result = compiled(*args)
            jax.block_until_ready(result)
            sets.append((time.perf_counter() - start) / (4 * launches) * 1e6)
        found.append(statistics.median(sets))
    return found


def _gpu_events(profile) -> list[tuple[str, float]]:
    found = []
    for plane in profile.planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                found += [(e.start_ns, e.name, e.duration_ns) for e in line.events]
    return [(name, duration) for _, name, duration in sorted(found)]


def copy_bandwidth() -> float:
    """Bytes/s, read and written, of a large copy, by device time."""
    source = operand(1, (1 << 30,), False)
    copy = jax.jit(lambda a: lax.optimization_barrier(jnp.copy(a))).lower(source).compile()
    found = 0.0
    for _ in range(2):  # the first round also makes room in memory for the results under way
        start = time.perf_counter()
        for _ in range(8):
            result = copy(source)
        jax.block_until_ready(result)
        found = 8 * 4 * source.size / (time.perf_counter() - start)
    return found


def header(bandwidth: float, argv: list[str] | None = None) -> dict:
    """What the numbers of a run were measured on; `argv` if more of it than the verb matters."""
    words = sys.argv[:2] if argv is None else argv
    named = [pathlib.Path(word).name or word for word in words]  # where files lay is nobody's need
    return dict(
        date=datetime.date.today().isoformat(),
        chip=versions.chip_name(jax.devices()[0]),
        driver=versions.driver_version(),
        jax=jax.__version__,
        jaxlib=jax.lib.__version__,
        python=sys.version.split()[0],
        command=" ".join(["python", f"scripts/{named[0]}", *named[1:]]),
        copy_bandwidth_tb_s=round(bandwidth / 1e12, 3),
        peak="bf16 dense 989 TFLOP/s (datasheet)",
    )


def race_row(
    *, op: str, case: str, rows: int, us: float, peer: str, peer_us: float, moved: int, copy: float
) -> dict:
    """A cell of a bandwidth-bound bfloat16 op in a benchmark's JSON; printed too.

    Args:
      us, peer_us: microseconds of ours and of the peer.
      moved: bytes that the op must read and write.
      copy: bytes a second of a device copy in the same run.
    """
    row = dict(
        op=op,
        case=case,
        rows=rows,
        dtype="bfloat16",
        ours_us=round(us, 2),
        peer=peer,
        peer_us=round(peer_us, 2),
        ratio=round(us / peer_us, 4),
        ceiling_fraction=round(moved / (copy * us / 1e6), 4),
    )
    print(row, flush=True)
    return row
