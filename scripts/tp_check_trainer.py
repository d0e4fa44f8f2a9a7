"""Checks of a trainer on a mesh: its numbers are those of one device and of an engine."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from tp_claims import Claim, Inconclusive, run_claim

from bi_jax import Engine, EngineConfig, SamplingParams, flags, token_logprobs
from bi_jax.models import build_transformer, random_params
from bi_jax.models.config import TP_INVARIANT, TransformerConfig
from bi_jax.sharding import make_mesh
from bi_jax.testing import assert_same_bits, bit_difference
from bi_jax.trainer_mesh import RowMesh

ROWS, LENGTH = 8, 32


class Trainer:
    """A model, completions that an engine on one device drew, and weights of their tokens."""

    def __init__(self, config: TransformerConfig) -> None:
        self.config = config.replace(topology=TP_INVARIANT)
        self.model = build_transformer(self.config, random_params(self.config, 0))
        self.tokens, self.mask = (np.zeros((ROWS, LENGTH), np.int32) for _ in range(2))
        self.emitted, self.weights = (np.zeros((ROWS, LENGTH), np.float32) for _ in range(2))
        settings = EngineConfig(
            max_num_seqs=ROWS, max_num_batched_tokens=64, token_buckets=(64,), max_model_len=64
        )
        rng = np.random.default_rng(5)
        lengths = [(1 + 2 * row, LENGTH - 3 * row - 1) for row in range(ROWS)]
        prompts = [rng.integers(0, config.vocab_size, n).tolist() for n, _ in lengths]
        params = [
            SamplingParams(temperature=1.0, seed=row, max_tokens=new - n if new > n else 1,
                           ignore_eos=True)
            for row, (n, new) in enumerate(lengths)
        ]  # fmt: skip
        for row, output in enumerate(Engine(self.model, config=settings).generate(prompts, params)):
            drawn = output.outputs[0]
            start, end = len(prompts[row]), len(prompts[row]) + len(drawn.token_ids)
            self.tokens[row, :end] = [*prompts[row], *drawn.token_ids]
            self.mask[row, :end] = 1
            self.emitted[row, start:end] = drawn.logprobs
            self.weights[row, start:end] = rng.standard_normal(end - start) / ROWS

    def run(self, mesh: Any, order: Any = slice(None)) -> tuple[np.ndarray, list[np.ndarray]]:
        """Log-probabilities, and the gradient of their weighted sum, on the host."""
        graph, params, rest = nnx.split(self.model, nnx.Param, ...)

        def step(params: Any, tokens: Any, mask: Any, weights: Any) -> Any:
            def logprobs(params: Any) -> jax.Array:
                merged = nnx.merge(graph, params, rest)
                return token_logprobs(merged, tokens, segment_ids=mask, mesh=mesh)

            out, pull = jax.vjp(logprobs, params)
            return out, pull(weights)[0]

        if mesh is not None:
            specs = RowMesh(mesh=mesh).specs(params)
            places = jax.tree.map(lambda _, spec: jax.NamedSharding(mesh, spec), params, specs)
            params = jax.device_put(params, places)
        jitted = jax.jit(step, compiler_options=flags.compiler_options(jax.default_backend()))
        arrays = (a[order] for a in (self.tokens, self.mask, self.weights))
        out, gradients = jitted(params, *arrays)
        return np.asarray(out), [np.asarray(leaf) for leaf in jax.tree.leaves(gradients)]


def checks(config: TransformerConfig) -> Iterator[Claim]:
    """Every claim on trainers, over all devices that there are."""
    made: list[Any] = []
    yield run_claim(
        "trainer, 1 device: the log-probabilities that an engine emitted",
        functools.partial(_alone, config, made),
    )
    if not made:
        return
    devices = min(8, len(jax.devices()))
    devices = 1 << (devices.bit_length() - 1)
    shapes = {(devices, 1), (max(1, devices // 2), min(2, devices))}
    for fsdp, tp in sorted(shapes):
        yield run_claim(
            f"trainer, fsdp {fsdp} x tp {tp}: log-probabilities and gradients of one device",
            functools.partial(_on_mesh, *made, fsdp, tp),
        )
    yield run_claim(
        "trainer: control: other rows side by side have another sum",
        functools.partial(_other_rows, *made),
    )


def _alone(config: TransformerConfig, made: list[Any]) -> str:
    trainer = Trainer(config)
    out, gradients = trainer.run(None)
    at = trainer.weights != 0
    assert_same_bits(out[at], trainer.emitted[at])
    made += [trainer, out, gradients]
    return f"{int(at.sum())} log-probabilities"


def _on_mesh(trainer: Trainer, out: Any, gradients: Any, fsdp: int, tp: int) -> str:
    if fsdp * tp == 1:
        raise Inconclusive("needs two devices, there is one")
    got, found = trainer.run(make_mesh(fsdp=fsdp, tp=tp))
    assert_same_bits(got, out, context="log-probabilities")
    for index, (mine, expected) in enumerate(zip(found, gradients, strict=True)):
        assert_same_bits(mine, expected, context=f"gradient {index}")
    return f"{sum(leaf.size for leaf in found)} gradient elements"


def _other_rows(trainer: Trainer, out: Any, gradients: Any) -> str:
    _, found = trainer.run(None, np.array([0, 4, 1, 5, 2, 6, 3, 7]))
    pairs = zip(found, gradients, strict=True)
    differ = sum(bit_difference(a, b) is not None for a, b in pairs)
    assert differ, "another order of rows changed no bit: the operands are too tame"
    return f"{differ} of {len(found)} arrays"
