"""Whole runs of `train_grpo.py`: twenty steps twice, and killed in the middle and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from bi_jax.identity_file import read_identity
from bi_jax.models.checkpoint import save_orbax
from bi_jax.models.config import RopeConfig, TransformerConfig
from tests.bi_jax import small_trainer as small
from tests.source_tree import ROOT

STEPS, KILLED_AFTER = 20, 10
SCHEDULES = {
    "one": ("--micro-batch", "2", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"),
    "other": ("--micro-batch", "4", "--max-num-seqs", "3", "--max-num-batched-tokens", "24"),
}
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights and a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<end>": 0, **{piece: i + 1 for i, piece in enumerate(alphabet)}}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<end>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = TransformerConfig(
        family="llama",
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_query_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=1e4),
        max_position=128,
        tie_word_embeddings=True,
        eos_token_ids=(0,),
    )
    params = {name: jnp.asarray(value) for name, value in small.parameters(config).items()}
    save_orbax(folder, config, params)
    return folder


def _command(model: Path, out: Path, schedule: str, *more: str) -> list[str]:
    bits = ("--steps", str(STEPS), "--reward", "lowercase", "--learning-rate", "3e-4")
    bits += ("--updates", "2", "--kl-coef", "0.02", "--clip", "0.05")
    script = ROOT / "scripts" / "train_grpo.py"
    command = [sys.executable, str(script), "--model", str(model), "--out", str(out)]
    return [*command, *bits, *SCHEDULES[schedule], "--checkpoint-every", "5", *more]


def _run(model: Path, out: Path, schedule: str, *more: str) -> list[dict]:
    subprocess.run(_command(model, out, schedule, *more), check=True, cwd=ROOT)
    return _metrics(out)


def _metrics(out: Path) -> list[dict]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    timing = ("sampling_seconds", "training_seconds")
    return [{k: v for k, v in json.loads(line).items() if k not in timing} for line in lines]


@pytest.fixture(scope="module")
def run(model, tmp_path_factory) -> tuple[Path, list[dict]]:
    out = tmp_path_factory.mktemp("one")
    return out, _run(model, out, "one")


@pytest.mark.slow
def test_every_step_is_on_policy_and_moves_the_weights(run):
    out, steps = run
    assert len(steps) == STEPS
    for metrics in steps:
        assert metrics["sampler_trainer_difference"] == 0
        assert metrics["ratio_min"] == metrics["ratio_max"] == 1
        assert metrics["reward_spread"] > 0
    assert steps[0]["kl"] == 0 < steps[-1]["kl"]
    assert len({metrics["weights"] for metrics in steps}) == STEPS
    saved = [read_identity(out / "checkpoints" / f"{step:06d}") for step in (5, 10, 15, 20)]
    assert len({identity.weights for identity in saved}) == 4
    assert len({identity.with_weights("").short for identity in saved}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_same_run_again(run, model, tmp_path, schedule):
    assert _run(model, tmp_path, schedule) == run[1]


@pytest.mark.slow
def test_killed_and_resumed_under_another_schedule(run, model, tmp_path):
    process = subprocess.Popen(_command(model, tmp_path, "one"), cwd=ROOT)
    log, deadline = tmp_path / "metrics.jsonl", time.monotonic() + 3000
    while not log.exists() or len(log.read_text().splitlines()) <= KILLED_AFTER:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "checkpoints" / f"{STEPS:06d}").exists()
    assert _run(model, tmp_path, "other", "--resume") == run[1]
