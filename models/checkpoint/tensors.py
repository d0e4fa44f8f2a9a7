"""A checkpoint as a set of named tensors, and the check that a model uses each exactly once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from ..config import TransformerConfig
from .plan import Parameter

# Rotary frequencies that old checkpoints carry; ours come from the configuration.
IGNORED = re.compile(r"(model\.layers\.\d+\.self_attn\.|model\.)?rotary_emb\.inv_freq")
MAX_NAMES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSource:
    """Named tensors that are read one at a time.

    Attributes:
      where: the file or folder, for messages.
      shapes: tensor name (Hugging Face's) -> shape.
      read: tensor name -> array.
      own_name: Hugging Face's name -> the name in the file, for messages.
    """

    where: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    own_name: Callable[[str], str] = str


def check_exact_use(
    source: TensorSource, plan: Iterable[Parameter], config: TransformerConfig
) -> None:
    """Checks names and shapes before any tensor is read.

    Raises:
      ValueError: a tensor is missing, left over, or of another shape than the configuration says.
    """
    wanted = {name: shape for parameter in plan for name, shape in parameter.sources}
    missing = [source.own_name(name) for name in wanted if name not in source.shapes]
    left_over = [
        source.own_name(name)
        for name in source.shapes
        if name not in wanted and not _ignorable(name, config)
    ]
    if missing or left_over:
        raise ValueError(
            f"{source.where} does not hold the tensors its configuration asks for: "
            f"missing {_listed(missing)}; left over {_listed(left_over)}."
        )
    for name, shape in wanted.items():
        if source.shapes[name] != shape:
            raise ValueError(
                f"{source.where}: tensor {source.own_name(name)} has shape "
                f"{source.shapes[name]}, but its configuration asks for {shape}."
            )
    if config.tie_word_embeddings and "lm_head.weight" in source.shapes:
        _check_tied_copy(source)


def _ignorable(name: str, config: TransformerConfig) -> bool:
    tied_copy = config.tie_word_embeddings and name == "lm_head.weight"
    return tied_copy or IGNORED.fullmatch(name) is not None


def _check_tied_copy(source: TensorSource) -> None:
    """A stored output projection of a tied model must be a copy of the embedding."""
    names = ("model.embed_tokens.weight", "lm_head.weight")
    same = source.shapes[names[0]] == source.shapes[names[1]]
    if same:
        embedding, head = (source.read(name).view(np.uint8) for name in names)
        same = np.array_equal(embedding, head)
    if not same:
        raise ValueError(
            f"{source.where}: the configuration ties the embeddings, but lm_head.weight is stored "
            "and differs from the embedding."
        )


def _listed(names: list[str]) -> str:
    if not names:
        return "nothing"
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
