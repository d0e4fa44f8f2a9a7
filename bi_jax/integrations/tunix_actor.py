"""A transformer with the call that Google Tunix's models have; it does not need Tunix."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bi_jax.kv_cache import LayerPages, make_cache
from bi_jax.models.config import TransformerConfig
from bi_jax.models.transformer import Transformer
from bi_jax.pallas_kernels.ragged import RaggedBatch
from bi_jax.token_layout import PAGE_SIZE, lay_out, pages_for
from bi_jax.trainer_logprobs import default_ops

MAX_SEGMENTS = 16  # sequences that a packed row may hold; one with more gives NaN


class Actor(nnx.Module):
    """A transformer with the call that Tunix's models have.

    Args:
      model: the policy or the reference; its parameters are shared, not copied.
    """

    def __init__(self, model: Transformer) -> None:
        graph, state = nnx.split(model)
        # Tunix asks every leaf for its sharding, and the rotary tables come from the host.
        self.model: Transformer = nnx.merge(graph, jax.tree.map(jnp.asarray, state))

    @property
    def config(self) -> TransformerConfig:
        """Of the model: Tunix reads num_layers, num_kv_heads, head_dim and dtype from it."""
        return self.model.config

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        cache: Any = None,
        attention_mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Logits of padded rows.

        Args:
          tokens: int32 [B, T].
          positions: int32 [B, T] in their sequences; read with a cache only, counted otherwise.
          cache: None, or what `init_cache` made; then a row is one sequence.
          attention_mask: bool [B, T, S], causal: a token that does not see itself is padding.
          segment_ids: int32 [B, T], 0 is padding; takes the place of the mask.

        Returns:
          float32 [B, T, V], 0 at padding, and the cache with these tokens stored in it.
        """
        rows, length = tokens.shape
        if cache is not None:
            return self._continued(tokens, positions, cache, attention_mask)
        if segment_ids is None and attention_mask is not None:
            segment_ids = jnp.diagonal(attention_mask, axis1=1, axis2=2).astype(jnp.int32)
        if segment_ids is None:
            segment_ids = jnp.ones((rows, length), jnp.int32)
        return self.logits(tokens, segment_ids, max_segments=MAX_SEGMENTS), None

    def logits(self, tokens: jax.Array, segment_ids: jax.Array, *, max_segments: int) -> jax.Array:
        """float32 [B, T, V] of padded or packed rows, 0 at padding, NaN in a row that is too full
        or holds an id outside the vocabulary.

        Args:
          tokens, segment_ids: int32 [B, T]; 0 is padding.
          max_segments: sequences that a row may hold.
        """
        rows, length = tokens.shape
        layout = lay_out(
            tokens.astype(jnp.int32),
            None,
            segment_ids,
            max_segments=max_segments,
            max_position=self.config.max_position,
            vocab_size=self.config.vocab_size,
        )
        pages = pages_for(rows, length, max_segments)
        layers = make_cache(self.config, num_pages=pages, page_size=PAGE_SIZE)
        real = segment_ids.reshape(-1) > 0
        logits, _ = self._run(layout.tokens, layout.batch, layers, real)
        logits = logits.reshape(rows, length, -1)
        return jnp.where(layout.bad_row[:, None, None], jnp.nan, logits)

    def _run(self, tokens: jax.Array, batch: RaggedBatch, layers: Any, real: jax.Array) -> Any:
        """[N, V] at the places of the real tokens among N, and the layers' caches."""
        ops = default_ops(self.config)
        hidden, layers = self.model(tokens, batch, layers, ops)
        logits = self.model.logits(hidden, ops, num_rows=batch.num_tokens)
        place = jnp.where(real, jnp.cumsum(real, dtype=jnp.int32) - 1, real.shape[0])
        return logits.at[place].get(mode="fill", fill_value=0), layers

    def _continued(
        self, tokens: jax.Array, positions: Any, cache: Any, attention_mask: Any
    ) -> tuple[jax.Array, Any]:
        """Rows that go on where their cache ends; row b is sequence b."""
        rows, length = tokens.shape
        real = jnp.ones((rows, length), jnp.bool_)
        if length > 1:  # a prompt, padded on the left; a single token is real
            real = jnp.diagonal(attention_mask, axis1=1, axis2=2).astype(jnp.bool_)
        lengths, real = jnp.sum(real, axis=1, dtype=jnp.int32), real.reshape(-1)
        index = jnp.arange(rows * length, dtype=jnp.int32)
        place = jnp.where(real, jnp.cumsum(real, dtype=jnp.int32) - 1, rows * length + index)
        source = jnp.zeros_like(index).at[place].set(index, mode="drop", unique_indices=True)
        layers = [LayerPages(layer["k"], layer["v"]) for layer in cache.values()]
        pages = layers[0].k.shape[0]
        batch = RaggedBatch(
            positions=positions.reshape(-1)[source].astype(jnp.int32),
            request=source // length,
            query_start=jnp.pad(jnp.cumsum(lengths, dtype=jnp.int32), (1, 0)),
            page_table=jnp.arange(pages, dtype=jnp.int32).reshape(rows, -1),
            num_tokens=jnp.sum(lengths, dtype=jnp.int32),
        )
        flat = tokens.reshape(-1)[source].astype(jnp.int32)
        logits, layers = self._run(flat, batch, layers, real)
        return logits.reshape(rows, length, -1), _as_dict(layers)

    def init_cache(self, batch_size: int, cache_size: int, dtype: Any = None) -> Any:
        """An empty cache for `batch_size` rows of up to `cache_size` tokens, for Tunix's sampler.

        `dtype` is Tunix's; the cache has the model's compute dtype.
        """
        pages = batch_size * -(-cache_size // PAGE_SIZE)
        return _as_dict(make_cache(self.config, num_pages=pages, page_size=PAGE_SIZE))


def _as_dict(layers: Any) -> dict[str, dict[str, jax.Array]]:
    return {f"layer_{i:04d}": {"k": pages.k, "v": pages.v} for i, pages in enumerate(layers)}
