"""Batch-invariant language-model inference and scoring in JAX."""

from . import testing
from .config import EngineConfig
from .engine import Engine
from .flags import pin_flags
from .request import CompletionOutput, Request, RequestOutput, SamplingParams

__all__ = [
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "pin_flags",
    "testing",
]
