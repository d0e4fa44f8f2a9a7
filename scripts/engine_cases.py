"""Steps to time: what each asks of the engine, and the fewest bytes and operations it needs."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bi_jax import Engine, EngineConfig, SamplingParams
from bi_jax.batch import CHOOSE, LogitRow
from bi_jax.models import Transformer, TransformerConfig
from bi_jax.models.transformer import parameter_names
from bi_jax.runner import Runner, StepArguments
from bi_jax.sampling_rows import row_sampling
from bi_jax.scheduler import PlannedSequence, Sequence, StepPlan
from bi_jax.sharding import Placer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One step: `requests` requests that have `context` tokens after it, `new` of them its own.

    Attributes:
      aim: ours over the floor, at most; None: timed for the end-to-end estimate alone.
    """

    requests: int
    context: int
    new: int = 1
    aim: float | None = None

    @property
    def name(self) -> str:
        if self.new == 1:
            return f"decode {self.requests} x {self.context}"
        return f"prefill {self.requests} x {self.new}"

    @property
    def tokens(self) -> int:
        return self.requests * self.new

    def bytes_needed(self, config: TransformerConfig) -> int:
        """Every weight but the embedding once, and every key and value that is attended to."""
        width = jnp.dtype(config.dtype).itemsize
        keys = 2 * config.num_kv_heads * config.head_dim * config.num_layers
        return width * (weights_of(config) + keys * self.requests * self.context)

    def operations(self, config: TransformerConfig) -> int:
        """Of the products over all tokens, of the head over one a request, of causal attention."""
        head = config.vocab_size * config.hidden_size
        body = weights_of(config) - head
        before = self.context - self.new
        seen = self.requests * (self.new * before + self.new * (self.new + 1) // 2)
        mixing = 4 * config.num_query_heads * config.head_dim * config.num_layers * seen
        return 2 * (body * self.tokens + head * self.requests) + mixing

    def floor_seconds(self, config: TransformerConfig, bandwidth: float, rate: float) -> float:
        """The larger of bytes over the bandwidth and operations over the matmul rate."""
        return max(self.bytes_needed(config) / bandwidth, self.operations(config) / rate)


CASES = (
    Case(requests=1, context=1024, aim=1.15),
    Case(requests=64, context=1024, aim=1.15),
    Case(requests=256, context=2048, aim=1.08),
    Case(requests=1, context=8192, new=8192, aim=1 / 0.89),
)
# What the end-to-end run is made of: 1k in, 1k out, eight prompts a step.
PARTS = (Case(requests=256, context=1024), Case(requests=8, context=1024, new=1024))
# Of a model with which a benchmark is tried on any machine.
TINY_SIZES: dict[str, Any] = dict(
    num_layers=2, hidden_size=64, intermediate_size=128, num_query_heads=4, num_kv_heads=2,
    head_dim=64, vocab_size=512, bos_token_id=0, eos_token_ids=(1,), pad_token_id=0,
    dtype="float32", param_dtype="float32", max_position=512,
)  # fmt: skip
TINY_CASES = (
    Case(requests=1, context=40, aim=1.15),
    Case(requests=4, context=70, aim=1.15),
    Case(requests=1, context=64, new=64, aim=1.2),
)
TINY_PARTS = (Case(requests=4, context=48), Case(requests=1, context=32, new=32))


def weights_of(config: TransformerConfig) -> int:
    """Numbers in all products' weights, the head included, the embedding and the norms not."""
    heads = config.num_query_heads + 2 * config.num_kv_heads
    attention = (heads + config.num_query_heads) * config.head_dim * config.hidden_size
    mlp = 3 * config.intermediate_size * config.hidden_size
    return config.num_layers * (attention + mlp) + config.vocab_size * config.hidden_size


def step_of(engine: Engine, case: Case) -> StepArguments:
    """The arrays of the case's step, its pages anywhere in the cache."""
    rng = np.random.default_rng(0)
    size = engine.scheduler.config.page_size
    each = -(-case.context // size)
    pages = rng.permutation(engine.scheduler.config.num_pages)[: case.requests * each]
    params = row_sampling(SamplingParams(temperature=0.0, seed=0), sample_index=0)
    items, rows = [], []
    for index in range(case.requests):
        ids = rng.integers(0, engine.model_config.vocab_size, case.context).tolist()
        items.append(
            PlannedSequence(
                sequence=Sequence(seq_id=index, token_ids=ids),
                start=case.context - case.new,
                count=case.new,
                pages=tuple(pages[index * each : (index + 1) * each].tolist()),
            )
        )
        last = (index + 1) * case.new - 1
        rows.append(
            LogitRow(row=last, item=index, position=case.context, target=CHOOSE, sampling=params)
        )
    return engine.runner.step_arguments(StepPlan(items=tuple(items)), rows)


@functools.cache
def _normal(shape: tuple[int, ...], dtype: str, place: jax.sharding.Sharding | None) -> Any:
    def make(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, shape, dtype) * jnp.asarray(shape[-1] ** -0.5, dtype)

    return jax.jit(make, out_shardings=place)


def random_weights(config: TransformerConfig, placer: Placer | None = None) -> dict[str, jax.Array]:
    """Parameters by name, made where they lie; one small program a shape, quick to compile.

    Args:
      config: the model.
      placer: None: as in a checkpoint, on one device.
    """
    shapes = _shapes(config)
    if placer is not None:
        shapes = placer.layout.shapes(shapes)
    place = (lambda name: None) if placer is None else placer.sharding
    return dict(_random(shapes, config.dtype, place))


def random_checkpoint(config: TransformerConfig, placer: Placer | None = None) -> Any:
    """Parameters by name, the same for every placer, who places each before the next is made."""
    made = _random(_shapes(config), config.dtype, lambda name: None)
    return {name: array if placer is None else placer.place(name, array) for name, array in made}


def _shapes(config: TransformerConfig) -> dict[str, Any]:
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    return parameter_names(model)


def _random(shapes: Mapping[str, Any], dtype: str, place: Any) -> Iterator[tuple[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    for key, (name, shape) in zip(keys, shapes.items(), strict=True):
        if name.endswith("scale"):
            yield name, jax.device_put(np.ones(shape, jnp.dtype(dtype)), place(name))
        else:
            yield name, _normal(shape, dtype, place(name))(key)


def fill_cache(runner: Runner) -> None:
    """Random keys and values: zeros would be faster than real data."""
    shape, dtype = runner._cache[0].k.shape, runner._cache[0].k.dtype
    place = runner._cache[0].k.sharding
    fill = jax.jit(lambda key: jax.random.normal(key, shape, dtype), out_shardings=place)
    leaves, structure = jax.tree.flatten(runner._cache)
    runner._cache, count = None, len(leaves)
    leaves.clear()  # the old cache's memory is free before the new one is made
    keys = jax.random.split(jax.random.key(1), count)
    runner._cache = jax.tree.unflatten(structure, [fill(key) for key in keys])


def settings_for(cases: tuple[Case, ...], **settings: Any) -> EngineConfig:
    """An engine in which each of these steps has a bucket of its own and all its pages."""
    buckets = sorted({max(8, case.tokens) for case in cases})
    return EngineConfig(
        max_num_seqs=max(case.requests for case in cases),
        max_num_batched_tokens=buckets[-1],
        token_buckets=tuple(buckets),
        max_model_len=max(case.context for case in cases) + 64,
        num_pages=max(case.requests * -(-case.context // 64) for case in cases) + 8,
        **settings,
    )
