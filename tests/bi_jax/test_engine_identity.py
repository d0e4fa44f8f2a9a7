"""Completions carry their identity, and nobody waits for it before it is read."""

import copy
import pickle
import threading
from typing import Any

import pytest
from flax import nnx

from bi_jax import CompletionOutput, RequestOutput, SamplingParams, engine
from tests.bi_jax import tiny

PROMPT = tiny.prompts_of((20,), seed=7)[0]
PARAMS = SamplingParams(max_tokens=3, seed=0)


@pytest.fixture
def slow_hash(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hashing waits until the event is set, but for the shared engine's own."""
    _ = tiny.shared_engine().identity
    go_on, digest_of_state = threading.Event(), engine.digest_of_state

    def slow(*args: Any, **kwargs: Any) -> str:
        assert go_on.wait(60)
        return digest_of_state(*args, **kwargs)

    monkeypatch.setattr(engine, "digest_of_state", slow)
    return go_on


def test_nothing_waits_for_the_weights_to_be_hashed(slow_hash: threading.Event):
    one = tiny.rescheduled()
    before = one.identity
    one.update_weights(one.runner.state)  # the first weights were hashed before they went
    (output,) = one.generate([PROMPT], PARAMS)
    shown = list(one.stream(PROMPT, PARAMS))
    assert len(shown) == 3 and not slow_hash.is_set()
    slow_hash.set()
    assert output.identity == output.outputs[0].identity == before.short == one.identity.short
    assert {part.identity for part in shown} == {before.short}


def test_completions_keep_the_identity_of_the_weights_that_made_them(slow_hash: threading.Event):
    one = tiny.rescheduled()
    first = one.identity.short
    one.update_weights(nnx.state(tiny.model(1)))
    (output,) = one.generate([PROMPT], PARAMS)
    update = threading.Thread(target=lambda: one.update_weights(one.runner.state))
    update.start()
    update.join(0.2)
    assert update.is_alive()  # a third set of weights is not made while the first is being hashed
    slow_hash.set()
    update.join(60)
    one.update_weights(nnx.state(tiny.model(0)))
    assert one.identity.short == first != output.identity


@pytest.mark.parametrize("twin", [copy.copy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_has_the_identity_itself(twin: Any):
    asked: list[int] = []

    def identity() -> str:
        asked.append(1)
        return "abc"

    kinds: dict[str, Any] = {"identity": identity, "outputs": ()}
    output = RequestOutput(request_id="a", prompt=None, prompt_token_ids=[1], **kinds)
    assert not asked
    assert twin(output).identity == output.identity == "abc" and len(asked) == 1
    given = CompletionOutput(index=0, token_ids=(), text="", logprobs=[], identity="def")  # type: ignore[arg-type]
    assert twin(given).identity == "def"
    assert CompletionOutput(index=0, token_ids=(), text="", logprobs=[]).identity == ""  # type: ignore[arg-type]


def test_what_hashing_raises_is_said_to_whoever_asks(monkeypatch: pytest.MonkeyPatch):
    one = tiny.rescheduled()

    def broken(*args: Any, **kwargs: Any) -> str:
        raise OSError("no memory")

    monkeypatch.setattr(engine, "digest_of_state", broken)
    one.update_weights(one.runner.state)
    (output,) = one.generate([PROMPT], PARAMS)
    assert len(output.outputs[0].token_ids) == 3
    with pytest.raises(OSError, match="no memory"):
        _ = output.identity
