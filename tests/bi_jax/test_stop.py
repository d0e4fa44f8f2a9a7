"""Stop strings against a reading of the text letter by letter, and what may be shown meanwhile."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bi_jax.request import SamplingParams
from bi_jax.stop import CompletionText, StopChecker
from tests.bi_jax.text_cases import load


def brute_force(pieces: list[str], stops: list[str], min_tokens: int):
    """(text, stop string or None, number of pieces needed), one letter after the other."""
    floor = len("".join(pieces[:min_tokens]))
    text = ""
    for place, piece in enumerate(pieces):
        for letter in piece:
            text += letter
            ended = [stop for stop in stops if text.endswith(stop)] if len(text) > floor else []
            if ended:
                longest = max(ended, key=len)
                return text[: -len(longest)], longest, place + 1
    return text, None, len(pieces)


# Few letters, so that stop strings overlap one another and themselves.
words = st.text("ab", max_size=4)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


@settings(max_examples=1000)
@given(pieces=st.lists(words, max_size=10), stops=stop_lists, min_tokens=st.integers(0, 4))
@example(["aab"], ["aa", "b"], 0)
@example(["ab", "a"], ["aba", "a"], 1)
@example(["abab", "b"], ["babb", "ab"], 1)
def test_stop_strings_are_found_wherever_they_begin_and_end(pieces, stops, min_tokens):
    want_text, want_stop, want_pieces = brute_force(pieces, stops, min_tokens)
    checker = StopChecker(stop=stops, min_tokens=min_tokens)
    shown, read = "", ""
    for place, piece in enumerate(pieces):
        assert not checker.push_token(7)
        shown += checker.push_text(piece)
        read += piece
        if checker.stopped:
            assert place + 1 == want_pieces
            break
        # What was shown is text for good: no ending of it may still grow into a stop string.
        for stop in stops:
            for length in range(1, len(stop)):
                if read.endswith(stop[:length]):
                    assert len(shown) <= len(read) - length
    shown += checker.flush()
    assert (shown, checker.stop_reason) == (want_text, want_stop)
    assert checker.stopped == (want_stop is not None)


@settings(max_examples=300)
@given(text=st.text("ab", max_size=20), stops=stop_lists, cuts=st.sets(st.integers(0, 20)))
def test_neither_the_cuts_nor_the_order_of_stop_strings_matter(text, stops, cuts):
    ends = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    results = set()
    for order in (stops, stops[::-1]):
        for pieces in (
            [text],
            [text[a:b] for a, b in itertools.pairwise(ends)],
            list(text),
        ):
            checker = StopChecker(stop=order)
            shown = ""
            for piece in pieces:
                checker.push_token(7)
                shown += checker.push_text(piece)
                if checker.stopped:
                    break
            results.add((shown + checker.flush(), checker.stop_reason))
    assert len(results) == 1


def test_control_a_search_in_single_pieces_would_miss_them():
    pieces, stops = ["x", "EN", "D", "y"], ["END"]
    assert not any(stop in piece for piece in pieces for stop in stops)
    assert brute_force(pieces, stops, 0) == ("x", "END", 3)


def test_text_that_could_become_a_stop_string_is_held_back():
    checker = StopChecker(stop=["\n\nUser:"])
    shown = []
    for piece in ["Hi", "\n", "\n", "U", "ser", "s", "\n\nUser", ": more"]:
        checker.push_token(1)
        shown.append(checker.push_text(piece))
    assert shown == ["Hi", "", "", "", "", "\n\nUsers", "", ""]
    assert (checker.stopped, checker.stop_reason, checker.flush()) == (True, "\n\nUser:", "")


def test_stop_tokens_end_tokens_and_min_tokens():
    ids = {"stop_token_ids": [5], "eos_token_ids": [2]}
    checker = StopChecker(**ids)
    assert not checker.push_token(3) and checker.push_token(2)
    assert (checker.stopped, checker.stop_reason) == (True, None)
    checker = StopChecker(**ids, ignore_eos=True)
    assert not checker.push_token(2) and checker.push_token(5)
    assert checker.stop_reason == 5
    checker = StopChecker(**ids, min_tokens=2)
    assert [checker.push_token(token) for token in (2, 5, 2)] == [False, False, True]
    both = StopChecker(stop_token_ids=[2], eos_token_ids=[2])
    assert both.push_token(2) and both.stop_reason == 2


# Tokens to text ----------------------------------------------------------------------------------


def run(tokens: list[int], **params):
    completion = CompletionText(load("smollm2"), SamplingParams(**params))
    shown = ""
    for count, token in enumerate(tokens):
        shown += completion.push(token)
        if completion.finish_reason:
            assert shown == completion.text
            return completion, count + 1
    shown += completion.finish("length")
    assert shown == completion.text
    return completion, len(tokens)


def test_a_completion_ends_on_end_tokens_stop_strings_and_length():
    tokenizer = load("smollm2")
    tokens = tokenizer.encode("One two three.")
    done, used = run([*tokens, 2, *tokens])
    assert (done.text, done.finish_reason, done.stop_reason) == ("One two three.", "stop", None)
    assert used == done.num_tokens == len(tokens) + 1

    done, used = run([*tokens, 2, *tokens], ignore_eos=True)
    assert (done.text, done.finish_reason) == ("One two three." * 2, "length")

    done, used = run(tokens, max_tokens=2)
    assert (done.text, done.finish_reason, used) == (tokenizer.decode(tokens[:2]), "length", 2)

    done, used = run(tokens, stop=["o thr"])
    assert (done.text, done.finish_reason, done.stop_reason) == ("One tw", "stop", "o thr")

    done, used = run(tokens, stop_token_ids=[tokens[2]])
    assert (done.text, done.stop_reason, used) == (tokenizer.decode(tokens[:2]), tokens[2], 3)


def test_held_back_text_is_not_lost_when_the_length_ends_it():
    tokenizer = load("smollm2")
    tokens = tokenizer.encode("ab cd")
    done, _ = run(tokens, stop=["cde"], max_tokens=len(tokens))
    assert (done.text, done.finish_reason) == ("ab cd", "length")
    half = tokenizer.encode("\U0001f389")[:-1]
    done, _ = run(half, max_tokens=len(half))
    assert (done.text, done.finish_reason) == ("\ufffd", "length")
    done, _ = run([*half, 2])
    assert (done.text, done.finish_reason) == ("\ufffd", "stop")
    done, _ = run(half, stop=["\ufffd"], max_tokens=len(half))
    assert (done.text, done.finish_reason, done.stop_reason) == ("", "stop", "\ufffd")


def test_an_aborted_completion_keeps_its_text():
    completion = CompletionText(load("smollm2"), SamplingParams(stop="cde"))
    for token in load("smollm2").encode("ab cd"):
        completion.push(token)
    assert completion.finish("abort") == " cd"[1:]
    assert (completion.text, completion.finish_reason) == ("ab cd", "abort")
    with pytest.raises(ValueError, match="has ended"):
        completion.push(5)


def test_without_a_tokenizer_there_are_ids_only():
    with pytest.raises(ValueError, match="needs a tokenizer"):
        CompletionText(None, SamplingParams(stop="x"))
    completion = CompletionText(None, SamplingParams(max_tokens=3), eos_token_ids=[9])
    assert [completion.push(token) for token in (1, 9)] == ["", ""]
    assert (completion.text, completion.finish_reason) == ("", "stop")


@settings(max_examples=200)
@given(data=st.data())
def test_random_tokens_with_stop_strings_taken_from_their_text(data):
    tokenizer = load("smollm2")
    tokens = data.draw(st.lists(st.integers(17, 49151), min_size=1, max_size=20))
    whole = tokenizer.decode(tokens)
    start = data.draw(st.integers(0, len(whole)))
    stop = whole[start : start + data.draw(st.integers(1, 6))]
    if not stop:
        return
    done, _ = run(tokens, stop=[stop])
    want, reason, _ = brute_force(list(whole), [stop], 0)
    assert (done.text, done.stop_reason, done.finish_reason) == (want, reason, "stop")
