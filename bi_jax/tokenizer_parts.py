"""What every reader of a tokenizer hands over, wherever it read it from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer, processors

HINT = "name a folder that has the model's tokenizer.json with --tokenizer"


@dataclass(frozen=True, kw_only=True)
class TokenizerParts:
    """A tokenizer and what its model says about it.

    eos_token_ids: ids that end a completion, in the order the model names them; may be empty.
    bos_token_id: the id a text begins with where the model wants one, or None.
    special_tokens: bos_token, eos_token, ... as text, for chat templates.
    chat_templates: source by name.
    """

    backend: Tokenizer
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]


def set_bos_and_eos(
    backend: Tokenizer, special: Mapping[str, str], add_bos: bool, add_eos: bool
) -> None:
    """Makes `add_special_tokens` mean these two; a token that the model does not have is left."""
    before = [special["bos_token"]] if add_bos and "bos_token" in special else []
    behind = [special["eos_token"]] if add_eos and "eos_token" in special else []
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *behind],
        special_tokens=[(token, backend.token_to_id(token)) for token in {*before, *behind}],
    )
