"""A decoder-only transformer over a flat ragged batch of tokens."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bi_jax.pallas_kernels.gradients import fork

from .attention import Attention
from .config import TransformerConfig
from .layers import Embedding, Linear, NormScale, Rope
from .mlp import Mlp
from .ops import LayerCache, TransformerOps
from .parallel_layout import ParallelLayout


class Block(nnx.Module):
    """Attention and feed-forward; each hands its output on, the next norm adds it."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        kinds: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        self.attn_norm = NormScale(config.hidden_size, **kinds)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = NormScale(config.hidden_size, **kinds)
        self.mlp = Mlp(config, rngs=rngs)
        self.eps = config.rms_norm_eps

    def __call__(
        self,
        normed: jax.Array,
        stream: jax.Array,
        rope_rows: tuple[jax.Array, jax.Array],
        cache: LayerCache,
        batch: Any,
        ops: TransformerOps,
    ) -> tuple[jax.Array, jax.Array, LayerCache]:
        """normed, stream [T, D] -> what the next norm adds, the stream, the layer's cache."""
        count, scale = batch.num_tokens, self.mlp_norm.cast_scale()
        pending, cache = self.attention(normed, rope_rows, cache, batch, ops)
        normed, stream = ops.add_rms_norm(pending, stream, scale, eps=self.eps, num_rows=count)
        return self.mlp(normed, count, ops), stream, cache


class Transformer(nnx.Module):
    """Llama, SmolLM2, Mistral, Qwen2 and Qwen3, as the config says."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        kinds: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        self.config = config
        self.layout: ParallelLayout | None = None  # None: parameters lie as in a checkpoint
        self.embed = Embedding(config, rngs=rngs)
        self.rope = Rope(config)
        self.layers = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.final_norm = NormScale(config.hidden_size, **kinds)
        if config.tie_word_embeddings:
            self.lm_head = None
        else:
            self.lm_head = Linear((config.vocab_size, config.hidden_size), rngs=rngs, **kinds)

    def __call__(
        self,
        tokens: jax.Array,
        batch: Any,
        cache: Sequence[LayerCache],
        ops: TransformerOps,
        *,
        scan_layers: bool = False,
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """One forward pass over T tokens of any requests.

        Args:
          tokens: int32 [T]; padding may hold any id.
          batch: a `RaggedBatch`: where each token belongs.
          cache: one opaque cache a layer.
          ops: what to compute with.
          scan_layers: compile the second and later blocks once, as a loop over a stacked copy of
            their parameters; schedule. For trainers: a differentiated program is large.

        Returns:
          Final normed hidden states [T, D] and the caches, this batch's keys stored in them.

        Invariance: a token's row depends on its request's tokens up to it, the parameters and the
        ops' topology; not on T, the other requests, chunking, pages or its place in the batch.
        """
        eps, count = self.config.rms_norm_eps, batch.num_tokens
        rope_rows = self.rope.rows(batch.positions)
        stream = self.embed(tokens, count, ops)
        scale = self.layers[0].attn_norm.cast_scale()
        branch, stream = fork(stream)
        normed = ops.rms_norm(branch, scale, eps=eps, num_rows=count)
        pending, stream, first = self.layers[0](normed, stream, rope_rows, cache[0], batch, ops)
        state, rest = (pending, stream), cache[1:]

        def step(state: Any, block: Block, layer_cache: LayerCache) -> tuple[Any, LayerCache]:
            pending, stream = state
            scale = block.attn_norm.cast_scale()
            normed, stream = ops.add_rms_norm(pending, stream, scale, eps=eps, num_rows=count)
            pending, stream, layer_cache = block(normed, stream, rope_rows, layer_cache, batch, ops)
            return (pending, stream), layer_cache

        if scan_layers and rest:
            state, new_cache = _scan(step, state, self.layers[1:], rest)
        else:
            new_cache = []
            for block, layer_cache in zip(self.layers[1:], rest, strict=True):
                state, layer_cache = step(state, block, layer_cache)
                new_cache.append(layer_cache)
        (pending, stream), new_cache = state, [first, *new_cache]
        scale = self.final_norm.cast_scale()
        normed, _ = ops.add_rms_norm(pending, stream, scale, eps=eps, num_rows=count)
        return normed, tuple(new_cache)

    def logits(
        self, hidden: jax.Array, ops: TransformerOps, num_rows: jax.Array | None = None
    ) -> jax.Array:
        """hidden [R, D] -> float32 [R, V], the accumulators unrounded."""
        head = self.embed if self.lm_head is None else self.lm_head
        return ops.logits(hidden, head.cast_weight(), num_rows=num_rows)


def _scan(
    step: Callable[..., Any], state: Any, blocks: Sequence[Block], caches: Sequence[LayerCache]
) -> tuple[Any, list[LayerCache]]:
    """The blocks one after the other, as one loop over stacked parameters and caches."""
    graphs, params = zip(*(nnx.split(block) for block in blocks), strict=True)

    def body(state: Any, layer: tuple[Any, LayerCache]) -> tuple[Any, LayerCache]:
        return step(state, nnx.merge(graphs[0], layer[0]), layer[1])

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    stacked_caches = jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches)
    state, new = jax.lax.scan(body, state, (stacked, stacked_caches))
    return state, [jax.tree.map(lambda a, i=i: a[i], new) for i in range(len(blocks))]


def parameter_names(model: Transformer) -> dict[str, tuple[int, ...]]:
    """Name ("layers.0.mlp.down.weight") and shape of every parameter, in a stable order."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): tuple(v.shape) for path, v in sorted(flat, key=_by_name)}


def build_transformer(
    config: TransformerConfig, params: Mapping[str, Any], *, layout: ParallelLayout | None = None
) -> Transformer:
    """A transformer that holds exactly these parameters.

    Args:
      config: the model.
      params: every parameter by name, as `parameter_names` lists them.
      layout: how the parameters lie over ranks; None: as in a checkpoint.

    Raises:
      ValueError: names are missing or left over, or a shape contradicts the config.
    """
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    expected = parameter_names(model)
    if layout is not None:
        expected = layout.shapes(expected)
    missing = sorted(set(expected) - set(params))
    extra = sorted(set(params) - set(expected))
    if missing or extra:
        raise ValueError(
            f"the parameters do not fit the config: missing {missing or 'none'}, "
            f"left over {extra or 'none'}"
        )
    for name, shape in expected.items():
        if tuple(params[name].shape) != shape:
            raise ValueError(
                f"{name} must have shape {list(shape)}, got {list(params[name].shape)}"
            )
    graph, state, _ = nnx.split(model, nnx.Param, ...)
    flat = [(path, v.replace(params[".".join(map(str, path))])) for path, v in _flat(state)]
    model = nnx.merge(graph, nnx.from_flat_state(flat), nnx.state(_Ropes(config)))
    model.layout = layout
    return model


class _Ropes(nnx.Module):
    """The non-parameter part of a transformer, made on the host."""

    def __init__(self, config: TransformerConfig) -> None:
        self.rope = Rope(config)


def _flat(state: Any) -> list[tuple[tuple[Any, ...], Any]]:
    return list(nnx.to_flat_state(state))


def _by_name(item: tuple[tuple[Any, ...], Any]) -> tuple[str, ...]:
    return tuple(f"{part:06d}" if isinstance(part, int) else part for part in item[0])


def random_params(config: TransformerConfig, seed: int) -> dict[str, jax.Array]:
    """Random parameters of the config's shapes, made in one jitted program on the device."""

    def make() -> dict[str, jax.Array]:
        model = Transformer(config, rngs=nnx.Rngs(params=jax.random.key(seed, impl="threefry2x32")))
        flat = _flat(nnx.state(model, nnx.Param))
        return {".".join(map(str, path)): jnp.asarray(v[...]) for path, v in flat}

    return jax.jit(make)()
