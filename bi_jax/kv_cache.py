"""The paged key-value cache: one pair of page arrays a layer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bi_jax.models.config import TransformerConfig


class LayerPages(NamedTuple):
    """k and v pages of one layer, [P, Nkv, Tp, Dh] each."""

    k: jax.Array
    v: jax.Array


def make_cache(
    config: TransformerConfig,
    *,
    num_pages: int,
    page_size: int,
    heads: int | None = None,
    sharding: jax.sharding.Sharding | None = None,
) -> tuple[LayerPages, ...]:
    """Pages for every layer in the compute dtype.

    Args:
      config: gives layers, KV heads, head size and dtype.
      num_pages: P, pages a layer.
      page_size: Tp, tokens a page.
      heads: KV heads of all ranks together; None: the model's.
      sharding: of the pages; None: on the default device.

    Returns:
      One `LayerPages` a layer; what unwritten slots hold is never read into a result.
    """
    shape = (num_pages, heads or config.num_kv_heads, page_size, config.head_dim)

    def pages() -> jax.Array:
        return jnp.zeros(shape, config.dtype, device=sharding)

    return tuple(LayerPages(pages(), pages()) for _ in range(config.num_layers))


def bytes_a_page(config: TransformerConfig, page_size: int, *, heads: int | None = None) -> int:
    """Bytes that one page takes over all layers, keys and values; `heads`: KV heads of a rank."""
    width = jnp.dtype(config.dtype).itemsize
    tokens = 2 * config.num_layers * (heads or config.num_kv_heads) * page_size
    return tokens * config.head_dim * width
