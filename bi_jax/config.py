"""Settings of the engine; every one of them is schedule and cannot change a bit."""

import numbers
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

CPU_CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine runs.

    Attributes:
      max_num_seqs: (schedule) completions in one step.
      max_num_batched_tokens: (schedule) tokens in one step; longer prompts are cut into chunks.
      token_buckets: (schedule) row counts that steps are compiled for, ascending; None: a few up
        to max_num_batched_tokens.
      page_size: (schedule) tokens a cache page; it must divide the attention's KV block or be a
        multiple of it.
      num_pages: (schedule) pages in the cache; None: as `cache_bytes` says.
      cache_bytes: (schedule) size of the cache when num_pages is None. None: on a GPU what
        `memory_fraction` leaves, on a CPU 256 MiB.
      memory_fraction: (schedule) share of what the process may take of a GPU (JAX's own limit is
        XLA_PYTHON_CLIENT_MEM_FRACTION, 0.75 of the memory where it is not set) that weights, steps
        and cache fill together. `update_weights` needs room for the new weights beside the old
        ones, and `Engine.rescheduled` for a second cache: then take less.
      max_model_len: (schedule) longest sequence, prompt included; None: the model's context.
      prefix_caching: (schedule) prompts that begin alike share the pages of that beginning, also
        with requests that are done. A prompt whose own log-probabilities are asked for is computed
        in full.
      decode_steps: (schedule) tokens that are drawn in one dispatch when nobody can be admitted
        and every completion draws a token a step. More than 1 saves work of the host between
        tokens; a completion that ends on the way costs the rest of the dispatch, and new requests
        wait for its end.
      overlap: (schedule) hand the next step to the device before the tokens of this one are looked
        at, where nothing but those tokens is missing: every completion draws and nobody waits. A
        completion that ends by a stop token or string costs one more row.
      compilation_cache: (schedule) keep compiled programs on disk, for the whole process, where
        `bi_jax.flags.default_compilation_cache_dir` says; a directory that JAX was given stays.
      peer_memory: (schedule) on several cards of one host, sum over them through memory that they
        write into directly; False: by the compiler's collectives, as where there is no such memory.
      max_num_requests: (schedule) requests that may be running or waiting at once; more are
        refused. None: no limit.
      audit: (no schedule, but it cannot change a bit either) audit each compiled step before it
        runs, which takes a second or two a step program; the identity says whether it was done.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 128
    token_buckets: tuple[int, ...] | None = None
    page_size: int = 64
    num_pages: int | None = None
    cache_bytes: int | None = None
    memory_fraction: float = 0.94
    max_model_len: int | None = None
    prefix_caching: bool = True
    decode_steps: int = 1
    overlap: bool = True
    compilation_cache: bool = True
    peer_memory: bool = True
    max_num_requests: int | None = None
    audit: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", "decode_steps"):
            self._set(name, _positive(name, getattr(self, name)))
        for name in ("num_pages", "cache_bytes", "max_model_len", "max_num_requests"):
            if getattr(self, name) is not None:
                self._set(name, _positive(name, getattr(self, name)))
        for name in ("prefix_caching", "overlap", "compilation_cache", "peer_memory", "audit"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        fraction = self.memory_fraction
        if not isinstance(fraction, numbers.Real) or not 0 < fraction <= 1:
            raise ValueError(f"memory_fraction={fraction!r} must be in (0, 1]")
        buckets = self.token_buckets
        if buckets is not None:
            if not isinstance(buckets, Iterable):
                raise ValueError(f"token_buckets={buckets!r} must be a sequence of row counts")
            buckets = tuple(_positive("token_buckets", bucket) for bucket in buckets)
            self._set("token_buckets", buckets)
            if list(buckets) != sorted(set(buckets)) or not buckets:
                raise ValueError(f"token_buckets={buckets} must be ascending and not empty")
            if buckets[-1] < self.max_num_batched_tokens:
                raise ValueError(
                    f"token_buckets={buckets} must reach max_num_batched_tokens="
                    f"{self.max_num_batched_tokens}"
                )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def buckets(self, platform: str = "cpu") -> tuple[int, ...]:
        """The row counts that steps are compiled for; a step that nobody needs never is."""
        if self.token_buckets is not None:
            return self.token_buckets
        most = self.max_num_batched_tokens
        if platform == "cpu":
            # One row has a loop of its own there.
            return tuple(sorted({1, min(max(self.max_num_seqs, 16), most), most}))
        # Rows come in eights, and a step may compute four times the rows it needs, but no more.
        between = {8 * 4**power for power in range(12) if 8 * 4**power < most}
        return tuple(sorted({*between, min(max(self.max_num_seqs, 8), most), most}))


def _positive(name: str, value: Any) -> int:
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{name}={value!r} must be a positive whole number")
    return number
