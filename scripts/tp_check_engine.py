"""Checks of the engine at each tensor-parallel degree: batch and schedule, degrees, scoring."""

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from tp_claims import Claim, Inconclusive, run_claim

from bi_jax import Engine, EngineConfig
from bi_jax.battery import (
    PASSED,
    battery_requests,
    battery_ways,
    check_scoring,
    check_way,
    digest_of,
)
from bi_jax.models import build_transformer, random_params
from bi_jax.models.config import DEFAULT_TOPOLOGY, TP_INVARIANT, RopeConfig, TransformerConfig
from bi_jax.models.families.qwen3 import QWEN3_8B
from bi_jax.testing.schedule import first_difference, run_together

SHORT = 16  # characters of a digest
TOPOLOGIES = (DEFAULT_TOPOLOGY, TP_INVARIANT)

# 38 steps of 16 in the down product, fewer KV heads than ranks, nine query heads for eight ranks,
# and a vocabulary that no number of ranks divides.
SMALL = TransformerConfig(
    family="llama",
    vocab_size=203,
    hidden_size=96,
    intermediate_size=608,
    num_layers=2,
    num_query_heads=9,
    num_kv_heads=3,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4),
    max_position=512,
    dtype="float32",
    param_dtype="float32",
)
# The 8B shape, of as many layers as are asked for.
LARGE = QWEN3_8B.replace(max_position=2048)


# A trainer's model: of these widths, but small enough to differentiate.
TRAINED = dict(
    num_layers=1,
    vocab_size=2048,
    max_position=256,
    bos_token_id=None,
    eos_token_ids=(),
    pad_token_id=None,
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run.

    Attributes:
      config: the model; its topology is set by each check.
      degrees: tensor-parallel degrees, ascending.
      tokens: new tokens of each completion.
      rows: most requests at a time.
      buckets: compiled row counts.
      quick: only some of the ways of the battery.
      topologies: those to check.
    """

    config: TransformerConfig
    degrees: tuple[int, ...]
    tokens: int
    rows: int
    buckets: tuple[int, ...]
    quick: bool
    topologies: tuple[str, ...] = TOPOLOGIES


class Engines:
    """Engines of one model at every degree, one at a time, on the same weights."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._params = random_params(plan.config, 0)
        jax.block_until_ready(self._params)

    def make(self, topology: str, degree: int) -> Engine:
        gc.collect()
        plan = self.plan
        model = build_transformer(plan.config.replace(topology=topology), self._params)
        config = EngineConfig(
            max_num_seqs=plan.rows,
            max_num_batched_tokens=plan.buckets[-1],
            token_buckets=plan.buckets,
            max_model_len=min(plan.config.max_position, 256 + plan.tokens),
            num_pages=plan.rows * -(-(256 + plan.tokens) // 64),
        )
        return Engine(model, config=config, tensor_parallel_size=degree)


def checks(plan: Plan) -> Iterator[Claim]:
    """Every claim on the engine."""
    engines, first = Engines(plan), {}
    for topology in plan.topologies:
        for degree in plan.degrees:
            made: list[Any] = []
            name = f"engine, {topology} topology, {degree} ranks: "
            yield run_claim(
                f"{name}batch- and schedule-invariant, {plan.tokens}-token completions",
                functools.partial(_invariant, engines, topology, degree, made),
            )
            if made:
                first[topology, degree] = made[1]
                yield run_claim(f"{name}scored as emitted", functools.partial(_scored, *made))
    claims = {
        TP_INVARIANT: "one digest at all degrees",
        DEFAULT_TOPOLOGY: "control: the degree changes bits",
    }
    for topology in plan.topologies:
        claim = claims[topology]
        outputs = {degree: first.get((topology, degree)) for degree in plan.degrees}
        check: Callable[..., str] = _one_digest if topology == TP_INVARIANT else _other_digests
        yield run_claim(f"engine, {topology} topology: {claim}", functools.partial(check, outputs))


def _requests(engine: Engine, plan: Plan) -> list[Any]:
    return battery_requests(engine, tokens=plan.tokens, filters=False)


def _invariant(engines: Engines, topology: str, degree: int, made: list[Any]) -> str:
    plan = engines.plan
    engine = engines.make(topology, degree)
    requests = _requests(engine, plan)
    expected = run_together(engine, requests)
    made += [engine, expected]
    every = list(battery_ways(engine, requests))
    wanted = ("each alone", "in reversed order", "among strangers", "prompts in chunks")
    some = [(p, w) for p, w in every if w.name.startswith(wanted)] if plan.quick else every
    for promise, way in some:
        found = check_way(engine, expected, promise, way)
        assert found.verdict == PASSED, f"{way.name}: {found.detail}"
    return f"{len(some)} ways, digest {digest_of(expected)[:SHORT]}"


def _scored(engine: Engine, expected: list[Any]) -> str:
    found = check_scoring(engine, _requests_of(expected), expected)
    assert found.verdict == PASSED, found.detail
    return f"{found.values} log-probabilities"


def _requests_of(outputs: Sequence[Any]) -> list[Any]:
    return [(list(out.prompt_token_ids), out.sampling_params) for out in outputs]


def _digests(outputs: dict[int, Any]) -> dict[int, str]:
    missing = [degree for degree, out in outputs.items() if out is None]
    assert not missing, f"nothing was generated at degree {missing}"
    if len(outputs) < 2:
        raise Inconclusive("needs two degrees, there is one device")
    return {degree: digest_of(out)[:SHORT] for degree, out in outputs.items()}


def _one_digest(outputs: dict[int, Any]) -> str:
    digests = _digests(outputs)
    lowest = min(outputs)
    for degree, out in outputs.items():
        difference = first_difference(outputs[lowest], out)
        assert difference is None, f"degree {degree} against {lowest}: {difference}"
    return f"degrees {', '.join(map(str, digests))}: {digests[lowest]}"


def _other_digests(outputs: dict[int, Any]) -> str:
    digests = _digests(outputs)
    assert len(set(digests.values())) > 1, "all degrees gave the same bits: the fixture is too tame"
    return ", ".join(f"degree {degree} {digest}" for degree, digest in digests.items())
