"""The public surface is the list in each `__init__.py`, and each name on it is explained."""

import importlib
import inspect
from types import ModuleType

import pytest

# A name is added or taken away here and there, on purpose and in one commit.
SURFACE = {
    "AuditError",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "audit",
    "certify",
    "pin_flags",
    "testing",
    "trace",
}
# Names that are decided on and may come.
PLANNED = {"score", "token_logprobs"}
PACKAGES = ("bi_jax", "bi_jax.models", "bi_jax.pallas_kernels")


def public(package: str) -> dict[str, object]:
    module = importlib.import_module(package)
    return {name: getattr(module, name) for name in module.__all__}


def test_the_surface_is_the_list():
    assert set(public("bi_jax")) - PLANNED == SURFACE


@pytest.mark.parametrize("package", PACKAGES)
def test_the_list_names_each_thing_once(package: str):
    names = importlib.import_module(package).__all__
    assert len(names) == len(set(names))


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_else_looks_public(package: str):
    module = importlib.import_module(package)
    others = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    } - set(module.__all__)
    assert not others


@pytest.mark.parametrize("package", PACKAGES)
def test_each_name_is_explained_and_typed(package: str):
    for name, value in public(package).items():
        if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
            continue
        doc = inspect.getdoc(value) or ""
        # A dataclass without a docstring is given its signature as one.
        assert doc and not doc.startswith(f"{name}("), f"{package}.{name} has no docstring"
        if inspect.isroutine(value):
            signature = inspect.signature(value)
            bare = [p for p in signature.parameters.values() if p.annotation is p.empty]
            assert not bare, f"{package}.{name} has arguments without a type: {bare}"
            assert signature.return_annotation is not signature.empty, f"{package}.{name}"


def test_each_op_says_what_may_change():
    """Every public function of the ops states its invariance."""
    silent = [
        name
        for name, value in public("bi_jax.pallas_kernels").items()
        if inspect.isroutine(value)
        and "Array" in str(inspect.signature(value))
        and "Invariance:" not in (inspect.getdoc(value) or "")
    ]
    assert not silent
