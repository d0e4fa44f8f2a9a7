"""Tokenizers out of GGUF metadata: pre-tokenizers by name, special tokens, refusals."""

import gguf
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from bi_jax.tokenizer import Tokenizer
from bi_jax.tokenizer_gguf import PRE_TOKENIZERS, tokenizer_from_gguf

SPECIAL = ["<|end|>", "<|start|>", "<tool>", "[PAD3]"]
TYPES = [3, 3, 4, 5]
MERGES = ["a b", "\u0120 ab", "1 2", "12 3"]


def metadata(**changes):
    letters = sorted(ByteLevel.alphabet())
    tokens = SPECIAL + letters + ["ab", "\u0120ab", "12", "123"]
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": TYPES + [1] * (len(tokens) - len(TYPES)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
    }
    found |= {f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()}
    return {key: value for key, value in found.items() if value is not None}


def cut(pre: str, text: str) -> list[str]:
    backend = tokenizer_from_gguf(metadata(ggml__pre=pre)).backend
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    return [
        piece.replace("\u0120", " ") for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)
    ]


@pytest.mark.parametrize(
    ("pre", "digits", "contraction", "newlines", "case"),
    [
        ("gpt-2", ["12345"], ["I", "'", "LL"], ["a", "!", "\u010a", "\u010a", "b"], ["aBc"]),
        ("smollm", [*"12345"], ["I", "'", "LL"], ["a", "!", "\u010a", "\u010a", "b"], ["aBc"]),
        ("starcoder", [*"12345"], ["I", "'", "LL"], ["a", "!", "\u010a", "\u010a", "b"], ["aBc"]),
        ("llama-bpe", ["123", "45"], ["I", "'LL"], ["a", "!\u010a\u010a", "b"], ["aBc"]),
        ("qwen2", [*"12345"], ["I", "'LL"], ["a", "!\u010a\u010a", "b"], ["aBc"]),
        ("tekken", [*"12345"], ["I", "'LL"], ["a", "!\u010a\u010a", "b"], ["a", "Bc"]),
    ],
)
def test_each_pre_tokenizer_cuts_in_its_own_way(pre, digits, contraction, newlines, case):
    assert cut(pre, "12345") == digits
    assert cut(pre, "I'LL") == contraction
    assert cut(pre, "a!\n\nb") == newlines
    assert cut(pre, "aBc") == case
    assert cut(pre, "x  y z") == ["x", " ", " y", " z"]


def test_other_names_are_the_same_pipelines():
    assert PRE_TOKENIZERS["llama3"] is PRE_TOKENIZERS["llama-v3"] is PRE_TOKENIZERS["llama-bpe"]
    assert PRE_TOKENIZERS["smollm"] is PRE_TOKENIZERS["starcoder"]


def test_qwen2_composes_accents_and_the_others_do_not():
    assert cut("qwen2", "e\u0301") == cut("qwen2", "\u00e9")
    assert cut("llama-bpe", "e\u0301") != cut("llama-bpe", "\u00e9")


def test_whole_words_skip_the_merges_where_the_model_says_so():
    """123 is in the vocabulary but no chain of these merges reaches it."""
    changes = {"ggml__merges": ["1 2"], "ggml__add_bos_token": False}
    plain = tokenizer_from_gguf(metadata(**changes)).backend
    whole = tokenizer_from_gguf(metadata(**changes, ggml__pre="llama-bpe")).backend
    assert len(whole.encode("123").ids) == 1
    assert len(plain.encode("123").ids) > 1


def test_kinds_of_tokens():
    found = tokenizer_from_gguf(metadata())
    tokenizer = Tokenizer(found.backend)
    assert tokenizer.encode("<|end|>ab<tool>")[0] == 0
    assert tokenizer.encode("<tool>") == [2]
    assert tokenizer.decode([0, 2]) == "<tool>"  # user-defined tokens are text
    assert tokenizer.decode([0, 2], skip_special_tokens=False) == "<|end|><tool>"
    assert len(tokenizer.encode("[PAD3]")) == 6 and tokenizer.decode([3]) == ""
    assert found.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}


def test_end_tokens_and_chat_templates():
    found = tokenizer_from_gguf(
        metadata(ggml__eot_token_id=1, ggml__eom_token_id=0, chat_template="D")
        | {"tokenizer.chat_template.rag": "R"}
    )
    assert found.eos_token_ids == (0, 1)
    assert found.chat_templates == {"default": "D", "rag": "R"}


def write(path, values):
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_is_read_and_bos_is_added_as_it_says(tmp_path):
    def begins_with_bos(**changes):
        path = write(tmp_path / "x.gguf", metadata(**changes))
        return Tokenizer.from_pretrained(path).encode("ab")[0] == 1

    assert not begins_with_bos()
    assert begins_with_bos(ggml__add_bos_token=True)
    assert begins_with_bos(ggml__pre="llama-bpe")
    assert not begins_with_bos(ggml__pre="llama-bpe", ggml__add_bos_token=False)
    tokenizer = Tokenizer.from_pretrained(tmp_path / "x.gguf")
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == ((0,), 1)
    assert tokenizer.decode(tokenizer.encode(" ab 12\u00e9\U0001f389")) == " ab 12\u00e9\U0001f389"


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"ggml__model": None}, ValueError, "holds no tokenizer; name a folder"),
        ({"ggml__model": "llama"}, NotImplementedError, "of the kind 'llama'; only 'gpt2'"),
        (
            {"ggml__pre": "viking"},
            NotImplementedError,
            "pre-tokenizer 'viking'; supported are gpt-2",
        ),
        ({"ggml__pre": None}, NotImplementedError, "pre-tokenizer 'default'"),
        ({"ggml__tokens": None}, ValueError, "tokens must be a non-empty list"),
        ({"ggml__tokens": ["a", "b", "a"]}, ValueError, "tokens holds 'a' twice"),
        ({"ggml__token_type": [1]}, ValueError, "one entry for each of the 264 tokens"),
        ({"ggml__merges": ["ab"]}, ValueError, r"merges\[0\]='ab' must be two tokens"),
        ({"ggml__merges": ["a b", "zz y"]}, ValueError, "merges do not fit its vocabulary"),
        ({"ggml__eos_token_id": 264}, ValueError, "eos_token_id=264 is outside the vocabulary"),
        ({"ggml__eos_token_id": "2"}, ValueError, "eos_token_id='2' must be a token id"),
        ({"ggml__tokens": [1, 2]}, ValueError, "tokens must be a non-empty list of strings"),
        ({"ggml__merges": [3]}, ValueError, r"merges\[0\]=3 must be two tokens"),
        ({"ggml__pre": ["gpt-2"]}, NotImplementedError, "has the pre-tokenizer"),
    ],
)
def test_refusals_name_what_is_wrong(changes, kind, message):
    with pytest.raises(kind, match=message) as caught:
        tokenizer_from_gguf(metadata(**changes))
    if kind is NotImplementedError:
        assert "--tokenizer" in str(caught.value)
