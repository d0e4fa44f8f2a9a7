"""How many pages the key-value cache gets: the arithmetic, and the words for it. No device work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from bi_jax.models.config import TransformerConfig

GIB = 2**30
# What stays free for the allocator's seams and for kernels' own workspaces.
SPARE_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """Bytes of a device's memory and what becomes of them.

    Attributes:
      limit: what the process may take of the device.
      fraction: of it, for weights, steps and cache together.
      weights: taken already, weights and everything else that is there.
      step: the largest step's arrays, an upper estimate.
      page: one page over all layers.
      pages: that fit.
    """

    limit: int
    fraction: float
    weights: int
    step: int
    page: int
    pages: int

    def __str__(self) -> str:
        left = self.limit * self.fraction - self.weights - self.step
        return (
            f"KV cache: {self.limit / GIB:.2f} GiB x {self.fraction:g} - "
            f"{self.weights / GIB:.2f} GiB of weights - {self.step / GIB:.2f} GiB for a step = "
            f"{left / GIB:.2f} GiB / {self.page / 2**20:.2f} MiB a page = {self.pages} pages"
        )


def cache_size(
    memory: Mapping[str, int],
    *,
    fraction: float,
    step_bytes: int,
    page_bytes: int,
    pages_of_one: int,
) -> CacheSize:
    """The pages that fit beside weights and steps.

    Args:
      memory: the device's `memory_stats()`: "bytes_limit" and "bytes_in_use".
      fraction: of the limit, for everything.
      step_bytes: for the largest step, see `step_bytes_of`.
      page_bytes: of one page over all layers.
      pages_of_one: what the longest sequence needs.

    Raises:
      ValueError: not even the longest sequence fits.
    """
    limit, taken = memory["bytes_limit"], memory["bytes_in_use"]
    pages = int(limit * fraction - taken - step_bytes) // page_bytes
    found = CacheSize(
        limit=limit, fraction=fraction, weights=taken, step=step_bytes, page=page_bytes, pages=pages
    )
    if pages < pages_of_one:
        raise ValueError(
            f"{found}, but the longest sequence needs {pages_of_one}: lower max_model_len or "
            "max_num_batched_tokens, or raise memory_fraction"
        )
    return found


def step_bytes_of(config: TransformerConfig, *, tokens: int, rows: int) -> int:
    """An upper estimate of the arrays that live at the same time in a step.

    Args:
      config: the model.
      tokens: in the largest step.
      rows: of logits in it.
    """
    width = jnp.dtype(config.dtype).itemsize
    heads = config.num_query_heads + 2 * config.num_kv_heads
    # The stream twice and what is added to it; qkv, its parts after the rotation, what attention
    # makes of them; the hidden layer of the feed-forward part, padded once.
    row = 4 * config.hidden_size + 3 * heads * config.head_dim + 2 * config.intermediate_size
    logits = 2 * 4 * rows * config.vocab_size  # float32, and once more padded to whole blocks
    return tokens * row * width + logits + SPARE_BYTES
