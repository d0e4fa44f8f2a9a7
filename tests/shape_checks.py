"""Holds jaxtyping annotations true in every test, after the call instead of before it.

jaxtyping's own checkers refuse an argument before the function sees it, which would hide our own
messages from the tests of bad input. Here the function speaks first: whatever it accepted must then
agree with its annotations, and so must what it returned.
"""

import inspect
import typing
from pathlib import Path
from types import UnionType
from typing import Any

import jax
import numpy as np
from jaxtyping import AbstractArray

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"bi_jax": "bi_jax", "models": "bi_jax.models", "pallas_kernels": "bi_jax.pallas_kernels"}
# Device code takes references to memory and not arrays.
DEVICE_CODE = ("kernel_", "hopper_")


def modules() -> list[str]:
    """Every module that speaks of shapes, device code and `__init__` files excepted."""
    return [
        ".".join((name, *path.relative_to(ROOT / folder).with_suffix("").parts))
        for folder, name in FOLDERS.items()
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name != "__init__.py"
        and not path.name.startswith(DEVICE_CODE)
        # The hook makes building a dataclass a hundred times slower: only where there is a shape.
        and "jaxtyping" in path.read_text()
    ]


def speaks_of_arrays(hint: Any) -> bool:
    """Whether a jaxtyping annotation stands somewhere in a type hint."""
    if inspect.isclass(hint) and issubclass(hint, AbstractArray):
        return True
    return any(speaks_of_arrays(part) for part in typing.get_args(hint))


def agrees(value: Any, hint: Any) -> bool:
    """Whether a value fits the jaxtyping annotations in a type hint; other hints are not judged."""
    if not speaks_of_arrays(hint):
        return True
    parts = typing.get_args(hint)
    if inspect.isclass(hint) and issubclass(hint, AbstractArray):
        # JAX takes NumPy arrays wherever it takes its own; so do our doors.
        if isinstance(value, np.ndarray) and hint.array_type is jax.Array:
            hint = hint.dtype[np.ndarray, hint.dim_str]
        return isinstance(value, hint)
    if typing.get_origin(hint) in (typing.Union, UnionType):
        plain = [part for part in parts if not speaks_of_arrays(part)]
        return any(isinstance(value, part) for part in plain if inspect.isclass(part)) or any(
            agrees(value, part) for part in parts if speaks_of_arrays(part)
        )
    if typing.get_origin(hint) is tuple and isinstance(value, tuple):
        hints = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return len(hints) == len(value) and all(map(agrees, value, hints))
    return True


def after_the_call(fn: Any) -> Any:
    """The checker that jaxtyping's import hook is given.

    jaxtyping hands over two stand-ins for each function: one without its result, run before the
    call, which is left alone, and one with its result, run after it.
    """
    signature = inspect.signature(fn)
    result = signature.return_annotation
    hints = {p.name: p.annotation for p in signature.parameters.values()}
    hints = {name: hint for name, hint in hints.items() if speaks_of_arrays(hint)}
    unjudged = result in (Any, inspect.Signature.empty) or fn.__name__ == "__init__"
    if unjudged or not (hints or speaks_of_arrays(result)):
        return fn

    def check(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for name, hint in hints.items():
            if name in bound.arguments and not agrees(bound.arguments[name], hint):
                raise TypeError(f"argument {name} is not {hint}")
        out = fn(*args, **kwargs)
        if not agrees(out, result):
            raise TypeError(f"the result is not {result}")
        return out

    return check
