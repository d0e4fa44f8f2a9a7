"""Classifies every operation of a jaxpr: ours, exact, allowed, or a finding.

Ours are the primitives that `define_op` made, told by identity: a name scope or a primitive that
borrows a name counts for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax._src import source_info_util

from bi_jax.pallas_kernels.primitive import BLOCKS, REFERENCE, defining_modules, is_marked

from . import audit_rules as rules
from .audit_report import Finding


class JaxprAudit:
    """Counts and findings of one jaxpr and all programs in it.

    Args:
      allow: primitive name to the reason why the caller allows it.
      trusted: packages whose marked ops count as ours.
    """

    def __init__(self, allow: Mapping[str, str], trusted: Sequence[str]) -> None:
        self.allow = allow
        self.trusted = tuple(trusted)
        self.ours: Counter[str] = Counter()
        self.exact: Counter[str] = Counter()
        self.allowed: Counter[str] = Counter()
        self._backends: dict[str, set[str]] = {}
        self.integer = 0
        self._path: list[Any] = []
        self.findings: list[Finding] = []

    @property
    def kernels(self) -> frozenset[str]:
        """The ops of ours that are kernels in every call: XLA sees nothing of their work."""
        bodies = {REFERENCE, BLOCKS}
        return frozenset(op for op, names in self._backends.items() if names.isdisjoint(bodies))

    def visit(self, jaxpr: Any) -> None:
        """Classifies every equation of a jaxpr, those of inner programs included."""
        made_by = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
        for eqn in jaxpr.eqns:
            self._path.append(eqn)
            self._equation(eqn, made_by)
            self._path.pop()

    def _equation(self, eqn: Any, made_by: Mapping[Any, Any]) -> None:
        name = eqn.primitive.name
        if is_marked(eqn.primitive):
            self._marked(eqn)
        elif name in rules.FOREIGN_PRIMITIVES:
            self._refuse(eqn, rules.FOREIGN_PRIMITIVES[name])
        elif name in rules.CONTROL_PRIMITIVES:
            for inner in programs_in(eqn):
                self.visit(inner)
        elif not _touches_floats(eqn):
            self.integer += 1
            for inner in programs_in(eqn):
                self.visit(inner)
        elif name in rules.KEY_PRIMITIVES:
            self.integer += 1
        elif name in self.allow:
            self.allowed[name] += 1
        elif name in rules.EXACT_PRIMITIVES or _adds_cotangents(eqn):
            self.exact[name] += 1
        elif name == "scatter":
            self._scatter(eqn)
        elif name == "sort":
            self._sort(eqn)
        elif name == "convert_element_type":
            self._convert(eqn, made_by)
        elif name.startswith("debug_"):
            self.exact[name] += 1
        else:
            self._refuse(eqn, rules.FORBIDDEN_PRIMITIVES.get(name, "unknown"))

    def _marked(self, eqn: Any) -> None:
        modules = defining_modules(eqn.primitive)
        strangers = [m for m in modules if not _inside(m, self.trusted)]
        if strangers:
            detail = f"(a marked op of {', '.join(strangers)}, which is not among the trusted)"
            self._refuse(eqn, "kernel", detail)
        else:
            self.ours[eqn.primitive.name] += 1
            self._backends.setdefault(eqn.primitive.name, set()).add(eqn.params["backend"])

    def _scatter(self, eqn: Any) -> None:
        if eqn.params.get("unique_indices"):
            self.exact["scatter"] += 1
        else:
            self._refuse(eqn, "scatter", "(it does not state unique_indices=True)")

    def _sort(self, eqn: Any) -> None:
        if eqn.params["is_stable"] or len(eqn.invars) == 1:
            self.exact["sort"] += 1
        else:
            self._refuse(eqn, "unknown", "(it does not state is_stable=True)")

    def _convert(self, eqn: Any, made_by: Mapping[Any, Any]) -> None:
        """Widening is exact; narrowing is, if the rounding before it cannot be dropped."""
        source = eqn.invars[0].aval.dtype
        target = eqn.outvars[0].aval.dtype
        both = jnp.issubdtype(source, jnp.floating) and jnp.issubdtype(target, jnp.floating)
        if both and not _holds(target, source) and not _rounded_before(eqn, target, made_by):
            self._refuse(eqn, "convert", f"(from {source}, without reduce_precision)")
        else:
            self.exact["convert_element_type"] += 1

    def _where(self) -> str:
        """The line of the equation, or of the call around it, as for what library code does."""
        lines = (source_line(eqn) for eqn in reversed(self._path))
        return next(filter(None, lines), "a line that JAX did not record")

    def _refuse(self, eqn: Any, kind: str, detail: str = "") -> None:
        self.findings.append(
            Finding(
                kind=kind,
                operation=eqn.primitive.name,
                shape=", ".join(_shape(v.aval) for v in eqn.outvars) or "nothing",
                where=self._where(),
                level="jaxpr",
                detail=detail,
            )
        )


def programs_in(eqn: Any) -> Iterator[Any]:
    """The jaxprs among an equation's parameters."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns"):
                yield item


def source_line(eqn: Any) -> str:
    """File, line and function of the user's frame that made an equation."""
    return source_info_util.summarize(eqn.source_info)


def _inside(module: str, packages: Sequence[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def _adds_cotangents(eqn: Any) -> bool:
    name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
    return name == rules.COTANGENT_SUM and dtype.itemsize >= 4


def _touches_floats(eqn: Any) -> bool:
    return any(_is_float(v.aval) for v in (*eqn.invars, *eqn.outvars))


def _is_float(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _shape(aval: Any) -> str:
    if not hasattr(aval, "shape"):
        return str(aval)
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _holds(wide: Any, narrow: Any) -> bool:
    """Whether every value of `narrow` is one of `wide`."""
    w, n = jnp.finfo(wide), jnp.finfo(narrow)
    return w.nmant >= n.nmant and w.nexp >= n.nexp


def _rounded_before(eqn: Any, target: Any, made_by: Mapping[Any, Any]) -> bool:
    """Whether the operand was rounded to `target`'s precision by a reduce_precision."""
    try:
        before = made_by.get(eqn.invars[0])
    except TypeError:  # a literal
        return False
    if before is None or before.primitive.name != "reduce_precision":
        return False
    info = jnp.finfo(target)
    params = before.params
    return params["exponent_bits"] <= info.nexp and params["mantissa_bits"] <= info.nmant
