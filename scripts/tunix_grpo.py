#!/usr/bin/env python3
"""GRPO by Google Tunix on a tiny random model: with our rollout, or with its own as the control.

    pip install 'bi-jax[tunix]'
    python scripts/tunix_grpo.py                  # sampler-trainer difference exactly 0
    python scripts/tunix_grpo.py --rollout vanilla

Prints a line of JSON a rollout, how far the log-probabilities that Tunix's trainer computes are
from those that were emitted while sampling, and one an update, with the ratio's range.
"""

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

try:
    from tunix.rl import rl_cluster
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rollout.base_rollout import RolloutConfig
except ModuleNotFoundError as error:
    if error.name != "tunix":
        raise
    sys.exit("error: Tunix is not installed; run pip install 'bi-jax[tunix]'")

from bi_jax import EngineConfig
from bi_jax.integrations import tunix as bi_tunix
from bi_jax.models import build_transformer, random_params
from bi_jax.models.config import RopeConfig, TransformerConfig

CONFIG = TransformerConfig(
    family="qwen3",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4),
    max_position=256,
    qk_norm=True,
    tie_word_embeddings=True,
)
PROMPTS = [["one and", "two"], ["three", "four of"], ["five", "six by"]]
GENERATIONS, PROMPT_LENGTH, NEW_TOKENS = 4, 16, 24
PAD, BEGIN, END, FIRST_LETTER = 0, 1, 2, 3


class Letters:
    """A tokenizer of printable characters with the five methods that Tunix asks for."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [FIRST_LETTER + ord(c) - 32 for c in text if 0 <= ord(c) - 32 < 93]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(32 + i - FIRST_LETTER) for i in ids if i >= FIRST_LETTER)

    def bos_id(self) -> int:
        return BEGIN

    def eos_id(self) -> int:
        return END

    def pad_id(self) -> int:
        return PAD


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The share of lower-case letters."""
    return [sum(c.islower() for c in text) / NEW_TOKENS for text in completions]


def build_cluster(rollout: str, updates: int, temperature: float) -> Any:
    """Tunix's cluster of an actor and a reference on one device."""
    params = random_params(CONFIG, seed=0)
    params["embed.embedding"] *= 4  # spread-out logits, so that completions differ
    actor, reference = (bi_tunix.Actor(build_transformer(CONFIG, params)) for _ in range(2))
    engine: Any = "vanilla"
    if rollout == "bi_jax":
        settings = EngineConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=128)
        engine = functools.partial(bi_tunix.Rollout, engine_config=settings)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine=engine,
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adam(1e-3),
            eval_every_n_steps=1000,
            max_steps=updates,
            mini_batch_size=2,
            train_micro_batch_size=1,
            rollout_micro_batch_size=1,
            compute_logps_micro_batch_size=1,
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=NEW_TOKENS,
            max_prompt_length=PROMPT_LENGTH,
            temperature=temperature,
            kv_cache_size=64,
            return_logprobs=True,
        ),
    )
    return rl_cluster.RLCluster(
        actor=actor, reference=reference, tokenizer=Letters(), cluster_config=config
    )


def sampler_trainer_difference(cluster: Any, output: Any) -> dict[str, Any]:
    """What Tunix's trainer computes for a rollout's tokens, against what was emitted."""
    shape = (len(output.tokens), NEW_TOKENS)
    tokens, emitted = np.full(shape, PAD, np.int32), np.zeros(shape, np.float32)
    for row, (ids, logprobs) in enumerate(zip(output.tokens, output.logprobs, strict=True)):
        tokens[row, : len(ids)], emitted[row, : len(ids)] = ids, logprobs
    prompts = jnp.asarray(output.left_padded_prompt_tokens)
    again = cluster.get_actor_per_token_logps(
        prompts, jnp.asarray(tokens), PAD, END, micro_batch_size=2
    )
    at = tokens != PAD
    ours, theirs = np.asarray(again, np.float32)[at], emitted[at]
    return {
        "tokens": int(at.sum()),
        "differing": int((ours.view(np.int32) != theirs.view(np.int32)).sum()),
        "largest_difference": float(np.abs(ours - theirs).max()),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--rollout", choices=("bi_jax", "vanilla"), default="bi_jax")
    parser.add_argument("--updates", type=int, default=4, help="two a step")
    parser.add_argument("--temperature", type=float, default=0.7)
    args = parser.parse_args(argv)
    bi_tunix.install()
    cluster = build_cluster(args.rollout, args.updates, args.temperature)
    sample = cluster.generate

    def generate(*positional: Any, **named: Any) -> Any:
        output = sample(*positional, **named)
        print(json.dumps(sampler_trainer_difference(cluster, output)), flush=True)
        return output

    cluster.generate = generate
    learner = GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(num_generations=GENERATIONS, num_iterations=2, beta=0.04),
        reward_fns=reward,
    )
    wanted = ("is_ratio/min", "is_ratio/max", "kl")

    def report(aux: Any) -> None:
        print(json.dumps({name: float(aux[name]) for name in wanted}), flush=True)

    cluster.actor_trainer._post_process_train_step = report
    learner.train([{"prompts": prompts} for prompts in PROMPTS])
    return 0


if __name__ == "__main__":
    sys.exit(main())
