"""Options of our jits hold whatever the environment says; pins are merged, loud and never fatal."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from bi_jax import flags
from bi_jax.flag_table import COMPILER_OPTIONS, NCCL_VARIABLES, PROCESS_FLAGS, Flag

UNKNOWN = Flag(
    name="xla_gpu_graph_level", value=0, platforms=("cpu",), reason="it is gone", checked="0.4"
)


def in_a_new_process(code: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "NCCL_"))}
    environment.update(variables, JAX_PLATFORMS="cpu")
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )


def test_every_flag_has_a_reason_and_says_where_it_was_checked():
    for flag in (*COMPILER_OPTIONS, *PROCESS_FLAGS, *NCCL_VARIABLES):
        assert flag.reason and flag.checked and set(flag.platforms) <= {"cpu", "gpu"}


@pytest.mark.parametrize("platform", ["cpu", "gpu", "cuda"])
def test_the_installed_jaxlib_knows_every_option(platform):
    options = flags.compiler_options(platform)
    platform = "gpu" if platform == "cuda" else platform
    assert set(options) == {f.name for f in COMPILER_OPTIONS if platform in f.platforms}
    jax.jit(jnp.negative, compiler_options=options).lower(jnp.ones(3)).compile()


def test_an_option_that_is_gone_is_left_out_and_named(monkeypatch):
    monkeypatch.setattr(flags, "COMPILER_OPTIONS", (*COMPILER_OPTIONS, UNKNOWN))
    assert UNKNOWN.name not in flags.compiler_options("cpu")
    states = {state.name: state for state in flags.verify("cpu") if state.where == "our jits"}
    assert not states[UNKNOWN.name].holds and "does not know" in states[UNKNOWN.name].note
    assert dict(flags.in_force("cpu"))[UNKNOWN.name] == "unknown option"


def test_an_option_that_we_cannot_do_without_is_an_error(monkeypatch):
    needed = dataclasses.replace(UNKNOWN, needed=True)
    monkeypatch.setattr(flags, "COMPILER_OPTIONS", (needed,))
    with pytest.raises(NotImplementedError, match=r"xla_gpu_graph_level.*because it is gone"):
        flags.compiler_options("cpu")


def test_our_options_win_over_the_environment():
    """Read back from the compiler, in a process whose user asked for the opposite."""
    code = (
        "from bi_jax import flags\n"
        "for s in flags.verify(): print(s.where, s.name, s.wanted, s.in_force, s.holds)\n"
    )
    done = in_a_new_process(code, XLA_FLAGS="--xla_allow_excess_precision=true")
    assert done.returncode == 0, done.stderr
    assert "our jits xla_allow_excess_precision false false True" in done.stdout
    assert "XLA_FLAGS xla_allow_excess_precision false true False" in done.stdout


def test_flags_of_the_process_that_may_change_bits_are_in_force(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    ours = flags.in_force("cpu")
    assert all(not name.startswith("XLA_FLAGS") for name, _ in ours)
    harmless = "--xla_dump_to=dumped --xla_force_host_platform_device_count=8"
    overridden = "--xla_allow_excess_precision=true --xla_cpu_enable_fast_math=true"
    pinned = "--xla_gpu_deterministic_ops=true"
    monkeypatch.setenv("XLA_FLAGS", f"{harmless} {overridden} {pinned} --xla_gpu_ftz=true")
    assert flags.in_force("cpu") == ours
    assert flags.in_force("gpu")[-1] == ("XLA_FLAGS xla_gpu_ftz", "true")
    monkeypatch.setenv("XLA_FLAGS", f"{harmless} --xla_cpu_max_isa=AVX")
    assert flags.in_force("cpu") == (*ours, ("XLA_FLAGS xla_cpu_max_isa", "AVX"))


def test_pins_are_merged_with_what_the_user_set():
    code = (
        "import json, os\nfrom bi_jax import pin_flags\nfirst = pin_flags()\n"
        "import jax\njax.devices()\n"
        "print(json.dumps([first, os.environ['XLA_FLAGS'], os.environ['NCCL_PROTO']]))"
    )
    given = "--xla_gpu_autotune_level=0 --xla_cpu_enable_fast_math=false"
    done = in_a_new_process(code, XLA_FLAGS=given, NCCL_ALGO="Ring")
    assert done.returncode == 0, done.stderr
    first, text, proto = json.loads(done.stdout)
    assert text.startswith(given + " ") and text.count("xla_gpu_autotune_level") == 1
    assert "--xla_allow_excess_precision=false" in text and proto == "Simple"
    assert "NCCL_ALGO" not in first and first["NCCL_PROTO"] == "Simple"


@pytest.mark.parametrize(
    "variables, words",
    [
        (
            {"XLA_FLAGS": "--xla_allow_excess_precision=true"},
            ["XLA_FLAGS has xla_allow_excess_precision=true", "xla_allow_excess_precision=false"],
        ),
        ({"NCCL_ALGO": "Tree"}, ["NCCL_ALGO=Tree", "NCCL_ALGO=Ring"]),
    ],
)
def test_a_contradiction_names_both(variables, words):
    done = in_a_new_process("import bi_jax; bi_jax.pin_flags()", **variables)
    assert done.returncode == 1 and "ValueError" in done.stderr
    for word in words:
        assert word in done.stderr


def test_pins_that_come_too_late_are_an_error():
    with pytest.raises(RuntimeError, match="came too late"):
        jax.devices()
        flags.pin_flags()


def test_a_pin_that_jaxlib_does_not_know_never_kills_the_process():
    code = (
        "from bi_jax import flags, flag_table\n"
        f"gone = flag_table.Flag(name='{UNKNOWN.name}', value=0, platforms=('cpu',), reason='x',"
        " checked='x')\n"
        "flags.PROCESS_FLAGS = (*flags.PROCESS_FLAGS, gone)\n"
        "flags.pin_flags()\nimport jax\nprint(jax.numpy.ones(2).sum())\n"
    )
    done = in_a_new_process(code)
    assert done.returncode == 0 and "2.0" in done.stdout, done.stderr
    # The control: the same name written by hand is fatal, and no except clause sees it.
    code = "import jax\ntry: jax.numpy.ones(2)\nexcept BaseException: print('caught')"
    killed = in_a_new_process(code, XLA_FLAGS=f"--{UNKNOWN.name}=0")
    assert killed.returncode != 0 and "caught" not in killed.stdout


def test_the_cache_has_a_documented_place(monkeypatch, tmp_path):
    monkeypatch.setenv("BI_JAX_CACHE_DIR", str(tmp_path / "own"))
    assert flags.default_compilation_cache_dir() == tmp_path / "own"
    monkeypatch.delenv("BI_JAX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert flags.default_compilation_cache_dir() == tmp_path / "bi_jax" / "programs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert flags.default_compilation_cache_dir() == Path("~/.cache/bi_jax/programs").expanduser()


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert jax.config.jax_compilation_cache_dir is None
    assert flags.enable_compilation_cache(blocker / "below") is None
    assert jax.config.jax_compilation_cache_dir is None


def test_importing_touches_nothing():
    code = (
        "import os\nbefore = dict(os.environ)\nimport bi_jax.flags\n"
        "from jax._src import xla_bridge\n"
        "print(before == dict(os.environ), xla_bridge.backends_are_initialized())"
    )
    assert in_a_new_process(code).stdout.split() == ["True", "False"]


@pytest.mark.gpu
def test_on_a_gpu_a_rounding_point_survives_with_our_options_only():
    def round_trip(x):
        return (x * 1.1).astype(jnp.bfloat16).astype(jnp.float32) * 3.0

    def keeps(options):
        lowered = jax.jit(round_trip, compiler_options=options).lower(jnp.ones(64))
        return "bf16" in lowered.compile().as_text()

    assert not keeps(None)
    assert keeps(flags.compiler_options("gpu"))
