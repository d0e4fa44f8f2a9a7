"""The Tunix integration: its contract on a stand-in, and a GRPO run where Tunix is installed."""

import importlib
import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bi_jax import EngineConfig
from bi_jax.models.transformer import build_transformer
from bi_jax.testing import assert_same_bits, bit_difference
from tests.bi_jax import small_trainer as small
from tests.bi_jax.integrations import tunix_stand_in as stand_in
from tests.source_tree import ROOT, import_graph

PAD, END, NEW = 0, 2, 12
CONFIG = small.CONFIG.replace(num_layers=1, qkv_bias=False, qk_norm=False)
SETTINGS = EngineConfig(
    max_num_seqs=4,
    max_num_batched_tokens=8,
    token_buckets=(8,),
    page_size=32,
    num_pages=16,
    max_model_len=48,
    audit=False,
)
PROMPTS = ["hello", "a longer one", "x"]


class Letters:
    """Printable characters as ids from 3 on."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 29 for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i + 29) for i in ids)

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return END

    def pad_id(self) -> int:
        return PAD


@pytest.fixture(scope="module")
def tunix():
    with stand_in.integration() as module:
        module.install()
        yield module


def _actor(tunix: Any, scale: float = 1.0) -> Any:
    params = {name: scale * value for name, value in small.parameters(CONFIG).items()}
    return tunix.Actor(build_transformer(CONFIG, params))


def _config(**changes: Any) -> stand_in.RolloutConfig:
    settings = dict(max_prompt_length=16, max_tokens_to_generate=NEW, return_logprobs=True)
    return stand_in.RolloutConfig(**{**settings, "temperature": 0.7, **changes})


@pytest.fixture(scope="module")
def actor(tunix):
    return _actor(tunix)


@pytest.fixture(scope="module")
def rollout(tunix, actor):
    return tunix.Rollout(
        rollout_actor=actor,
        tokenizer=Letters(),
        mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("fsdp",)),
        rollout_config=_config(),
        engine_config=SETTINGS,
    )


def _padded(output: stand_in.RolloutOutput) -> tuple[jax.Array, jax.Array, np.ndarray, np.ndarray]:
    """Prompts, completions, where they hold tokens, and what was emitted there."""
    shape = (len(output.tokens), NEW)
    tokens, emitted, at = (np.zeros(shape, d) for d in (np.int32, np.float32, np.bool_))
    for row, (ids, logprobs) in enumerate(zip(output.tokens, output.logprobs or [], strict=True)):
        tokens[row, : len(ids)], emitted[row, : len(ids)] = ids, logprobs
        at[row, : len(ids)] = True
    return jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(tokens), at, emitted[at]


def _trainer(common: Any, actor: Any, prompts: jax.Array, tokens: jax.Array, **options: Any) -> Any:
    """As Tunix's loss calls it."""
    return common.compute_per_token_logps(
        *nnx.split(actor),
        prompt_tokens=prompts,
        completion_tokens=tokens,
        pad_id=PAD,
        eos_id=END,
        stop_gradient=False,
        temperature=0.7,
        **options,
    )


def test_the_trainer_recomputes_what_the_rollout_emitted(tunix, actor, rollout):
    output = rollout.generate(PROMPTS, _config())
    prompts, tokens, at, emitted = _padded(output)
    assert prompts.shape == (3, 16)
    assert not np.asarray(prompts)[2, :-2].any()  # padded on the left
    logps, logits = _trainer(tunix.common, actor, prompts, tokens, return_logits=True)
    assert_same_bits(np.asarray(logps)[at], emitted)
    # The control: Tunix's formula on our logits is not the sampler's.
    plain = jax.nn.log_softmax(logits)
    plain = np.asarray(jnp.take_along_axis(plain, tokens[:, :, None], axis=2))[:, :, 0][at]
    assert np.abs(plain - emitted).max() < 1e-5
    assert bit_difference(plain, emitted) is not None


@pytest.mark.slow
def test_the_gradient_in_a_step_of_tunix(tunix, actor, rollout):
    prompts, tokens, at, emitted = _padded(rollout.generate(PROMPTS, _config()))

    @nnx.jit
    def step(actor: Any) -> Any:
        def loss(actor: Any) -> Any:
            out = _trainer(tunix.common, actor, prompts, tokens, return_logits=True)
            return jnp.sum(jnp.where(at, out[0], 0)), out[0]

        return nnx.grad(loss, has_aux=True)(actor)

    assert_same_bits(np.asarray(rollout.get_per_token_logps(prompts, tokens))[at], emitted)
    gradient, logps = step(actor)
    assert_same_bits(np.asarray(logps)[at], emitted)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(gradient))


def test_an_update_reaches_the_engine(tunix, actor, rollout):
    mine, theirs = jax.tree.leaves(nnx.state(rollout.model())), jax.tree.leaves(nnx.state(actor))
    assert len(mine) == len(theirs)
    shared = [a is b for a, b in zip(mine, theirs, strict=True)]
    assert not all(shared)  # or Tunix would take them for one model and send no weights
    before = rollout.engine.identity.weights
    moved = _actor(tunix, scale=1.125)
    with jax.transfer_guard_device_to_host("disallow_explicit"):
        rollout.update_params(nnx.state(moved, nnx.Param), (nnx.Param,))
    assert rollout.engine.identity.weights != before
    prompts, tokens, at, emitted = _padded(rollout.generate(PROMPTS, _config()))
    again, _ = _trainer(tunix.common, moved, prompts, tokens, return_logits=True)
    stale, _ = _trainer(tunix.common, actor, prompts, tokens, return_logits=True)
    assert_same_bits(np.asarray(again)[at], emitted)
    assert bit_difference(np.asarray(stale)[at], emitted) is not None
    rollout.update_params(nnx.state(actor, nnx.Param), (nnx.Param,))


def test_the_size_of_a_call_changes_no_completion(rollout):
    def tokens(sizes: list[int]) -> list[list[int]]:
        rollout._completed, found = 0, []
        for size in sizes:
            output = rollout.generate(["hello"] * size, _config())
            found += [ids.tolist() for ids in output.tokens]
        return found

    together = tokens([4])
    assert tokens([1, 3]) == together
    assert len({tuple(ids) for ids in together}) == 4  # one prompt, four answers


@pytest.mark.slow
def test_a_padding_id_that_was_drawn_is_a_token(tunix, actor):
    prompts = jnp.array([[0, 0, 5, 0, 7]], jnp.int32)
    tokens = jnp.array([[9, 0, 11, 0, 0]], jnp.int32)
    logps = _trainer(tunix.common, actor, prompts, tokens)
    whole = small.token_logprobs(
        actor.model, jnp.array([[5, 0, 7, 9, 0, 11]]), temperature=0.7, mode="scaled"
    )
    assert_same_bits(np.asarray(logps)[0, :3], np.asarray(whole)[0, 3:])
    assert not np.asarray(logps)[0, 3:].any()


@pytest.mark.slow
def test_packed_rows(tunix, actor):
    tokens = jnp.array([[4, 5, 6, 7, 8, 9, 0, 0]], jnp.int32)
    ids = jnp.array([[1, 1, 1, 2, 2, 2, 0, 0]], jnp.int32)
    empty = jnp.zeros((1, 0), jnp.int32)
    packed, logits = _trainer(
        tunix.common, actor, empty, tokens, segment_ids=ids, return_logits=True
    )
    apart = _trainer(tunix.common, actor, tokens[:, 3:4], tokens[:, 4:6])
    assert_same_bits(np.asarray(packed)[0, 4:6], np.asarray(apart)[0])
    assert logits.shape == (1, 8, small.CONFIG.vocab_size)


def test_another_model_stays_with_tunix(tunix):
    other = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    empty = jnp.zeros((1, 1), jnp.int32)
    result = tunix.common.compute_per_token_logps(*nnx.split(other), empty, empty, 0, 2)
    assert result[0] == "Tunix's own"


@pytest.mark.slow
def test_the_samplers_cache_goes_on_where_it_ended(actor):
    """A prompt of two rows, padded on the left, then a token: as the logits of the whole."""
    rows = [[5, 6, 7, 8], [0, 0, 9, 10]]
    tokens = jnp.array(rows, jnp.int32)
    real = tokens != PAD
    positions = jnp.maximum(jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1, 0)
    mask = real[:, None, :] & jnp.tril(jnp.ones((1, 4, 4), jnp.bool_))
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, 4)))
    cache = actor.init_cache(2, 8)
    prefill, cache = actor(tokens, positions, cache, mask)
    new = jnp.array([[11], [12]], jnp.int32)
    decode, _ = actor(new, positions[:, -1:] + 1, cache, mask[:, -1:])
    for row, ids in enumerate(([5, 6, 7, 8, 11], [9, 10, 12])):
        whole, _ = actor(jnp.array([ids], jnp.int32))
        assert_same_bits(np.asarray(prefill)[row, -1], np.asarray(whole)[0, -2])
        assert_same_bits(np.asarray(decode)[row, 0], np.asarray(whole)[0, -1])


def test_refusals(tunix, actor, rollout):
    with pytest.raises(ValueError, match=r"a prompt has 21 tokens, expected at most 16"):
        rollout.generate(["y" * 20], _config())
    with pytest.raises(NotImplementedError, match="has no options"):
        rollout.generate(["y"], _config(), images=[1])
    with pytest.raises(NotImplementedError, match="takes all parameters"):
        rollout.update_params(nnx.state(actor), (nnx.LoRAParam,))
    make = dict(rollout_actor=actor, tokenizer=Letters(), mesh=None, rollout_config=_config())
    with pytest.raises(ValueError, match="must be a bi_jax Actor, got Linear"):
        tunix.Rollout(**{**make, "rollout_actor": nnx.Linear(2, 2, rngs=nnx.Rngs(0))})
    with pytest.raises(ValueError, match="data_type=bfloat16 must be the model's compute dtype"):
        tunix.Rollout(**{**make, "rollout_config": _config(data_type=jnp.bfloat16)})
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    with pytest.raises(NotImplementedError, match="on one device, got a mesh of 2"):
        tunix.Rollout(**{**make, "mesh": mesh})
    tunix.uninstall()
    assert tunix.common.compute_per_token_logps is stand_in.compute_per_token_logps
    try:
        with pytest.raises(ValueError, match=r"install\(\) must come first"):
            tunix.Rollout(**make)
    finally:
        tunix.install()


def test_without_tunix_one_sentence_says_so(monkeypatch):
    monkeypatch.delitem(sys.modules, stand_in.OURS, raising=False)
    for name in ("tunix", "tunix.rl"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"needs google-tunix .*pip install 'bi-jax\[tunix\]'"):
        importlib.import_module(stand_in.OURS)


def test_nothing_else_imports_tunix():
    graph = import_graph()
    found = {m for m, targets in graph.items() if any(t.split(".")[0] == "tunix" for t in targets)}
    assert found == {stand_in.OURS}
    assert not any(stand_in.OURS in targets for targets in graph.values())


@pytest.mark.slow
@pytest.mark.skipif(not stand_in.is_installed(), reason="google-tunix is not installed")
@pytest.mark.parametrize("rollout", ["bi_jax", "vanilla"])
def test_a_grpo_run_of_tunix(rollout):
    """In a process of its own: Tunix needs JAX as it is, without our tests' strictness."""
    command = [sys.executable, "-W", "ignore", "scripts/tunix_grpo.py", "--rollout", rollout]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    sampled = [line for line in lines if "differing" in line]
    updates = [line for line in lines if "kl" in line]
    assert len(sampled) >= 2 and len(updates) >= 4
    if rollout == "vanilla":  # the control
        assert any(line["differing"] for line in sampled)
        return
    assert all(line["differing"] == 0 and line["largest_difference"] == 0 for line in sampled)
    first = updates[0]
    assert (first["is_ratio/min"], first["is_ratio/max"], first["kl"]) == (1, 1, 0)
    assert any(line["is_ratio/max"] > 1 for line in updates)  # later inner updates moved
