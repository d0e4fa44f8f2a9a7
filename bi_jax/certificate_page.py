"""A certificate as one HTML page that a person understands within a minute."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from .battery import PASSED
from .certificate import Certificate

PROMISES = {
    "repeat": "Computed again",
    "batch": "In other company",
    "schedule": "Scheduled differently",
    "scoring": "Scored instead of generated",
}

HEADLINES = {
    "passed": ("Passed", "every token and log-probability had the same bits"),
    "failed": ("Failed", "some tokens or log-probabilities changed their bits"),
    "inconclusive": ("Inconclusive", "no bits changed, but this run could hardly have shown it"),
}

STYLE = """
:root { color-scheme: light dark; --line: #d5d9de; --soft: #59636e; --good: #1a7f37;
  --bad: #cf222e; --unsure: #9a6700; --back: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --line: #3d444d; --soft: #9198a1; --good: #3fb950;
  --bad: #f85149; --unsure: #d29922; --back: #151b23; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 1.5rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.1rem; font-weight: 600; color: var(--soft); margin: 0 0 .5rem; }
h2 { font-size: 1.05rem; margin: 1.6rem 0 .5rem; }
.verdict { border: 2px solid; border-radius: 8px; padding: .8rem 1.1rem; }
.verdict b { font-size: 1.6rem; display: block; line-height: 1.2; }
.passed, .same { color: var(--good); } .failed, .other { color: var(--bad); }
.inconclusive { color: var(--unsure); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr));
  gap: .6rem 1.4rem; margin: .9rem 0; }
.facts div span { display: block; color: var(--soft); font-size: .82rem; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); gap: 1rem; }
.two > div { background: var(--back); border: 1px solid var(--line); border-radius: 8px;
  padding: .3rem 1.1rem .5rem; }
.two h2 { margin-top: .5rem; } ul { margin: .3rem 0; padding-left: 1.1rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: .22rem .8rem .22rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: break-word; } th { color: var(--soft); font-weight: 500; }
.same, .tight { white-space: nowrap; }
code { font: .88em ui-monospace, monospace; overflow-wrap: anywhere; }
.note { color: var(--soft); } details { margin: .5rem 0; } summary { cursor: pointer; }
"""


def page(certificate: Certificate, *, json_name: str = "certificate.json") -> str:
    """The page, complete in itself.

    Args:
      certificate: what to show.
      json_name: name of the file with the data, for the command that checks it.
    """
    data = certificate.data
    verdict, outcome = HEADLINES[certificate.verdict]
    battery = data["battery"]
    sentence = (
        f"The same {len(battery['requests'])} requests were computed on this machine together, and "
        f"then in {len(battery['checks'])} other ways: {outcome}"
    )
    parts = [
        "<h1>Batch-invariance certificate</h1>",
        f'<div class="verdict {certificate.verdict}"><b>{verdict}</b>{sentence}.</div>',
        _facts(certificate),
        '<div class="two">',
        f"<div><h2>What this says</h2>{_list(_says(data))}</div>",
        f"<div><h2>What it does not say</h2>{_list(_does_not_say(data))}</div>",
        "</div>",
        "<h2>The ways in which the same requests were computed</h2>",
        _checks(data["battery"]["checks"]),
        _control(data["control"]),
        "<h2>What ran</h2>",
        _programs(data),
        _details("Order of additions of every op", _table(_items(data["identity"]["ops"]))),
        _details("Compiler options and variables", _flags(data["flags"])),
        _details("Everything in the identity", _identity(data)),
        _details("Machine and settings", _table([*_items(data["machine"]), *_settings(data)])),
        _sample(data["sample"]),
        "<h2>Check it again</h2>",
        f"<p><code>python scripts/certify.py --verify {escape(json_name)}</code> runs the battery "
        "again and compares identity and digest. Equal digests mean equal bits on this battery, "
        "and no more than that.</p>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{verdict}: batch-invariance certificate of {escape(str(data['model']))}</title>"
        f"<style>{STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _facts(certificate: Certificate) -> str:
    data = certificate.data
    facts = [
        ("Model", _name(data["model"])),
        ("Chip", data["machine"]["chip"]),
        ("Made", f"{data['made'].replace('T', ' ').removesuffix('+00:00')} UTC"),
        ("Identity", f"<code>{data['identity']['short']}</code>"),
        ("Digest of all bits", f"<code>{certificate.digest[:16]}</code>"),
    ]
    cells = (
        f"<div><span>{name}</span>{value if '<' in value else escape(value)}</div>"
        for name, value in facts
    )
    return f'<div class="facts">{"".join(cells)}</div>'


def _says(data: Any) -> list[str]:
    checks, programs = data["battery"]["checks"], data["programs"]
    same = sum(check["verdict"] == PASSED for check in checks)
    compared = sum(check["values"] for check in checks)
    says = [
        f"{same} of {len(checks)} ways gave the same bits as the first run: {compared} token ids "
        "and log-probabilities, compared byte by byte, without tolerance or retries.",
    ]
    if data["audited"]:
        says.append(
            f"All {len(programs)} compiled step programs were audited before they ran: outside "
            "ops with a fixed order of additions they compute nothing in floating point."
        )
    if data["control"]:
        says.append(
            f"The battery can tell: the same model with stock XLA ops gives other bits in "
            f"{data['control']['differ']} of {data['control']['completions']} completions."
        )
    says.append("Any run whose certificate has this identity and this digest had the same bits.")
    return says


def _does_not_say(data: Any) -> list[str]:
    lines = [
        "Nothing about another chip, library version, model, flag or topology: their identity is "
        "another one.",
        "Not that the model's answers are right or good.",
        "Not that every request was tried: these were "
        f"{len(data['battery']['requests'])} requests of up to "
        f"{max(r['prompt_tokens'] for r in data['battery']['requests'])} prompt tokens.",
        "Nothing about other programs in your process, such as your own training step.",
    ]
    if not data["audited"]:
        lines.insert(0, "<b>The compiled programs were not audited.</b>")
    if not data["control"]:
        lines.append("Not that the battery could have seen a fault: the control was not run.")
    return lines


def _checks(checks: Sequence[Any]) -> str:
    rows = []
    for promise, title in PROMISES.items():
        for check in (check for check in checks if check["promise"] == promise):
            good = check["verdict"] == PASSED
            steps = ", ".join(map(str, check["programs"]))
            detail = f"<br><code>{escape(check['detail'])}</code>" if check["detail"] else ""
            rows.append(
                f'<tr><td class="tight">{title}</td><td>{escape(check["name"])}{detail}</td>'
                f'<td class="{"same" if good else "other"}">{escape(check["verdict"])}</td>'
                f"<td>{check['values']}</td><td>{steps}</td></tr>"
            )
            title = ""
    head = "<tr><th>Promise</th><th>Way</th><th>Result</th><th>Values</th><th>Step sizes</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _control(control: Any) -> str:
    if not control:
        return ""
    return (
        f'<p class="note">For comparison, {escape(control["name"])}: '
        f"{control['differ_alone']} of its {control['completions']} completions change their own "
        "bits when a request runs alone instead of together with the others.</p>"
    )


def _programs(data: Any) -> str:
    rows = []
    for program in data["programs"]:
        report = program["audit"]
        verdict, ours = "not audited", ""
        if report:
            verdict = "passed" if report["passed"] else f"{len(report['findings'])} findings"
            calls = [(name.removeprefix("bi_"), count) for name, count in report["ours"].items()]
            ours = ", ".join(f"{count} {name}" for name, count in calls)
            if report["kernels"]:
                kernels = [f"{count} {name}" for name, count in report["kernels"].items()]
                ours += f"; custom calls: {', '.join(kernels)}"
        rows.append(
            f'<tr><td class="tight">{program["tokens"]} tokens, {program["logit_rows"]} scored'
            f"{_times(program['steps'])}</td>"
            f'<td class="tight">{verdict}</td><td>{escape(ours)}</td></tr>'
        )
    head = "<tr><th>Step program</th><th>Audit</th><th>Our ops in it</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _times(steps: int) -> str:
    return f", {steps} times" if steps > 1 else ""


def _flags(states: Sequence[Any]) -> str:
    rows = [
        (
            state["name"],
            f"{state['in_force'] if state['in_force'] is not None else 'not set'}, in "
            f"{state['where']}: {state['reason']}",
        )
        for state in states
    ]
    return _table(rows)


def _identity(data: Any) -> str:
    identity = data["identity"]
    rows = [(name, value) for name, value in identity.items() if not isinstance(value, dict)]
    rows += _items(identity["versions"])
    return _table(rows)


def _settings(data: Any) -> Iterable[tuple[str, Any]]:
    return ((f"setting {name}", value) for name, value in data["settings"].items())


def _sample(sample: Any) -> str:
    if not sample:
        return ""
    return (
        f'<p class="note">The model says: <q>{escape(sample["prompt"])}</q> '
        f"<q>{escape(sample['text'].strip())}</q></p>"
    )


def _name(model: Any) -> str:
    return str(model).rstrip("/").rpartition("/")[2]


def _items(mapping: Any) -> list[tuple[str, Any]]:
    return list(mapping.items())


def _table(rows: Iterable[tuple[str, Any]]) -> str:
    cells = (f"<tr><th>{escape(str(k))}</th><td>{escape(str(v))}</td></tr>" for k, v in rows)
    return f"<table>{''.join(cells)}</table>"


def _details(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>{body}</details>"


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>"
