"""The box in which a chat template runs: what transformers offers to it, and nothing more.

jinja2's immutable sandbox keeps a template from changing what it is given and from attributes that
begin with an underscore; no template can load another one or a file.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import jinja2
from jinja2 import ext, nodes, sandbox, utils


class RefusedByTemplate(jinja2.TemplateError):
    """The template itself called raise_exception."""


class _GenerationTag(ext.Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's words; the text stays as is.

    It is a call block, as in transformers, because that gives its body a scope of its own.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja2's own protocol)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_passed_through"), [], [], body).set_lineno(line)

    def _passed_through(self, caller: Any) -> str:
        return caller()


class _GuardedNamespace(utils.Namespace):
    """jinja2's namespace without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        utils.Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise sandbox.SecurityError(f"a namespace may not hold the name {name!r}")


def _refuse(message: str) -> None:
    raise RefusedByTemplate(message)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter it escapes nothing for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.lru_cache(maxsize=16)
def compile_template(template: str) -> jinja2.Template:
    """A template ready to be rendered.

    Raises: jinja2.TemplateSyntaxError.
    """
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["dict"] = _make_dict
    environment.globals["namespace"] = _GuardedNamespace
    return environment.from_string(template)
