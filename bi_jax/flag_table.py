"""The compiler options and environment variables that matter here, each with its reason."""

from dataclasses import dataclass

Value = bool | int | str


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One setting.

    Attributes:
      name: of the XLA option or the environment variable.
      value: what we set.
      platforms: JAX platforms where it is set.
      reason: what could change without it.
      checked: versions on which name and effect were checked.
      needed: whether we refuse to compile where the installed jaxlib does not know it.
    """

    name: str
    value: Value
    platforms: tuple[str, ...]
    reason: str
    checked: str
    needed: bool = False

    @property
    def text(self) -> str:
        """The value as a command line writes it."""
        return str(self.value).lower() if isinstance(self.value, bool) else str(self.value)


# Options of our own jits: they need no environment and work although a backend already runs.
COMPILER_OPTIONS = (
    Flag(
        name="xla_allow_excess_precision",
        value=False,
        platforms=("cpu", "gpu"),
        reason="the compiler may otherwise drop float32 to bfloat16 to float32 round trips, so "
        "that rounding depends on what it fuses",
        checked="jaxlib 0.11.2",
        needed=True,
    ),
    Flag(
        name="xla_gpu_exclude_nondeterministic_ops",
        value=True,
        platforms=("gpu",),
        reason="an operation without a deterministic form is a compile error instead of a result "
        "that changes from run to run",
        checked="jaxlib 0.11.2",
    ),
    Flag(
        name="xla_gpu_autotune_level",
        value=0,
        platforms=("gpu",),
        reason="nothing is chosen by timing; what the compiler picks is the same in every process",
        checked="jaxlib 0.11.2",
    ),
    Flag(
        name="xla_gpu_enable_reassociation_for_converted_ar",
        value=False,
        platforms=("gpu",),
        reason="an all-reduce of converted values would be added in another dtype",
        checked="jaxlib 0.11.2",
    ),
    Flag(
        name="xla_cpu_enable_fast_math",
        value=False,
        platforms=("cpu",),
        reason="fast math reassociates additions",
        checked="jaxlib 0.11.2",
        needed=True,
    ),
    Flag(
        name="xla_cpu_enable_fast_min_max",
        value=False,
        platforms=("cpu",),
        reason="with it a maximum may lose a NaN, depending on which side it stands",
        checked="jaxlib 0.11.2",
    ),
)

# For programs that are not ours (a user's own train step): XLA_FLAGS, read when the backend starts.
PROCESS_FLAGS = (
    Flag(
        name="xla_allow_excess_precision",
        value=False,
        platforms=("cpu", "gpu"),
        reason="rounding points of your own code stay where you wrote them",
        checked="jaxlib 0.11.2",
    ),
    Flag(
        name="xla_gpu_deterministic_ops",
        value=True,
        platforms=("gpu",),
        reason="your own scatters and reductions repeat from run to run (they still depend on the "
        "batch: no flag changes that)",
        checked="jaxlib 0.11.2",
    ),
    Flag(
        name="xla_gpu_autotune_level",
        value=0,
        platforms=("gpu",),
        reason="your own products are not picked by timing",
        checked="jaxlib 0.11.2",
    ),
)

# NCCL reads these when its first communicator is made. Our own programs only move data between
# devices, which is exact; a psum of yours adds inside NCCL.
NCCL_VARIABLES = (
    Flag(
        name="NCCL_ALGO",
        value="Ring",
        platforms=("gpu",),
        reason="otherwise ring or tree, and so the order of additions, follows the message size",
        checked="not measured by us",
    ),
    Flag(
        name="NCCL_PROTO",
        value="Simple",
        platforms=("gpu",),
        reason="the protocol, picked by size, moves the chunk boundaries",
        checked="not measured by us",
    ),
    Flag(
        name="NCCL_MIN_CTAS",
        value=16,
        platforms=("gpu",),
        reason="the number of channels, picked by size, moves the chunk boundaries too",
        checked="not measured by us",
    ),
    Flag(
        name="NCCL_MAX_CTAS",
        value=16,
        platforms=("gpu",),
        reason="as NCCL_MIN_CTAS",
        checked="not measured by us",
    ),
    Flag(
        name="NCCL_NVLS_ENABLE",
        value=0,
        platforms=("gpu",),
        reason="the switch would add in an order of its own",
        checked="not measured by us",
    ),
)

# Beginnings of XLA_FLAGS that cannot change a bit: where XLA writes what it does, and how many
# devices it makes of a CPU.
NO_BITS = ("xla_dump_", "xla_force_host_platform_device_count")
