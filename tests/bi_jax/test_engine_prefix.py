"""What the prefix cache saves, counted to the token, and what it must never hand out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bi_jax import SamplingParams
from bi_jax.models.transformer import build_transformer
from bi_jax.testing import assert_same_bits
from tests.bi_jax import tiny

PROMPT = tiny.prompts_of((130,), seed=21)[0]  # four full pages of 32 and two tokens
PARAMS = SamplingParams(seed=3, max_tokens=8, ignore_eos=True)


def counts(engine) -> tuple[int, int]:
    metrics = engine.metrics()
    return metrics.tokens_computed, metrics.tokens_reused


def other_weights() -> nnx.State:
    return nnx.state(build_transformer(tiny.CONFIG, tiny.parameters(seed=1)))


@pytest.mark.parametrize(
    ("length", "reused"),
    [(31, 0), (32, 0), (33, 32), (64, 32), (65, 64), (130, 128)],
)
def test_a_second_request_computes_what_is_not_in_full_pages(length: int, reused: int):
    """The last token is computed in any case: the next one is drawn from its logits."""
    engine = tiny.rescheduled()
    first = engine.generate([PROMPT[:length]], PARAMS)
    assert counts(engine) == (length + 7, 0)
    second = engine.generate([PROMPT[:length]], PARAMS)
    assert counts(engine) == (2 * (length + 7) - reused, reused)
    tiny.assert_same_completions(second, first)


def test_samples_share_the_pages_of_their_prompt():
    engine = tiny.rescheduled()
    params = dataclasses.replace(PARAMS, n=4)
    shared = engine.generate([PROMPT], params)
    assert counts(engine) == (130 + 3 * 2 + 4 * 7, 3 * 128)
    apart = tiny.rescheduled(prefix_caching=False)
    tiny.assert_same_completions(shared, apart.generate([PROMPT], params))
    assert counts(apart) == (4 * (130 + 7), 0)


def test_a_completion_that_is_read_again_as_a_prompt_is_found():
    """A conversation goes on: pages that hold drawn tokens are known as well."""
    engine = tiny.rescheduled()
    params = dataclasses.replace(PARAMS, max_tokens=40)
    first = engine.generate([PROMPT], params)[0].outputs[0]
    longer = [*PROMPT, *first.token_ids, 7]
    computed, _ = counts(engine)
    warm = engine.generate([longer], PARAMS)
    assert counts(engine) == (computed + 171 - 160 + 7, 160)
    cold = tiny.rescheduled(prefix_caching=False).generate([longer], PARAMS)
    tiny.assert_same_completions(warm, cold)


def test_prompts_whose_logprobs_are_wanted_are_computed_in_full():
    engine = tiny.rescheduled()
    engine.generate([PROMPT], PARAMS)
    computed, _ = counts(engine)
    params = dataclasses.replace(PARAMS, prompt_logprobs=0, n=2)
    warm = engine.generate([PROMPT], params)[0]
    # The first sample computes the prompt again, the second finds its pages.
    assert counts(engine) == (computed + 130 + 2 + 2 * 7, 128)
    cold = tiny.rescheduled(prefix_caching=False).generate([PROMPT], params)[0]
    tiny.assert_same_completions([warm], [cold])
    assert_same_bits(warm.prompt_logprobs, cold.prompt_logprobs)


def test_new_weights_find_no_old_pages(monkeypatch: pytest.MonkeyPatch):
    engine = tiny.rescheduled()
    old = engine.generate([PROMPT], PARAMS)
    assert engine.metrics().pages_kept == 4
    engine.update_weights(other_weights())
    assert engine.metrics().pages_kept == 0
    computed, _ = counts(engine)
    new = engine.generate([PROMPT], PARAMS)
    assert counts(engine) == (computed + 137, 0)
    assert (old[0].weights_version, new[0].weights_version) == (0, 1)
    assert old[0].outputs[0].bits() != new[0].outputs[0].bits()
    assert old[0].identity != new[0].identity
    fresh = engine.rescheduled(prefix_caching=False).generate([PROMPT], PARAMS)
    tiny.assert_same_completions(new, fresh)

    # The control: with stale pages the bits are others.
    stale = tiny.rescheduled()
    stale.generate([PROMPT], PARAMS)
    monkeypatch.setattr(stale.scheduler.cache, "clear", lambda *, weights_version: None)
    stale.update_weights(other_weights())
    wrong = stale.generate([PROMPT], PARAMS)
    assert wrong[0].outputs[0].bits() != new[0].outputs[0].bits()

    engine.update_weights(nnx.state(tiny.model()))
    tiny.assert_same_completions(engine.generate([PROMPT], PARAMS), old, "back again")


def test_new_weights_are_refused_while_requests_run_and_when_they_do_not_fit():
    engine = tiny.rescheduled()
    request = engine.make_request(PROMPT, PARAMS, "mine")
    engine.add_request(request)
    engine.step()
    with pytest.raises(ValueError, match="only while idle, and 1 requests are running"):
        engine.update_weights(other_weights())
    engine.abort("mine")
    wrong = jax.tree.map(lambda a: a[:-1], other_weights())
    with pytest.raises(ValueError, match="expected a weight of shape"):
        engine.update_weights(wrong)
    assert engine.weights_version == 0


def test_new_weights_are_copies_and_compile_nothing():
    engine = tiny.rescheduled()
    engine.generate([PROMPT], PARAMS)
    compiled = engine.metrics().programs_compiled
    state = jax.tree.map(jnp.asarray, other_weights())
    engine.update_weights(state)
    before = engine.generate([PROMPT], PARAMS)
    for leaf in jax.tree.leaves(state):
        leaf.delete()  # a trainer that donates its parameters
    engine.scheduler.cache.clear(weights_version=1)
    tiny.assert_same_completions(engine.generate([PROMPT], PARAMS), before)
    assert engine.metrics().programs_compiled == compiled


def test_metrics_say_what_happened():
    engine = tiny.rescheduled()
    engine.generate([PROMPT, PROMPT[:40]], PARAMS)
    metrics = engine.metrics()
    assert (metrics.requests_finished, metrics.requests_running, metrics.tokens_drawn) == (2, 0, 16)
    assert metrics.pages == 160 and metrics.pages_in_use == 0 and metrics.pages_kept == 4
    assert metrics.tokens_a_second > 0 and metrics.busy_seconds > 0
    for pair in (metrics.step_ms, metrics.first_token_ms, metrics.request_ms):
        assert pair is not None and 0 < pair[0] <= pair[1]
    assert metrics.programs_compiled >= 2 and metrics.compile_seconds > 0
    assert 0 < metrics.cache_hit_rate < 1 and np.isclose(
        metrics.cache_hit_rate,
        metrics.tokens_reused / (metrics.tokens_reused + metrics.tokens_computed),
    )
