"""The part of Tunix 0.1.7 that our integration touches, for machines without Tunix."""

import abc
import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

OURS = "bi_jax.integrations.tunix"


def is_installed() -> bool:
    return importlib.util.find_spec("tunix") is not None


class BaseRollout(abc.ABC):
    """The abstract methods; a subclass that lacks one cannot be made."""

    @abc.abstractmethod
    def __init__(self, **kwargs: Any) -> None: ...
    @abc.abstractmethod
    def generate(self, prompts: list[str], rollout_config: Any, **kwargs: Any) -> Any: ...
    @abc.abstractmethod
    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> Any: ...
    @abc.abstractmethod
    def update_params(self, params: Any, filter_types: Any = None) -> None: ...
    @abc.abstractmethod
    def pad_id(self) -> int: ...
    @abc.abstractmethod
    def eos_id(self) -> int: ...
    @abc.abstractmethod
    def model(self) -> Any: ...


@dataclasses.dataclass
class RolloutConfig:
    max_tokens_to_generate: int = 64
    temperature: float = 0.9
    top_p: float | None = 1.0
    top_k: int | None = None
    seed: Any = None
    max_prompt_length: int = 64
    data_type: Any = None
    eos_tokens: list[int] | None = None
    return_logprobs: bool = False


@dataclasses.dataclass
class RolloutOutput:
    text: list[str]
    logits: list[Any]
    tokens: list[Any]
    left_padded_prompt_tokens: Any
    logprobs: list[Any] | None


def compute_per_token_logps(*args: Any, **kwargs: Any) -> Any:
    """Whose place `install` takes."""
    return "Tunix's own", args, kwargs


def _modules() -> dict[str, ModuleType]:
    names = ("tunix", "tunix.rl", "tunix.rl.common", "tunix.rl.rollout")
    found = {name: ModuleType(name) for name in (*names, "tunix.rl.rollout.base_rollout")}
    found["tunix.rl"].common = found["tunix.rl.common"]  # type: ignore[attr-defined]
    base = found["tunix.rl.rollout.base_rollout"]
    found["tunix.rl.rollout"].base_rollout = base  # type: ignore[attr-defined]
    found["tunix.rl.common"].compute_per_token_logps = (  # type: ignore[attr-defined]
        compute_per_token_logps
    )
    for name in ("BaseRollout", "RolloutConfig", "RolloutOutput"):
        setattr(base, name, globals()[name])
    return found


@contextmanager
def integration() -> Iterator[Any]:
    """`bi_jax.integrations.tunix` on the stand-in, gone again afterwards."""
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "tunix"}
    kept[OURS] = sys.modules.pop(OURS, None)  # type: ignore[assignment]
    sys.modules.update(_modules())
    try:
        yield importlib.import_module(OURS)
    finally:
        for name in (*_modules(), OURS):
            sys.modules.pop(name, None)
        sys.modules.update({name: module for name, module in kept.items() if module})
