"""Runs the invariance battery on an engine and says what was found in a certificate."""

from __future__ import annotations

import dataclasses
import datetime
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from . import flags, versions
from .battery import (
    Check,
    Request,
    battery_requests,
    battery_ways,
    check_scoring,
    check_way,
    digest_of,
)
from .certificate import FORMAT, Certificate, verdict_of
from .engine import Engine
from .request import RequestOutput, SamplingParams
from .stock_ops import stock_ops
from .testing.schedule import run_together

SAMPLE_PROMPT = "What is the capital of France?"

Note = Callable[[str], None]


def certify(
    engine: Engine,
    *,
    tokens: int = 16,
    filters: bool = True,
    control: bool = True,
    note: Note = lambda text: None,
) -> Certificate:
    """Computes one set of requests in many ways on this device and compares all bits.

    Args:
      engine: an idle engine; its programs and weights are used as they are.
      tokens: new tokens of each completion.
      filters: also sample with top-p, which takes further step programs to compile.
      control: also run the model with stock XLA ops, which must give other bits: shows that the
        battery could have seen a change of order.
      note: told what goes on, a line at a time.

    Returns:
      The certificate, whatever the verdict. Certificates of one set-up are equal but for times.

    Raises:
      ValueError: requests are running, or the context is too small.
    """
    if engine.has_unfinished_requests:
        raise ValueError("an engine is certified while it is idle")
    started = time.perf_counter()
    requests = battery_requests(engine, tokens=tokens, filters=filters)
    note("compiling, auditing and computing the battery together")
    engine.runner.buckets_used = set()
    expected = run_together(engine, requests)
    checks = _run_checks(engine, requests, expected, note)
    found = _control(engine, requests, expected, note) if control else None
    listed = [_plain(check) for check in checks]
    data = {
        "format": FORMAT,
        "verdict": verdict_of(listed, found),
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - started, 1),
        "model": engine.model_name or engine.model_config.family,
        "identity": engine.identity.to_dict(),
        "machine": _machine(),
        "settings": _plain(engine.config),
        "flags": [_plain(state) for state in flags.verify()],
        "audited": engine.audited,
        "programs": _programs(engine),
        "battery": {
            "requests": [_request(prompt, params) for prompt, params in requests],
            "values": sum(2 * len(c.token_ids) for out in expected for c in out.outputs),
            "digest": digest_of(expected),
            "checks": listed,
        },
        "control": found,
        "sample": _sample(engine),
    }
    return Certificate(data=data)


def _run_checks(
    engine: Engine, requests: Sequence[Request], expected: list[RequestOutput], note: Note
) -> list[Check]:
    checks = []
    planned = list(battery_ways(engine, requests))
    for index, (promise, way) in enumerate(planned):
        note(f"[{index + 1}/{len(planned) + 1}] {way.name}")
        checks.append(check_way(engine, expected, promise, way))
        note(f"      {checks[-1].verdict} {checks[-1].detail}".rstrip())
    note(f"[{len(planned) + 1}/{len(planned) + 1}] scored as part of a prompt")
    checks.append(check_scoring(engine, requests, expected))
    note(f"      {checks[-1].verdict} {checks[-1].detail}".rstrip())
    return checks


def _control(
    engine: Engine, requests: Sequence[Request], expected: list[RequestOutput], note: Note
) -> dict[str, Any]:
    """The same model with stock ops: how much of the battery comes out differently."""
    note("control: the same model with stock XLA ops")
    model = nnx.merge(engine.runner._graph, engine.runner.state)
    stock = Engine(model, ops=stock_ops(), config=engine.config)
    together = run_together(stock, requests)
    alone = [run_together(stock, [request])[0] for request in requests]
    pairs = list(_completions(expected, together))
    found = {
        "name": "the same model with stock XLA ops",
        "completions": len(pairs),
        "differ": sum(a.bits() != b.bits() for a, b in pairs),
        "differ_alone": sum(a.bits() != b.bits() for a, b in _completions(together, alone)),
    }
    note(
        f"      {found['differ']} of {found['completions']} completions have other bits than ours; "
        f"{found['differ_alone']} change bits with their company"
    )
    return found


def _completions(a: Sequence[RequestOutput], b: Sequence[RequestOutput]) -> Any:
    for first, second in zip(a, b, strict=True):
        yield from zip(first.outputs, second.outputs, strict=True)


def _sample(engine: Engine) -> dict[str, Any] | None:
    """A short text, so that a reader sees that the model works."""
    if engine.tokenizer is None:
        return None
    room = engine.max_model_len // 4
    prompt: Any = SAMPLE_PROMPT
    if engine.tokenizer.chat_templates:
        prompt = engine.tokenizer.apply_chat_template([{"role": "user", "content": SAMPLE_PROMPT}])
    params = SamplingParams(temperature=0.0, max_tokens=min(24, room), seed=0)
    output = engine.generate(prompt, params)[0]
    return {"prompt": SAMPLE_PROMPT, "text": output.outputs[0].text}


def _machine() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "chip": versions.chip_name(device),
        "platform": device.platform,
        "devices": len(jax.devices()),
        "driver": versions.driver_version(),
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _programs(engine: Engine) -> list[dict[str, Any]]:
    names = ("tokens", "logit_rows", "top_tokens", "filters", "steps")
    reports = engine.runner.step_program.reports
    return [
        {
            **dict(zip(names, key, strict=True)),
            "audit": reports[key].to_dict() if key in reports else None,
        }
        for key in sorted(engine.runner.programs)
    ]


def _request(prompt: Sequence[int], params: SamplingParams) -> dict[str, Any]:
    fields = ("temperature", "top_p", "n", "seed", "max_tokens")
    return {"prompt_tokens": len(prompt), **{name: getattr(params, name) for name in fields}}


def _plain(value: Any) -> dict[str, Any]:
    fields = dataclasses.asdict(value)
    return {k: _item(v) for k, v in fields.items()}


def _item(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, float):
        return round(value, 2)
    return value.item() if isinstance(value, np.generic) else value
