"""Prints the digest of a fixed piece of work; run as a module, in a new process."""

from bi_jax.engine import Engine
from tests.bi_jax import tiny


def digest_of(engine: Engine) -> str:
    """Of ragged prompts, greedy and sampled, 128 tokens and more each."""
    prompts = tiny.prompts_of((5, 61, 130), seed=6)
    outputs = engine.generate(prompts, tiny.params_of(3))
    assert tiny.distinct_tokens(outputs) >= 32
    return tiny.digest(outputs)


if __name__ == "__main__":
    # One bucket, one program to compile.
    print(digest_of(tiny.new_engine(max_num_batched_tokens=16, token_buckets=(16,))))
