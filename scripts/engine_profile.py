"""Where a step's time goes: device time by kernel, from the profiler."""

import collections
import pathlib
import re
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from device_timing import MARKER

STEPS = 2  # profiled a case
Classes = Sequence[tuple[str, str]]
_SCOPE = re.compile(r'%?([\w.\-]+) = .*op_name="([^"]*)"')
# Part of a kernel's name, or of the scope that JAX recorded for it, to the class that it is counted
# in; the first that fits.
CLASSES = (
    ("bi_swiglu|swiglu", "gate and up, SwiGLU"),
    ("peers|nccl|all-reduce|all_reduce|AllGather", "sums over cards"),
    ("matmul|gemm|cutlass|cublas|nvjet|xmma|splitK|gemv", "other products"),
    ("attention|sdpa|flash|cudnn|fmha", "attention"),
    ("rms_norm|rope|anonymous|rsqrt", "norms, rotation"),
    ("bi_choose|bi_target|summary|merge|weights|walk|pick|argmax", "token choice"),
    ("scatter", "page writes"),
    ("sort|cub", "work list"),
    ("input_concatenate", "scales put together"),
)


Kernel = tuple[str, float, float]  # name, start and duration in microseconds


def kernels_of(run: Callable[[], Any], program: str = "") -> list[Kernel]:
    """Every kernel of the last of `STEPS` runs on the first card, in order.

    Args:
      run: runs the step.
      program: its optimised program; where the profiler says which instruction a kernel belongs
        to, the scope that JAX recorded for it is put behind the kernel's name.
    """
    scopes = dict(_SCOPE.findall(program))
    mark = jax.jit(jnp.sin)
    dot = jnp.ones(8, jnp.float32)
    jax.block_until_ready((mark(dot), run()))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                jax.block_until_ready(mark(dot))
                jax.block_until_ready(run())
            jax.block_until_ready(mark(dot))
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    events = sorted(
        (event.start_ns, _name_of(event, scopes), event.duration_ns)
        for plane in profile.planes
        if "GPU:0" in plane.name
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    )
    marks = [i for i, (_, name, _) in enumerate(events) if MARKER in name]
    if len(marks) < 2:
        raise RuntimeError(f"expected markers among {len(events)} kernels")
    part = events[marks[-2] + 1 : marks[-1]]
    first = part[0][0] if part else 0
    return [(name, (start - first) / 1e3, duration / 1e3) for start, name, duration in part]


def _name_of(event: Any, scopes: dict[str, str]) -> str:
    stats = {str(key): str(value) for key, value in event.stats}
    scope = scopes.get(stats.get("hlo_op", ""), "")
    parts = [part for part in scope.split("/") if part.startswith("bi_")] or scope.split("/")[-1:]
    return f"{event.name} {parts[-1]}".strip()


def by_class(kernels: list[Kernel], classes: Classes = CLASSES) -> dict[str, float]:
    """Microseconds by class, largest first, and the time in which no kernel ran."""
    sums: collections.Counter[str] = collections.Counter()
    busy_until, gaps = 0.0, 0.0
    for name, start, duration in kernels:
        sums[class_of(name, classes)] += duration
        gaps += max(0.0, start - busy_until)
        busy_until = max(busy_until, start + duration)
    found = dict(sums.most_common()) | {"gaps": gaps}
    return {kind: round(us, 1) for kind, us in found.items()}


def by_name(kernels: list[Kernel]) -> list[dict[str, Any]]:
    """Calls and microseconds a step of each kernel name, largest first."""
    sums: dict[str, list[float]] = collections.defaultdict(list)
    for name, _, duration in kernels:
        sums[name].append(duration)
    rows = [
        {"kernel": name, "calls": len(times), "us": round(sum(times), 1)}
        for name, times in sums.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def class_of(name: str, classes: Classes = CLASSES) -> str:
    """The class of a kernel by its name."""
    for pattern, kind in classes:
        if re.search(pattern, name):
            return kind
    return "other"
