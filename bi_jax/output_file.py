"""Completions as JSONL: a line of JSON each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .prompts_file import PromptLine
from .request import CompletionOutput, RequestOutput, TopLogprobs

if TYPE_CHECKING:
    from .engine import Engine


def as_json_lines(
    lines: Sequence[PromptLine], outputs: Sequence[RequestOutput], engine: Engine
) -> str:
    """One line a completion: ids, text, log-probabilities, seed, reason and identity.

    What the identity is made of is in the first line, as "identity_fields".
    """
    records = [
        _record(line, output, completion, engine)
        for line, output in zip(lines, outputs, strict=True)
        for completion in output.outputs
    ]
    if records:
        records[0]["identity_fields"] = engine.identity.to_dict()
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def _record(
    line: PromptLine, output: RequestOutput, completion: CompletionOutput, engine: Engine
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "request_id": output.request_id,
        "index": completion.index,
        "prompt": line.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "logprobs": _floats(completion.logprobs),
        "logprob_bits": [f"{bits:08x}" for bits in completion.logprobs.view(np.uint32)],
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "seed": completion.seed,
        "identity": completion.identity,
        "weights_version": completion.weights_version,
        "model": engine.model_name,
    }
    if completion.top_logprobs is not None:
        record["top_logprobs"] = _top(completion.top_logprobs)
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = _floats(output.prompt_logprobs)
    if output.prompt_top_logprobs is not None:
        record["prompt_top_logprobs"] = _top(output.prompt_top_logprobs)
    return record


def _floats(values: np.ndarray) -> list[float | None]:
    """JSON numbers; what JSON cannot say (NaN, -inf) is null, and `logprob_bits` keeps its bits."""
    return [float(v) if np.isfinite(v) else None for v in values]


def _top(top: TopLogprobs) -> list[list[list[float | int | None]]]:
    return [
        [[int(i), v] for i, v in zip(ids, _floats(values), strict=True)]
        for ids, values in zip(top.token_ids, top.logprobs, strict=True)
    ]
