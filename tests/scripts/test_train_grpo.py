"""A training run has one sequence of weights in every schedule, and goes on where it stopped."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from bi_jax import EngineConfig, SamplingParams
from bi_jax.engine import Engine
from bi_jax.identity import Identity, IdentityWarning
from scripts import train_grpo
from scripts.arithmetic import REWARDS, Question, questions, reward
from scripts.grpo_trainer import Rollout, Trainer, TrainerConfig, check_identity
from scripts.run_plot import plot
from scripts.train_grpo import advantages
from tests.bi_jax import small_trainer as small

PROMPTS, SAMPLES, STEPS = 2, 2, 3


@pytest.fixture(autouse=True, scope="module")
def _optax_promotes_dtypes():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _trainer(micro_batch: int) -> Trainer:
    config = TrainerConfig(
        learning_rate=1e-3,
        updates=2,
        kl_coef=0.05,
        clip=0.001,
        max_norm=0.5,
        micro_batch=micro_batch,
    )
    return Trainer(small.model(), config)


def _engine(seqs: int, tokens: int) -> Engine:
    config = EngineConfig(
        max_num_seqs=seqs, max_num_batched_tokens=tokens, page_size=32, max_model_len=64
    )
    return Engine(small.model(), config=config)


def _steps(engine: Engine, trainer: Trainer, first: int, last: int) -> list[dict]:
    """A run whose reward is how many even ids a completion holds."""
    found = []
    engine.update_weights(trainer.state())
    for step in range(first, last):
        rng = np.random.default_rng(step)
        prompts = [rng.integers(0, 96, 5 + i).tolist() for i in range(PROMPTS)]
        params = SamplingParams(n=SAMPLES, seed=step, max_tokens=16, ignore_eos=True)
        outputs = engine.generate(prompts, params)
        rewards = np.array(
            [[np.mean(np.array(c.token_ids) % 2 == 0) for c in o.outputs] for o in outputs]
        )
        metrics = trainer.update(Rollout.of(outputs, advantages(rewards), length=64))
        engine.update_weights(trainer.state())
        found.append({**metrics, "weights": trainer.digest()})
    return found


@pytest.fixture(scope="module")
def run() -> list[dict]:
    return _steps(_engine(4, 16), _trainer(2), 0, STEPS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "0"], "--steps: 0 must be 1 or more"),
        (["--checkpoint-every", "0"], "--checkpoint-every: 0 must be 1 or more"),
        (["--samples", "x"], "--samples: invalid count value"),
        (["--learning-rate", "nan"], "--learning-rate: nan must be a finite number, 0 or more"),
        (["--clip", "-1"], "--clip: -1 must be a finite number"),
        (["--seed", "-1"], "--seed -1 must be 0 or more"),
        (["--micro-batch", "3"], "--micro-batch 3 must be a power of two"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_before_the_work(options, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        train_grpo.arguments(options)
    assert said in capsys.readouterr().err


def test_a_run_is_not_written_over(tmp_path, capsys):
    out = ["--out", str(tmp_path), "--model", "no/such/model"]
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    assert train_grpo.main(out) == 2
    said = capsys.readouterr().err
    assert "holds a run: --resume goes on with it" in said and said.count("\n") == 1
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n'
    assert train_grpo.main([*out, "--resume"]) == 2
    assert "no/such/model" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_named(tmp_path):
    path = tmp_path / "checkpoints" / "000003"
    (path / "state").mkdir(parents=True)
    (path / "identity.json").write_text("{}")
    with pytest.raises(ValueError, match=r"the checkpoint .*000003 cannot be restored: "):
        _trainer(2).restore(tmp_path)


@pytest.mark.slow
def test_the_policy_that_learns_is_the_one_that_sampled(run):
    for metrics in run:
        assert metrics["sampler_trainer_difference"] == 0
        assert metrics["ratio_min"] == metrics["ratio_max"] == 1
        assert metrics["last_clip_fraction"] > 0  # the second update was off-policy
    assert run[0]["kl"] == 0 < run[-1]["kl"]
    assert len({metrics["weights"] for metrics in run}) == STEPS


@pytest.mark.slow
def test_another_schedule_trains_the_same_weights(run):
    again = _steps(_engine(2, 8), _trainer(4), 0, STEPS)
    assert again == run


@pytest.mark.slow
def test_a_stopped_run_goes_on(run, tmp_path):
    before = _trainer(2)
    engine = _engine(4, 16)
    _steps(engine, before, 0, 1)
    before.save(tmp_path, 1, engine.identity)
    (tmp_path / "checkpoints" / "000002").mkdir()  # one that was interrupted
    after = _trainer(2)
    step, saved = after.restore(tmp_path)
    assert (step, saved) == (1, engine.identity)
    assert _steps(engine, after, 1, STEPS) == run[1:]
    assert _trainer(2).restore(tmp_path / "elsewhere") == (0, None)


def test_a_resumed_run_says_what_has_changed():
    names = dict(ops=(), kernels="", chip="", platform="cpu", flags=(), audited=True, config="")
    saved = Identity(weights="abc", versions=(("jaxlib", "1"),), **names)
    check_identity(saved, saved)
    with pytest.raises(ValueError, match="digest def, and abc was written"):
        check_identity(saved, saved.with_weights("def"))
    other = dataclasses.replace(saved, versions=(("jaxlib", "2"),), weights="def")
    with pytest.warns(IdentityWarning, match=r"resumed run .* versions.jaxlib \(1 against 2\)"):
        check_identity(saved, other)


def test_questions_and_rewards():
    asked = questions(20, seed=1, step=3)
    assert asked == questions(20, seed=1, step=3) != questions(20, seed=1, step=4)
    question = Question(text="What is 3 + 5? Answer with the number only.", answer=8)
    texts = {"8": 1.2, " 8.\n": 1.2, "It is 8": 1.0, "9": 0.2, "eight": 0.0, "18": 0.2}
    assert {text: reward(question, text) for text in texts} == texts
    assert [REWARDS["lowercase"](question, t) for t in ("ab", "a1b2", "")] == [1, 0.5, 0]
    agreed = advantages(np.ones((2, 4)))
    assert not agreed.any()


def test_the_plot_is_an_image(tmp_path):
    log = tmp_path / "metrics.jsonl"
    names = ("reward", "gradient_norm", "clip_fraction", "sampler_trainer_difference")
    log.write_text("".join(json.dumps({n: float(i) for n in names}) + "\n" for i in range(3)))
    plot(log, tmp_path / "run.svg")
    assert (tmp_path / "run.svg").read_text().count("<polyline") == len(names)
