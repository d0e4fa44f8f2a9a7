"""The audit: does a program compute floats anywhere but in our ops?"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import bi_jax.models
import bi_jax.pallas_kernels

from . import flags
from .audit_hlo import HloAudit
from .audit_jaxpr import JaxprAudit
from .audit_report import AuditError, AuditReport, Finding

TRUSTED = ("bi_jax",)

__all__ = ["AuditError", "AuditReport", "Finding", "audit", "audit_compiled", "inspect"]


def audit(
    fn: Callable[..., Any],
    *args: Any,
    allow: Mapping[str, str] | None = None,
    trusted: Sequence[str] = (),
    compiled: bool = True,
    **kwargs: Any,
) -> AuditReport:
    """Raises unless every float operation of `fn` is ours, exact or allowed.

    Looks at the jaxpr, through jit, loops, branches, custom derivatives, remat and shard_map, and
    at the optimised program. Pass a differentiated function to audit its derivative.

    Args:
      fn: jitted, or not: then it is jitted with our compiler options.
      *args, **kwargs: its arguments, arrays or ShapeDtypeStructs.
      allow: JAX primitive to the reason why it cannot change a bit here.
      trusted: further packages whose `define_op` ops count as yours.
      compiled: whether to compile it and audit the optimised program too.

    Returns:
      How each operation was classified.

    Raises:
      AuditError: with every finding: operation, shape, source line, reason.
    """
    report = inspect(fn, *args, allow=allow, trusted=trusted, compiled=compiled, **kwargs)
    if report.findings:
        raise AuditError(report)
    return report


def inspect(
    fn: Callable[..., Any],
    *args: Any,
    allow: Mapping[str, str] | None = None,
    trusted: Sequence[str] = (),
    compiled: bool = True,
    **kwargs: Any,
) -> AuditReport:
    """As `audit`, but returns the report whatever it says."""
    if not hasattr(fn, "trace"):
        fn = jax.jit(fn, compiler_options=flags.compiler_options(jax.default_backend()))
    try:
        traced = fn.trace(*args, **kwargs)  # type: ignore[attr-defined]
    except NotImplementedError as error:
        if "under vmap is refused" not in str(error):
            raise
        name = getattr(fn, "__name__", "function")
        return AuditReport(
            name=name, platform=jax.default_backend(), findings=(_vmap_finding(error),)
        )
    text = traced.lower().compile().as_text() if compiled else None
    return _report(traced, text, allow or {}, trusted)


def audit_compiled(
    traced: Any,
    compiled: Any,
    *,
    allow: Mapping[str, str] | None = None,
    trusted: Sequence[str] = (),
) -> AuditReport:
    """Audits a program that is compiled anyway, so that it costs no second compilation.

    Args:
      traced: `jitted.trace(...)`.
      compiled: `traced.lower().compile()`.
      allow, trusted: as in `audit`.

    Raises:
      AuditError: as `audit`.
    """
    report = _report(traced, compiled.as_text(), allow or {}, trusted)
    if report.findings:
        raise AuditError(report)
    return report


def _report(
    traced: Any, text: str | None, allow: Mapping[str, str], trusted: Sequence[str]
) -> AuditReport:
    program = JaxprAudit(allow, (*TRUSTED, *trusted))
    program.visit(traced.jaxpr)
    optimised = None if text is None else HloAudit(text, program.ours, allow, program.kernels)
    findings = list(program.findings)
    if optimised is not None:
        # What the jaxpr shows is not shown again: its findings say the same more plainly.
        known = {_line(finding) for finding in findings}
        findings += [f for f in optimised.findings if _line(f) not in known]
    return AuditReport(
        name=traced.fun_name,
        platform=jax.default_backend(),
        ours=dict(sorted(program.ours.items())),
        exact=dict(sorted(program.exact.items())),
        allowed={name: (count, allow[name]) for name, count in program.allowed.items()},
        integer=program.integer,
        instructions=len(optimised.instructions) if optimised else 0,
        ours_compiled=optimised.ours if optimised else 0,
        kernels=dict(sorted(optimised.kernels.items())) if optimised else {},
        collectives=dict(sorted(optimised.collectives.items())) if optimised else {},
        findings=tuple(findings),
    )


def _line(finding: Finding) -> str:
    match = re.match(r"(.*?:\d+)", finding.where)
    return match.group(1) if match else finding.where


def _vmap_finding(error: Exception) -> Finding:
    frames = traceback.extract_tb(error.__traceback__)
    hidden = [
        str(Path(str(p.__file__)).parent) for p in (jax, bi_jax.models, bi_jax.pallas_kernels)
    ]
    hidden.append(str(Path(__file__)))
    users = [f for f in frames if not f.filename.startswith(tuple(hidden))]
    last = users[-1] if users else frames[-1]
    return Finding(
        kind="vmap",
        operation=str(error).split(" ")[0],
        shape="unknown",
        where=f"{last.filename}:{last.lineno} ({last.name})",
        level="jaxpr",
        detail="(vmap of one of our ops)",
    )
