"""A tokenizer out of a GGUF file's metadata: byte-level BPE with a named pre-tokenizer.

GGUF keeps the vocabulary and the merges, but of the way in which text is cut before merging only
a name. Names whose pipeline is known are listed here, each spelled as the tokenizer.json of a model
that has it spells it; any other name is refused, since a near miss would go unnoticed and shift
every token after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from bi_jax.tokenizer_parts import HINT, TokenizerParts, set_bos_and_eos

# GGUF's token types.
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """How text is cut before merging, and what else goes with the name.

    split: a regular expression whose matches are the pieces; None is GPT-2's.
    digits: every digit is a piece of its own, before the split.
    nfc: text is normalised to NFC first.
    whole_words: a piece that is in the vocabulary is one token, whatever the merges say.
    adds_bos: whether a text begins with the BOS token where the file does not say.
    """

    split: str | None = None
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False


_GPT2 = PreTokenizer()
_SMOLLM = PreTokenizer(digits=True)
_LLAMA_BPE = PreTokenizer(split=_LLAMA3, whole_words=True, adds_bos=True)
_QWEN = PreTokenizer(split=_QWEN2, nfc=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "qwen2": _QWEN,
    "tekken": PreTokenizer(split=_TEKKEN, whole_words=True, adds_bos=True),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Builds the tokenizer that a GGUF file's metadata describes.

    Args:
      metadata: key to value, arrays as lists.

    Raises:
      NotImplementedError: not a byte-level BPE, or a pre-tokenizer that is not in PRE_TOKENIZERS.
      ValueError: the metadata has no vocabulary or contradicts itself.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise ValueError(f"this GGUF file holds no tokenizer; {HINT}")
    if kind != "gpt2":
        raise NotImplementedError(
            f"this GGUF file has a tokenizer of the kind {kind!r}; only 'gpt2' (byte-level BPE) "
            f"can be built from a GGUF file; {HINT}"
        )
    name = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise NotImplementedError(
            f"this GGUF file has the pre-tokenizer {name!r}; supported are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}; {HINT}"
        )
    pre = PRE_TOKENIZERS[name]
    tokens, types = _vocabulary(metadata)
    backend = _byte_level_bpe(tokens, types, _merges(metadata), pre)

    special = {}
    for field, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = _token_id(metadata, f"tokenizer.ggml.{key}_token_id", len(tokens))
        if token_id is not None:
            special[f"{field}_token"] = tokens[token_id]
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", pre.adds_bos))
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    set_bos_and_eos(backend, special, add_bos, add_eos)
    ends = [
        _token_id(metadata, f"tokenizer.ggml.{key}_token_id", len(tokens))
        for key in ("eos", "eot", "eom")
    ]
    return TokenizerParts(
        backend=backend,
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        bos_token_id=_token_id(metadata, "tokenizer.ggml.bos_token_id", len(tokens)),
        special_tokens=special,
        chat_templates=_chat_templates(metadata),
    )


def _byte_level_bpe(
    tokens: Sequence[str],
    types: Sequence[int],
    merges: list[tuple[str, str]],
    pre: PreTokenizer,
) -> Tokenizer:
    # Unused entries pad the vocabulary to the embedding's height; no tokenizer.json has them.
    vocabulary = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.whole_words)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"the GGUF file's merges do not fit its vocabulary: {error}") from None
    backend = Tokenizer(model)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    split_by_bytes = pre.split is None
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits else []
    if pre.split is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_by_bytes))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, normalized=False, special=types[i] == CONTROL)
        for i, token in enumerate(tokens)
        if types[i] in (CONTROL, USER_DEFINED)
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])
    return backend


def _vocabulary(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(type(t) is str for t in tokens):
        raise ValueError("tokenizer.ggml.tokens must be a non-empty list of strings")
    if len(set(tokens)) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if token in tokens[:i])
        raise ValueError(f"tokenizer.ggml.tokens holds {twice!r} twice")
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.token_type must have one entry for each of the {len(tokens)} tokens"
        )
    return tokens, types


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ValueError("tokenizer.ggml.merges must be a list of strings")
    pairs = []
    for place, merge in enumerate(merges):
        # A byte-level vocabulary spells a space as another letter, so the one space separates.
        left, separator, right = merge.partition(" ") if isinstance(merge, str) else ("",) * 3
        if not (left and separator and right) or " " in right:
            raise ValueError(f"tokenizer.ggml.merges[{place}]={merge!r} must be two tokens")
        pairs.append((left, right))
    return pairs


def _token_id(metadata: Mapping[str, Any], key: str, count: int) -> int | None:
    token_id = metadata.get(key)
    if token_id is not None and type(token_id) is not int:
        raise ValueError(f"{key}={token_id!r:.80} must be a token id")
    if token_id is not None and not 0 <= token_id < count:
        raise ValueError(f"{key}={token_id} is outside the vocabulary of {count} tokens")
    return token_id


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """`tokenizer.chat_template` is the default one, `tokenizer.chat_template.NAME` the others."""
    templates = {}
    for key, value in metadata.items():
        if key == "tokenizer.chat_template":
            templates["default"] = value
        elif key.startswith("tokenizer.chat_template."):
            templates[key.removeprefix("tokenizer.chat_template.")] = value
    return templates
