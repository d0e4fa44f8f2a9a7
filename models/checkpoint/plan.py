"""Which checkpoint tensors make which parameter.

A parameter is named by its path in the model, `layers.0.attention.qkv.weight`; the tensors it is
made of by their Hugging Face names. GGUF files are read through the same names.

    qkv.weight     [Nkv, G + 2, Dh, D]   per KV head: its G query heads, then k, then v
    qkv.bias       [Nkv, G + 2, Dh]
    gate_up.weight [2, F, D]             gate, then up
    all others     as the checkpoint has them: (out, in), embedding [V, D], scales [D] or [Dh]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..config import TransformerConfig

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter: its shape, and the tensors that `build` makes it from.

    Attributes:
      path: name in the model.
      shape: shape in the model.
      sources: (tensor name, tensor shape) in the order `build` takes them.
      build: tensors -> array of `shape`; moves data, never computes.
    """

    path: str
    shape: Shape
    sources: tuple[tuple[str, Shape], ...]
    build: Callable[[Sequence[np.ndarray]], np.ndarray]


def parameter_plan(config: TransformerConfig) -> tuple[Parameter, ...]:
    """Every parameter of a model, in the order of the forward pass."""
    return tuple(_parameters(config))


def parameter_shapes(config: TransformerConfig) -> dict[str, Shape]:
    """Path -> shape of every parameter."""
    return {parameter.path: parameter.shape for parameter in parameter_plan(config)}


def _parameters(config: TransformerConfig) -> Iterator[Parameter]:
    width, vocab = config.hidden_size, config.vocab_size
    yield _plain("embed.embedding", "model.embed_tokens.weight", (vocab, width))
    for layer in range(config.num_layers):
        yield from _layer(config, f"layers.{layer}", f"model.layers.{layer}")
    yield _plain("final_norm.scale", "model.norm.weight", (width,))
    if not config.tie_word_embeddings:
        yield _plain("lm_head.weight", "lm_head.weight", (vocab, width))


def _layer(config: TransformerConfig, ours: str, theirs: str) -> Iterator[Parameter]:
    width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    attention, self_attn = f"{ours}.attention", f"{theirs}.self_attn"
    yield _plain(f"{ours}.attn_norm.scale", f"{theirs}.input_layernorm.weight", (width,))
    yield _qkv(config, f"{attention}.qkv.weight", self_attn, "weight", (width,))
    if config.qkv_bias:
        yield _qkv(config, f"{attention}.qkv.bias", self_attn, "bias", ())
    if config.qk_norm:
        yield _plain(f"{attention}.q_norm.scale", f"{self_attn}.q_norm.weight", (head,))
        yield _plain(f"{attention}.k_norm.scale", f"{self_attn}.k_norm.weight", (head,))
    yield _plain(
        f"{attention}.out.weight", f"{self_attn}.o_proj.weight", (width, config.query_size)
    )
    yield _plain(f"{ours}.mlp_norm.scale", f"{theirs}.post_attention_layernorm.weight", (width,))
    yield Parameter(
        path=f"{ours}.mlp.gate_up.weight",
        shape=(2, inner, width),
        sources=tuple(
            (f"{theirs}.mlp.{name}_proj.weight", (inner, width)) for name in ("gate", "up")
        ),
        build=np.stack,
    )
    yield _plain(f"{ours}.mlp.down.weight", f"{theirs}.mlp.down_proj.weight", (width, inner))


def _plain(path: str, name: str, shape: Shape) -> Parameter:
    return Parameter(
        path=path, shape=shape, sources=((name, shape),), build=lambda tensors: tensors[0]
    )


def _qkv(config: TransformerConfig, path: str, prefix: str, kind: str, inputs: Shape) -> Parameter:
    groups, head = config.num_kv_heads, config.head_dim

    def build(tensors: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([t.reshape(groups, -1, head, *inputs) for t in tensors], axis=1)

    rows = {"q": config.query_size, "k": groups * head, "v": groups * head}
    return Parameter(
        path=path,
        shape=(groups, config.queries_per_kv + 2, head, *inputs),
        sources=tuple((f"{prefix}.{n}_proj.{kind}", (rows[n], *inputs)) for n in rows),
        build=build,
    )
