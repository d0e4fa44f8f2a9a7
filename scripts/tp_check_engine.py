"""Checks of the engine at each tensor-parallel degree: batch and schedule, degrees, scoring."""

import functools
import gc
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
from card_turns import wait_for_turn
from engine_cases import random_checkpoint
from tp_claims import Claim, Inconclusive, NotHere, run_claim

from bi_jax import Engine, EngineConfig
from bi_jax.battery import (
    PASSED,
    battery_requests,
    battery_ways,
    check_scoring,
    check_way,
    digest_of,
)
from bi_jax.models import build_transformer
from bi_jax.models.config import DEFAULT_TOPOLOGY, TP_INVARIANT, RopeConfig, TransformerConfig
from bi_jax.models.families.qwen3 import QWEN3_8B
from bi_jax.ops import pick_backends
from bi_jax.sharding import model_placer
from bi_jax.testing.schedule import Way, run_together

SHORT = 16  # characters of a digest
STEPS = 4  # tokens a dispatch, in one of the ways
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
      tokens: new tokens of each completion.
      rows: most requests at a time.
      buckets: compiled row counts.
      quick: only some of the ways of the battery.
      turn: what to wait for between compiling and computing, see `card_turns`.
    """

    config: TransformerConfig
    tokens: int
    rows: int
    buckets: tuple[int, ...]
    quick: bool
    turn: pathlib.Path | None = None


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One engine.

    Attributes:
      topology: of the model.
      degree: tensor-parallel degree.
      collectives: whether it sums by collectives although the cards have memory for one another.
    """

    topology: str
    degree: int
    collectives: bool = False

    @property
    def name(self) -> str:
        ranks = f"{self.topology} topology, {self.degree} ranks"
        return f"{ranks}, by collectives" if self.collectives else ranks


def units(topologies: Sequence[str], degrees: Sequence[int]) -> list[Unit]:
    """Every engine, in the order in which they run."""
    kinds = [dict(topology=t, degree=d) for t in topologies for d in degrees]
    return [Unit(**kind) for kind in kinds] + [
        Unit(**kind, collectives=True) for kind in kinds if kind["degree"] > 1
    ]


class Engines:
    """Engines of one model, one at a time, on the same weights."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def make(self, unit: Unit) -> Engine:
        gc.collect()
        plan = self.plan
        model_config = plan.config.replace(topology=unit.topology)
        backends = pick_backends(jax.devices()[0], model_config.dtype)
        placer = model_placer(model_config, backends, unit.degree)
        params = random_checkpoint(model_config, placer)
        jax.block_until_ready(params)
        layout = None if placer is None else placer.layout
        model = build_transformer(model_config, params, layout=layout)
        config = EngineConfig(
            max_num_seqs=plan.rows,
            max_num_batched_tokens=plan.buckets[-1],
            token_buckets=plan.buckets,
            max_model_len=min(plan.config.max_position, 256 + plan.tokens),
            num_pages=plan.rows * -(-(256 + plan.tokens) // 64),
            peer_memory=not unit.collectives,
        )
        return Engine(model, config=config, tensor_parallel_size=unit.degree)


def checks(plan: Plan, wanted: Sequence[Unit], digests: dict[str, str]) -> Iterator[Claim]:
    """Every claim on one engine alone.

    Args:
      plan: what to run.
      wanted: the engines.
      digests: is given that of each engine's completions, by the unit's name.
    """
    engines = Engines(plan)
    for unit in wanted:
        made: list[Any] = []
        name, length = f"engine, {unit.name}: ", f"{plan.tokens}-token completions"
        if unit.collectives:
            yield run_claim(
                f"{name}{length}", functools.partial(_by_collectives, engines, unit, digests)
            )
            continue
        yield run_claim(
            f"{name}batch- and schedule-invariant, {length}",
            functools.partial(_invariant, engines, unit, made, digests),
        )
        if made:
            yield run_claim(f"{name}scored as emitted", functools.partial(_scored, *made))


def checks_across(
    topologies: Sequence[str], degrees: Sequence[int], digests: Mapping[str, str]
) -> Iterator[Claim]:
    """Every claim on several engines, from the digests of their completions."""
    for topology in topologies:
        name = f"engine, {topology} topology"
        for degree in degrees:
            if degree == 1:
                continue
            pair = [
                Unit(topology=topology, degree=degree, collectives=collectives).name
                for collectives in (False, True)
            ]
            yield run_claim(
                f"{name}, {degree} ranks: completions through peer memory equal those by "
                "collectives",
                functools.partial(_same_as_by_collectives, *pair, digests),
            )
        found = {d: digests.get(Unit(topology=topology, degree=d).name) for d in degrees}
        if topology == TP_INVARIANT:
            claim, check = "one digest at all degrees", _one_digest
        else:
            claim, check = "control: the degree changes bits", _other_digests
        yield run_claim(f"{name}: {claim}", functools.partial(check, found))


def _requests(engine: Engine, plan: Plan) -> list[Any]:
    return battery_requests(engine, tokens=plan.tokens, filters=False)


def _ready(engine: Engine, plan: Plan, *, scoring: bool) -> None:
    """Compiles every program that the checks take, and waits for this process's turn."""
    runner, largest = engine.runner, plan.buckets[-1]
    steps = [runner.blank_step(bucket) for bucket in plan.buckets]
    if scoring:  # a chunk of a prompt whose every token is scored
        steps.append(runner.blank_step(largest, logit_rows=largest))
        steps.append(runner.blank_step(plan.rows, steps=STEPS))
    with ThreadPoolExecutor(len(steps)) as pool:
        list(pool.map(runner.compile, steps))
    wait_for_turn(plan.turn)


def _invariant(engines: Engines, unit: Unit, made: list[Any], digests: dict[str, str]) -> str:
    plan = engines.plan
    engine = engines.make(unit)
    _ready(engine, plan, scoring=True)
    requests = _requests(engine, plan)
    expected = run_together(engine, requests)
    made += [engine, expected]
    digests[unit.name] = digest_of(expected)
    every = list(battery_ways(engine, requests))
    wanted = ("each alone", "in reversed order", "among strangers", "prompts in chunks")
    some = [(p, w) for p, w in every if w.name.startswith(wanted)] if plan.quick else every
    twin = engine.rescheduled(decode_steps=STEPS)
    name = f"{STEPS} tokens a dispatch"
    some.append(("schedule", Way(name=name, run=lambda: run_together(twin, requests))))
    for promise, way in some:
        found = check_way(engine, expected, promise, way)
        assert found.verdict == PASSED, f"{way.name}: {found.detail}"
    through = ", sums through peer memory" if engine.runner.sums_through_peers else ""
    return f"{len(some)} ways, digest {digests[unit.name][:SHORT]}{through}"


def _by_collectives(engines: Engines, unit: Unit, digests: dict[str, str]) -> str:
    if jax.default_backend() == "cpu":
        raise NotHere("sums go by collectives on this platform")
    engine = engines.make(unit)
    _ready(engine, engines.plan, scoring=False)
    assert not engine.runner.sums_through_peers
    digests[unit.name] = digest_of(run_together(engine, _requests(engine, engines.plan)))
    return f"digest {digests[unit.name][:SHORT]}"


def _scored(engine: Engine, expected: list[Any]) -> str:
    found = check_scoring(engine, _requests_of(expected), expected)
    assert found.verdict == PASSED, found.detail
    return f"{found.values} log-probabilities"


def _requests_of(outputs: Sequence[Any]) -> list[Any]:
    return [(list(out.prompt_token_ids), out.sampling_params) for out in outputs]


def _same_as_by_collectives(peers: str, collectives: str, digests: Mapping[str, str]) -> str:
    if jax.default_backend() == "cpu" and collectives not in digests:
        raise NotHere("sums go by collectives on this platform")
    missing = [name for name in (peers, collectives) if name not in digests]
    assert not missing, f"nothing was generated in the {missing}"
    assert digests[peers] == digests[collectives], f"{digests[peers]}, {digests[collectives]}"
    return digests[peers][:SHORT]


def _shown(digests: Mapping[int, str | None]) -> str:
    missing = [degree for degree, digest in digests.items() if digest is None]
    assert not missing, f"nothing was generated at degree {missing}"
    if len(digests) < 2:
        raise Inconclusive("needs two degrees, there is one device")
    return ", ".join(f"degree {d} {(digest or '')[:SHORT]}" for d, digest in digests.items())


def _one_digest(digests: Mapping[int, str | None]) -> str:
    shown = _shown(digests)
    assert len(set(digests.values())) == 1, shown
    return shown


def _other_digests(digests: Mapping[int, str | None]) -> str:
    shown = _shown(digests)
    assert len(set(digests.values())) > 1, "all degrees gave the same bits: the fixture is too tame"
    return shown
