"""The check behind `generate.py --check`: the same prompts in other company, bits compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .engine import Engine, Prompt
from .request import RequestOutput, SamplingParams

STRANGER_SEED = 20_061


@dataclass(frozen=True, kw_only=True)
class CheckRun:
    """One arrangement of the prompts and the first difference it showed, if any."""

    name: str
    row_buckets: tuple[int, ...]
    difference: str | None


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What the check did and found."""

    completions: int
    tokens: int
    runs: tuple[CheckRun, ...]

    @property
    def passed(self) -> bool:
        return all(run.difference is None for run in self.runs)

    @property
    def row_buckets(self) -> tuple[int, ...]:
        return tuple(sorted({bucket for run in self.runs for bucket in run.row_buckets}))

    def lines(self) -> list[str]:
        """The report for a person."""
        out = []
        for run in self.runs:
            buckets = ", ".join(map(str, run.row_buckets))
            verdict = "same bits" if run.difference is None else f"DIFFERENT: {run.difference}"
            out.append(f"  {run.name} (row buckets {buckets}): {verdict}")
        what = f"{self.completions} completions, {self.tokens} tokens and log-probabilities"
        if len(self.row_buckets) < 2:
            out.append(
                f"INCONCLUSIVE: {what}, but only the row bucket {self.row_buckets} was used; "
                "two are needed"
            )
        elif self.passed:
            out.append(f"PASSED: {what} are equal to the bit in every arrangement.")
        else:
            out.append(f"FAILED: {what} were compared and not all are equal.")
        return out


def first_difference(expected: RequestOutput, got: RequestOutput) -> str | None:
    """Where two outputs of one request differ first, or None."""
    for a, b in zip(expected.outputs, got.outputs, strict=True):
        for place in range(max(len(a.token_ids), len(b.token_ids))):
            if place >= len(a.token_ids) or place >= len(b.token_ids):
                return f"completion {a.index} has {len(a.token_ids)} and {len(b.token_ids)} tokens"
            if a.token_ids[place] != b.token_ids[place]:
                return (
                    f"completion {a.index}, token {place}: {a.token_ids[place]} and "
                    f"{b.token_ids[place]}"
                )
            x, y = (np.float32(c.logprobs[place]) for c in (a, b))
            if x.tobytes() != y.tobytes():
                return (
                    f"completion {a.index}, log-probability {place}: {x} "
                    f"(0x{x.view(np.uint32):08x}) and {y} (0x{y.view(np.uint32):08x})"
                )
    return None


def check_invariance(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    expected: Sequence[RequestOutput],
    *,
    note: Callable[[str], None] = lambda text: None,
) -> CheckReport:
    """Generates the prompts again alone, in reversed order and among strangers.

    Args:
      engine: the engine that made `expected`.
      prompts, params: what it was asked.
      expected: what it answered; gives the seeds.
      note: told the name of each arrangement before it runs.
    """
    seeded = [replace(p, seed=out.outputs[0].seed) for p, out in zip(params, expected, strict=True)]
    runs = []

    def arrangement(name: str, run: Callable[[], list[RequestOutput]]) -> None:
        note(name)
        engine.runner.buckets_used.clear()
        got = run()
        differences = (first_difference(e, g) for e, g in zip(expected, got, strict=True))
        numbered = (f"prompt {i}, {d}" for i, d in enumerate(differences) if d is not None)
        runs.append(
            CheckRun(
                name=name,
                row_buckets=tuple(sorted(engine.runner.buckets_used)),
                difference=next(numbered, None),
            )
        )

    def alone() -> list[RequestOutput]:
        return [engine.generate([p], [s])[0] for p, s in zip(prompts, seeded, strict=True)]

    def reversed_order() -> list[RequestOutput]:
        return engine.generate(list(prompts)[::-1], seeded[::-1])[::-1]

    def among_strangers() -> list[RequestOutput]:
        strangers, theirs = _strangers(engine, seeded)
        out = engine.generate([*strangers, *prompts], [*theirs, *seeded])
        return out[len(strangers) :]

    arrangement("each alone", alone)
    arrangement("in reversed order", reversed_order)
    arrangement("among strangers", among_strangers)
    tokens = sum(len(c.token_ids) for out in expected for c in out.outputs)
    completions = sum(len(out.outputs) for out in expected)
    return CheckReport(completions=completions, tokens=tokens, runs=tuple(runs))


def _strangers(
    engine: Engine, params: Sequence[SamplingParams]
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Random prompts of many lengths, enough that steps need more than the smallest buckets."""
    rng = np.random.default_rng(STRANGER_SEED)
    longest = min(2 * engine.config.max_num_seqs + 1, engine.max_model_len - 1)
    lengths = [max(1, int(longest * part)) for part in (1.0, 0.3, 0.05)]
    prompts = [rng.integers(0, engine.model_config.vocab_size, n).tolist() for n in lengths]
    budget = max(p.max_tokens for p in params)
    return prompts, [
        SamplingParams(temperature=1.0, seed=i, max_tokens=max(1, budget // 2), ignore_eos=True)
        for i in range(len(prompts))
    ]
