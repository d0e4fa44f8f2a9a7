"""Scores completions again: what a trainer would compute for them, on the host's terms."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from bi_jax.models.transformer import Transformer

from . import flags
from .identity import digest_of_state, identity_of
from .request import CompletionOutput, RequestOutput, SamplingParams
from .trainer_logprobs import default_ops, token_logprobs

SHORTEST = 64  # tokens of the smallest program

Job = tuple[RequestOutput, CompletionOutput]


def score(
    model: Transformer, outputs: Sequence[RequestOutput], *, rows: int = 4
) -> list[list[np.ndarray]]:
    """The log-probabilities of completions' tokens, in each request's own mode and temperature.

    Args:
      model: the model that emitted them.
      outputs: of `Engine.generate`.
      rows: completions scored at a time; schedule.

    Returns:
      For every output and each of its completions float32 [tokens], equal to its `.logprobs`.

    Raises:
      ValueError: a completion was made under another identity, so equal bits are not promised;
        or `model` is no Transformer (an engine has one for itself, laid out for its steps).
      NotImplementedError: logprobs_mode "processed" with a filter.

    Invariance: a completion's scores depend on its own tokens, prompt, mode and temperature.
    """
    if not isinstance(model, Transformer):
        raise ValueError(f"score takes a Transformer, got a {type(model).__name__}")
    own = _identities(model)
    groups: dict[tuple[float, str], list[Job]] = {}
    for output in outputs:
        for completion in output.outputs:
            if completion.identity not in own:
                raise ValueError(
                    f"completion {completion.index} of request {output.request_id!r} has the "
                    f"identity {completion.identity or 'none'}, and this model scores under "
                    f"{own[0]}: equal bits are promised within one identity only"
                )
            groups.setdefault(_mode(output.sampling_params), []).append((output, completion))
    scores: dict[int, np.ndarray] = {}
    for (temperature, mode), jobs in groups.items():
        jobs.sort(key=lambda job: _length(job))
        for start in range(0, len(jobs), rows):
            part = jobs[start : start + rows]
            scores.update(_score_part(model, part, rows, temperature, mode))
    return [[scores[id(completion)] for completion in output.outputs] for output in outputs]


def _identities(model: Transformer) -> tuple[str, str]:
    """Of this model here, from an engine that audits its programs and from one that does not."""
    identity = identity_of(
        model.config,
        default_ops(model.config).description,
        digest_of_state(nnx.state(model), model.config.dtype),
    )
    return identity.short, dataclasses.replace(identity, audited=True).short


def _mode(params: SamplingParams | None) -> tuple[float, str]:
    params = params or SamplingParams()
    if params.greedy or params.logprobs_mode == "raw":
        return 1.0, "raw"
    unfiltered = params.top_p == 1 and params.top_k <= 0 and params.min_p == 0
    mode = "scaled" if unfiltered else params.logprobs_mode
    return params.temperature, mode


def _length(job: Job) -> int:
    return len(job[0].prompt_token_ids) + len(job[1].token_ids)


def _score_part(
    model: Transformer, jobs: Sequence[Job], rows: int, temperature: float, mode: str
) -> dict[int, np.ndarray]:
    longest = max(_length(job) for job in jobs)
    length = max(SHORTEST, 1 << (longest - 1).bit_length())
    tokens, mask = (np.zeros((rows, length), np.int32) for _ in range(2))
    for row, job in enumerate(jobs):
        tokens[row, : _length(job)] = [*job[0].prompt_token_ids, *job[1].token_ids]
        mask[row, : _length(job)] = 1
    graph, state = nnx.split(model)
    out = np.asarray(_program()(graph, state, tokens, mask, temperature, mode))
    return {
        id(job[1]): out[row, len(job[0].prompt_token_ids) : _length(job)]
        for row, job in enumerate(jobs)
    }


@functools.cache
def _program() -> Any:
    def run(
        graph: Any,
        state: nnx.State,
        tokens: jax.Array,
        mask: jax.Array,
        temperature: float,
        mode: str,
    ) -> jax.Array:
        model = nnx.merge(graph, state)
        return token_logprobs(model, tokens, segment_ids=mask, temperature=temperature, mode=mode)

    options = flags.compiler_options(jax.default_backend())
    return jax.jit(run, static_argnums=(0, 4, 5), compiler_options=options)
