"""A certificate: what was run, on what, and what came out, as plain data."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .battery import FAILED, PASSED
from .identity import Identity, diff

FORMAT = 1
# What may differ between two certificates of one set-up.
VOLATILE = ("made", "seconds")


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The data of one certificate; see `docs/audit.md` for its fields."""

    data: Mapping[str, Any]

    @property
    def verdict(self) -> str:
        """ "passed", "failed" or "inconclusive"."""
        return self.data["verdict"]

    @property
    def digest(self) -> str:
        """Of all bits of the battery."""
        return self.data["battery"]["digest"]

    @property
    def identity(self) -> Identity:
        return Identity.from_dict(self.data["identity"])

    def stable(self) -> dict[str, Any]:
        """The data without time stamps and durations: equal for equal set-ups."""
        return _without(copy.deepcopy(dict(self.data)), VOLATILE)

    def to_json(self) -> str:
        return json.dumps(self.data, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, path: str | Path) -> Certificate:
        """A certificate from a JSON file.

        Raises:
          ValueError: the file is no certificate, one of another format, or damaged.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"{path} is not a certificate of format {FORMAT}")
        found = cls(data=data)
        try:
            found.identity  # noqa: B018 - reads all of it
            whole = isinstance(found.verdict, str) and isinstance(found.digest, str)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the certificate {path} is damaged: {error}") from None
        if not whole:
            raise ValueError(f"the certificate {path} is damaged: verdict and digest must be texts")
        return found


def verdict_of(checks: list[dict[str, Any]], control: Mapping[str, Any] | None) -> str:
    """ "failed" if any check is; "passed" if all are and the battery was seen to have power."""
    if any(check["verdict"] == FAILED for check in checks):
        return "failed"
    blind = control is not None and control["differ"] == 0
    programs = {bucket for check in checks for bucket in check["programs"]}
    if blind or len(programs) < 2 or any(check["verdict"] != PASSED for check in checks):
        return "inconclusive"
    return "passed"


def differences(old: Certificate, new: Certificate) -> list[str]:
    """What differs between two certificates, most important first, time stamps left out."""
    found = [
        f"identity, {name}: was {a}, is {b}" for name, (a, b) in diff(
            old.identity, new.identity
        ).items()
    ]  # fmt: skip
    if old.digest != new.digest:
        found.append(f"bits of the battery: digest was {old.digest}, is {new.digest}")
    a, b = old.stable(), new.stable()
    for key in sorted({*a, *b} - {"identity"}):
        if a.get(key) != b.get(key) and not (key == "battery" and found):
            found.append(f"{key}: {_first_change(a.get(key), b.get(key))}")
    return found


def _first_change(a: Any, b: Any, path: str = "") -> str:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted({*a, *b}):
            if a.get(key) != b.get(key):
                return _first_change(a.get(key), b.get(key), f"{path}.{key}")
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            if x != y:
                return _first_change(x, y, f"{path}[{i}]")
    return f"{path.lstrip('.')} was {_cut(a)}, is {_cut(b)}".strip()


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _without(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {k: _without(v, names) for k, v in value.items() if k not in names}
    if isinstance(value, list):
        return [_without(v, names) for v in value]
    return value
