"""Pieces of text join to the whole text, and no piece holds half a character."""

import functools

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from bi_jax.detokenize import WindowDetokenizer, make_detokenizer
from bi_jax.tokenizer import Tokenizer
from tests.bi_jax.text_cases import expected, load

NAMES = ("smollm2", "qwen3")


@functools.cache
def single_bytes(name: str) -> list[int]:
    """Tokens that are one byte each: where characters break."""
    return [token for token in range(400) if len(load(name).token_bytes(token)) == 1]


def ids(name: str) -> st.SearchStrategy[list[int]]:
    # Special tokens, and ids above the vocabulary as a wider row of logits has them, included.
    any_id = st.integers(0, load(name).vocab_size + 300)
    return st.lists(st.one_of(any_id, st.sampled_from(single_bytes(name))), max_size=40)


def pieces(detokenizer, tokens: list[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@pytest.mark.parametrize("name", NAMES)
def test_joined_pieces_equal_the_full_decode(name):
    tokenizer = load(name)

    @settings(max_examples=300)
    @given(tokens=ids(name), skip=st.booleans())
    def check(tokens, skip):
        got = pieces(make_detokenizer(tokenizer, skip_special_tokens=skip), tokens)
        assert "".join(got) == tokenizer.decode(tokens, skip)

    check()


@pytest.mark.parametrize("name", NAMES)
def test_text_is_cut_between_characters_only(name):
    """Encoded text has no broken character, so none may be seen, not even for a moment."""
    tokenizer = load(name)

    @settings(max_examples=200)
    @given(text=st.text(max_size=20))
    @example(
        "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u4f60\u597d \U0001f3f3\ufe0f\u200d\U0001f308"
    )
    def check(text):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        whole = tokenizer.decode(tokens, False)
        got = pieces(make_detokenizer(tokenizer, skip_special_tokens=False), tokens)
        assert "".join(got) == whole
        if "\ufffd" not in whole:
            assert not any("\ufffd" in piece for piece in got)

    check()


def test_the_fixtures_break_characters_apart():
    """Control: decoding token by token, or by the naive prefix, does show broken characters."""
    tokenizer = load("smollm2")
    tokens = next(c["ids"] for c in expected("smollm2")["texts"] if "\U0001f389" in c["text"])
    whole = tokenizer.decode(tokens)
    assert "".join(tokenizer.decode([token]) for token in tokens) != whole
    assert not all(whole.startswith(tokenizer.decode(tokens[:n])) for n in range(len(tokens)))
    assert "".join(pieces(make_detokenizer(tokenizer), tokens)) == whole


def test_a_character_waits_for_its_last_byte():
    tokenizer = load("qwen3")
    letter = {tokenizer.token_bytes(t): t for t in single_bytes("qwen3")}
    detokenizer = make_detokenizer(tokenizer)
    cat = [letter[bytes([byte])] for byte in "\U0001f431".encode()]
    assert [detokenizer.push(token) for token in cat] == ["", "", "", "\U0001f431"]
    assert detokenizer.push(cat[0]) == ""
    assert detokenizer.push(letter[b"a"]) == "\ufffda"
    assert [detokenizer.push(cat[0]), detokenizer.flush()] == ["", "\ufffd"]


def test_endless_broken_bytes_do_not_wait_for_ever():
    tokenizer = load("qwen3")
    bad = next(t for t in single_bytes("qwen3") if tokenizer.token_bytes(t) == b"\xff")
    for detokenizer in (make_detokenizer(tokenizer), WindowDetokenizer(tokenizer)):
        got = pieces(detokenizer, [bad] * 100)
        assert "".join(got) == "\ufffd" * 100
        assert len("".join(got[:50])) > 30


# Other decoders ----------------------------------------------------------------------------------


def sentencepiece_like() -> Tokenizer:
    """A tokenizer in the manner of Llama 2: spaces as U+2581, unknown characters as bytes."""
    words = ["<s>", "</s>", "\u2581", "\u2581a", "\u2581the", "b", "a", "c\u2581", "\u00e9"]
    vocabulary = {token: i for i, token in enumerate(words)}
    vocabulary |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return Tokenizer(backend)


def test_a_window_serves_decoders_that_look_at_the_first_token():
    tokenizer = sentencepiece_like()
    assert not tokenizer.is_byte_level
    first_byte = 9
    word = st.integers(0, first_byte - 1).map(lambda token: [token])
    character = st.characters(exclude_categories=("Cs",)).map(
        lambda letter: [first_byte + byte for byte in letter.encode()]
    )

    @settings(max_examples=300)
    @given(parts=st.lists(st.one_of(word, character), max_size=25), skip=st.booleans())
    @example([[4], [1]] + [[1]] * 20 + [[4]], True)
    @example([[2], [3]], True)
    def check(parts, skip):
        tokens = [token for part in parts for token in part]
        whole = tokenizer.decode(tokens, skip)
        got = pieces(make_detokenizer(tokenizer, skip_special_tokens=skip), tokens)
        assert "".join(got) == whole
        if "\ufffd" not in whole:
            assert not any("\ufffd" in piece for piece in got)

    check()
    spaced = [4, 4]  # control: piece by piece the second word loses its space
    assert "".join(tokenizer.decode([token]) for token in spaced) != tokenizer.decode(spaced)
