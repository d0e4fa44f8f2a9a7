"""What an audit found, as plain data and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .audit_rules import REASONS


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One operation that breaks the rules.

    Attributes:
      kind: a key of `audit_rules.REASONS`.
      operation: the JAX primitive or HLO instruction.
      shape: dtype and shape of what it computes.
      where: source line as far as it is known.
      level: "jaxpr" or "optimised program".
      detail: what else helps to find it.
    """

    kind: str
    operation: str
    shape: str
    where: str
    level: str
    detail: str = ""

    def __str__(self) -> str:
        text = f"{self.operation} -> {self.shape} at {self.where} [{self.kind}, {self.level}]"
        return f"{text} {self.detail}".rstrip() + f"\n      {REASONS[self.kind]}"


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """How every operation of a program was classified.

    Attributes:
      name: of the function.
      platform: that it was compiled for.
      ours: marked op to the number of its calls in the jaxpr.
      exact: JAX primitive on floats to its number, all on the list of exact ones.
      allowed: what the caller allowed, to (number, reason).
      integer: number of operations on integers and booleans alone.
      instructions: of the optimised program; 0 where it was not looked at.
      ours_compiled: instructions inside our ops.
      kernels: custom call to its number, inside our ops.
      collectives: data-moving collective to its number.
      findings: what breaks the rules.
    """

    name: str
    platform: str
    ours: Mapping[str, int] = field(default_factory=dict)
    exact: Mapping[str, int] = field(default_factory=dict)
    allowed: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    integer: int = 0
    instructions: int = 0
    ours_compiled: int = 0
    kernels: Mapping[str, int] = field(default_factory=dict)
    collectives: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "name": self.name,
            "platform": self.platform,
            "passed": self.passed,
            "ours": dict(self.ours),
            "exact": dict(self.exact),
            "allowed": {name: list(value) for name, value in self.allowed.items()},
            "integer": self.integer,
            "instructions": self.instructions,
            "ours_compiled": self.ours_compiled,
            "kernels": dict(self.kernels),
            "collectives": dict(self.collectives),
            "findings": [str(finding) for finding in self.findings],
        }

    def __str__(self) -> str:
        ours = ", ".join(f"{count} x {name}" for name, count in sorted(self.ours.items()))
        lines = [
            f"audit of {self.name} on {self.platform}: "
            + ("passed" if self.passed else f"{len(self.findings)} findings"),
            f"  ours: {ours or 'none'}",
            f"  exact on floats: {sum(self.exact.values())}; integers: {self.integer}; "
            f"optimised instructions: {self.instructions}, {self.ours_compiled} of them ours",
        ]
        if self.kernels:
            kernels = ", ".join(f"{count} x {name}" for name, count in self.kernels.items())
            lines.append(f"  kernels: {kernels}")
        for name, (count, reason) in self.allowed.items():
            lines.append(f"  allowed by the caller: {count} x {name} ({reason})")
        return "\n".join([*lines, *(f"  - {finding}" for finding in self.findings)])


class AuditError(Exception):
    """A program computes floats outside our ops; `report` has all findings."""

    def __init__(self, report: AuditReport) -> None:
        self.report = report
        super().__init__(str(report))
