"""Batch-invariant language-model inference and scoring in JAX.

Names are looked up when they are first used, so that `import bi_jax` starts and loads nothing.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from . import testing
    from .audit_program import AuditError, audit
    from .certify_engine import certify
    from .config import EngineConfig
    from .engine import Engine
    from .flags import pin_flags
    from .request import CompletionOutput, Request, RequestOutput, SamplingParams
    from .scoring import score
    from .trace_folder import trace
    from .trainer_logprobs import token_logprobs

__all__ = [
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
    "score",
    "testing",
    "token_logprobs",
    "trace",
]

_PLACES = {
    "AuditError": "audit_program",
    "CompletionOutput": "request",
    "Engine": "engine",
    "EngineConfig": "config",
    "Request": "request",
    "RequestOutput": "request",
    "SamplingParams": "request",
    "audit": "audit_program",
    "certify": "certify_engine",
    "pin_flags": "flags",
    "score": "scoring",
    "token_logprobs": "trainer_logprobs",
    "trace": "trace_folder",
}


def __getattr__(name: str) -> typing.Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
