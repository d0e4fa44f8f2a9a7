"""The frozen description of a decoder-only transformer.

Every field that a model needs is here and nothing is looked up again later: a family file turns
a checkpoint's own configuration into a `TransformerConfig` once, and refuses what we do not
support before any weight is read.
"""

from __future__ import annotations

import dataclasses
from typing import Any

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_TOPOLOGY = "default"
TP_INVARIANT = "tp_invariant"
TOPOLOGIES = (DEFAULT_TOPOLOGY, TP_INVARIANT)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_positive_int(owner: Any, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        ok = isinstance(value, int) and not isinstance(value, bool) and value > 0
        _require(ok, f"{name}={value!r} must be a positive integer.")


def _require_positive(owner: Any, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        ok = isinstance(value, int | float) and not isinstance(value, bool)
        # The comparison with infinity is written so that NaN is refused as well.
        _require(ok and 0 < value < float("inf"), f"{name}={value!r} must be a positive number.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions are divided by `factor` (position interpolation)."""

    factor: float

    def __post_init__(self) -> None:
        _require_positive(self, "factor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's scaling: low frequencies are divided by `factor`, high ones are kept.

    Wavelengths longer than `original_max_position / low_freq_factor` are scaled, shorter than
    `original_max_position / high_freq_factor` are kept, and those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        _require_positive(self, "factor", "low_freq_factor", "high_freq_factor")
        _require_positive_int(self, "original_max_position")
        _require(
            self.low_freq_factor < self.high_freq_factor,
            f"low_freq_factor={self.low_freq_factor!r} must be below "
            f"high_freq_factor={self.high_freq_factor!r}.",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrequencyFactors:
    """Frequency i is divided by `factors[i]`: how a GGUF file states Llama 3.1's scaling."""

    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        ok = isinstance(self.factors, tuple) and all(
            isinstance(f, float) and 0 < f < float("inf") for f in self.factors
        )
        _require(ok, f"factors={self.factors!r} must be a tuple of positive floats.")


RopeScaling = LinearScaling | Llama3Scaling | FrequencyFactors


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding over the whole head, half-split form."""

    theta: float
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        _require_positive(self, "theta")
        _require(
            self.scaling is None or isinstance(self.scaling, RopeScaling),
            f"scaling={self.scaling!r} must be None, LinearScaling, Llama3Scaling or "
            "FrequencyFactors.",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Shapes, numerics and special tokens of one decoder.

    Attributes:
      family: "llama", "mistral", "qwen2" or "qwen3".
      vocab_size: V, rows of the embedding.
      hidden_size: D.
      intermediate_size: F.
      num_layers: number of blocks.
      num_query_heads: Nq, a multiple of `num_kv_heads`.
      num_kv_heads: Nkv.
      head_dim: Dh, even; need not equal D / Nq.
      rms_norm_eps: added to the mean square.
      rope: base and scaling of the rotary embedding.
      max_position: longest context in tokens.
      sliding_window: a query sees itself and the `sliding_window - 1` tokens before it;
        None for full attention.
      qkv_bias: q, k and v carry a bias.
      qk_norm: q and k are RMS-normalised over Dh before the rotation.
      tie_word_embeddings: the embedding is also the output projection.
      dtype: compute dtype of activations and the residual stream.
      param_dtype: dtype the parameters are stored in.
      bos_token_id, eos_token_ids, pad_token_id: as the checkpoint states them.
      topology: "default", or "tp_invariant": the out and down projections add in 8 fixed segments
        merged by one tree, so that the bits do not depend on the tensor-parallel degree.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    sliding_window: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    param_dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    topology: str = DEFAULT_TOPOLOGY

    def __post_init__(self) -> None:
        _require(
            isinstance(self.family, str) and self.family != "",
            f"family={self.family!r} must be a non-empty string.",
        )
        _require_positive_int(
            self,
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_query_heads",
            "num_kv_heads",
            "head_dim",
            "max_position",
        )
        _require_positive(self, "rms_norm_eps")
        _require(
            self.num_query_heads % self.num_kv_heads == 0,
            f"num_query_heads={self.num_query_heads} must be a multiple of "
            f"num_kv_heads={self.num_kv_heads}.",
        )
        _require(self.head_dim % 2 == 0, f"head_dim={self.head_dim} must be even.")
        if self.sliding_window is not None:
            _require_positive_int(self, "sliding_window")
        for name in ("qkv_bias", "qk_norm", "tie_word_embeddings"):
            value = getattr(self, name)
            _require(isinstance(value, bool), f"{name}={value!r} must be True or False.")
        for name in ("dtype", "param_dtype"):
            value = getattr(self, name)
            _require(value in COMPUTE_DTYPES, f"{name}={value!r} must be one of {COMPUTE_DTYPES}.")
        _require(
            self.topology in TOPOLOGIES, f"topology={self.topology!r} must be one of {TOPOLOGIES}."
        )
        _require(isinstance(self.rope, RopeConfig), f"rope={self.rope!r} must be a RopeConfig.")
        scaling = self.rope.scaling
        if isinstance(scaling, FrequencyFactors):
            _require(
                len(scaling.factors) == self.head_dim // 2,
                f"rope.scaling has {len(scaling.factors)} factors; head_dim={self.head_dim} needs "
                f"{self.head_dim // 2}.",
            )
        self._check_token_ids()

    def _check_token_ids(self) -> None:
        _require(
            isinstance(self.eos_token_ids, tuple),
            f"eos_token_ids={self.eos_token_ids!r} must be a tuple of token ids.",
        )
        named = [("bos_token_id", self.bos_token_id), ("pad_token_id", self.pad_token_id)]
        named += [("eos_token_ids", token) for token in self.eos_token_ids]
        for name, token in named:
            if token is None and name != "eos_token_ids":
                continue
            _require(
                isinstance(token, int)
                and not isinstance(token, bool)
                and 0 <= token < self.vocab_size,
                f"{name}={token!r} must lie in [0, vocab_size={self.vocab_size}).",
            )

    @property
    def queries_per_kv(self) -> int:
        """G, the query heads that share one KV head."""
        return self.num_query_heads // self.num_kv_heads

    @property
    def query_size(self) -> int:
        """Nq * Dh, the width of the attention output before the out projection."""
        return self.num_query_heads * self.head_dim

    @property
    def attention_scale(self) -> float:
        """1 / sqrt(Dh)."""
        return self.head_dim**-0.5

    def replace(self, **changes: Any) -> TransformerConfig:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)
