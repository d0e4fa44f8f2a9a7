"""How many pages the key-value cache gets: the arithmetic, and the words for it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from bi_jax.models.config import TransformerConfig
from bi_jax.pallas_kernels.attention import topology_for

from .config import CPU_CACHE_BYTES, EngineConfig
from .kv_cache import bytes_a_page
from .sharding import Placer

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


def check_page_size(page_size: int, model: TransformerConfig) -> None:
    """Raises ValueError for pages that the model's attention cannot read."""
    block = topology_for(head_dim=model.head_dim).kv_block
    if block % page_size and page_size % block:
        raise ValueError(
            f"page_size={page_size} must divide the attention's KV block of {block} tokens or be "
            "a multiple of it"
        )


def plan_pages(
    config: EngineConfig,
    model: TransformerConfig,
    *,
    max_model_len: int,
    placer: Placer | None = None,
) -> tuple[int, CacheSize | None]:
    """Pages of an engine's cache, and the arithmetic where a device's memory decided; it is logged.

    Args:
      config: num_pages, else cache_bytes, else memory_fraction.
      model: its layers, heads and dtype.
      max_model_len: the longest sequence.
      placer: cuts the cache over devices; None: it is on the first one.

    Raises:
      ValueError: the device has no room for the longest sequence.
    """
    pages_of_one = -(-max_model_len // config.page_size)
    if config.num_pages is not None:
        return config.num_pages, None
    heads = None if placer is None else placer.layout.slots
    page_bytes = bytes_a_page(model, config.page_size, heads=heads)
    if config.cache_bytes is not None or jax.default_backend() == "cpu":
        fit = (config.cache_bytes or CPU_CACHE_BYTES) // page_bytes
        return max(pages_of_one, min(fit, pages_of_one * config.max_num_seqs)), None
    mesh = None if placer is None else placer.mesh
    devices = jax.devices()[:1] if mesh is None else list(mesh.local_devices)
    tokens = config.max_num_batched_tokens
    found = cache_size(
        [device.memory_stats() for device in devices],
        fraction=config.memory_fraction,
        step_bytes=step_bytes_of(model, tokens=tokens, rows=min(config.max_num_seqs, tokens)),
        page_bytes=page_bytes,
        pages_of_one=pages_of_one,
    )
    logging.getLogger("bi_jax").info("%s", found)
    return found.pages, found


def cache_size(
    memory: Sequence[Mapping[str, int]],
    *,
    fraction: float,
    step_bytes: int,
    page_bytes: int,
    pages_of_one: int,
) -> CacheSize:
    """The pages that fit beside weights and steps.

    Args:
      memory: each device's `memory_stats()`: "bytes_limit" and "bytes_in_use".
      fraction: of the limit, for everything.
      step_bytes: for the largest step, `step_bytes_of`.
      page_bytes: of one page over all layers.
      pages_of_one: what the longest sequence needs.

    Raises:
      ValueError: not even the longest sequence fits.
    """
    limit = min(stats["bytes_limit"] for stats in memory)
    taken = max(stats["bytes_in_use"] for stats in memory)
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
