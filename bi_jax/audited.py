"""A jitted function whose every compiled program is audited before it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from .audit_program import AuditReport, audit_compiled
from .program_store import ProgramStore, fresh_compilation


class AuditedJit:
    """Compiles a function once a key, audits what was compiled, and runs exactly that.

    Args:
      fn: as for `jax.jit`.
      audited: whether to audit; without it programs are compiled and run in the same way.
      store: where programs that passed are kept for other processes; None: nowhere. One that is
        found there was audited by the process that wrote it, and its report comes with it.
      static_argnames, jit: as for `jax.jit`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        audited: bool,
        static_argnames: Sequence[str],
        store: ProgramStore | None = None,
        **jit: Any,
    ) -> None:
        self.audited = audited
        self._store = store if audited else None
        self._static = frozenset(static_argnames)
        self._jitted = jax.jit(fn, static_argnames=tuple(static_argnames), **jit)
        self._programs: dict[Hashable, Any] = {}
        self.reports: dict[Hashable, AuditReport] = {}
        self.audit_seconds = 0.0

    def __call__(self, key: Hashable, *args: Any, **kwargs: Any) -> Any:
        """Runs the program of `key`, which stands for the arguments' shapes and static values.

        Raises:
          AuditError: the program computes floats outside our ops; it has not run.
        """
        self.compile(key, *args, **kwargs)
        dynamic = {name: value for name, value in kwargs.items() if name not in self._static}
        return self._programs[key](*args, **dynamic)

    def compile(self, key: Hashable, *args: Any, **kwargs: Any) -> None:
        """Compiles and audits the program of `key` unless it is there; several threads may.

        Raises:
          AuditError: as a call.
        """
        if key not in self._programs:
            self._programs[key] = self._compile(key, *args, **kwargs)

    @property
    def found(self) -> int:
        """Programs that came from the store."""
        return self._store.found if self._store else 0

    def text(self, key: Hashable) -> str:
        """The optimised program of a key that was compiled."""
        return self._programs[key].as_text()

    def memory(self, key: Hashable) -> dict[str, int]:
        """Bytes of a compiled program: arguments, results, those among them that share their place
        (donated), and what it needs besides."""
        found = self._programs[key].memory_analysis()
        return {
            "arguments": found.argument_size_in_bytes,
            "results": found.output_size_in_bytes,
            "shared": found.alias_size_in_bytes,
            "temporary": found.temp_size_in_bytes,
        }

    def _compile(self, key: Hashable, *args: Any, **kwargs: Any) -> Any:
        if self._store is None:
            return self._make(key, *args, **kwargs)
        path = self._store.path(args, kwargs)
        dynamic = {name: value for name, value in kwargs.items() if name not in self._static}
        found = self._store.load(path, args, dynamic)
        if found is not None:
            program, self.reports[key] = found
            return program
        with fresh_compilation():
            program = self._make(key, *args, **kwargs)
        self._store.save(path, program, self.reports[key])
        return program

    def _make(self, key: Hashable, *args: Any, **kwargs: Any) -> Any:
        traced = self._jitted.trace(*args, **kwargs)
        compiled = traced.lower().compile()
        if self.audited:
            started = time.perf_counter()
            self.reports[key] = audit_compiled(traced, compiled)
            self.audit_seconds += time.perf_counter() - started
        return compiled
