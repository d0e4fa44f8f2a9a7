"""Tiny models of every family, whose sizes do not divide, and engines on some of 8 devices."""

import numpy as np

from bi_jax import EngineConfig
from bi_jax.engine import Engine
from bi_jax.models.checkpoint.plan import parameter_shapes
from bi_jax.models.config import LinearScaling, RopeConfig, TransformerConfig
from bi_jax.models.transformer import Transformer, build_transformer
from tests.bi_jax import tiny

# F is 38 steps of 16, V divides by nothing, there are fewer KV heads than ranks.
LLAMA = TransformerConfig(
    family="llama",
    vocab_size=331,
    hidden_size=64,
    intermediate_size=608,
    num_layers=1,
    num_query_heads=9,
    num_kv_heads=3,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4),
    max_position=512,
)
FAMILIES = {
    "llama": LLAMA.replace(num_layers=2),
    "smollm2": LLAMA.replace(num_query_heads=6, num_kv_heads=2, tie_word_embeddings=True),
    "mistral": LLAMA.replace(
        family="mistral", num_query_heads=8, num_kv_heads=4, sliding_window=40
    ),
    "qwen2": LLAMA.replace(
        family="qwen2", num_query_heads=14, num_kv_heads=2, qkv_bias=True, tie_word_embeddings=True
    ),
    "qwen3": LLAMA.replace(
        family="qwen3",
        num_query_heads=4,
        num_kv_heads=1,
        intermediate_size=112,
        qk_norm=True,
        rope=RopeConfig(theta=1e6, scaling=LinearScaling(factor=2.0)),
    ),
}
# One program: prompts are cut into chunks of 16 tokens.
ENGINE = EngineConfig(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    token_buckets=(16,),
    page_size=32,
    num_pages=32,
)
PROMPTS = tiny.prompts_of((5, 21, 40))
PARAMS = tiny.params_of(len(PROMPTS))  # greedy and sampled by turns, 128 tokens and more


def parameters(config: TransformerConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random parameters; those of out and down are spread over powers of two.

    So the partial sums of the ranks differ in size, and the order in which they are added shows.
    """
    rng = np.random.default_rng(seed)
    params = {}
    for name, shape in parameter_shapes(config).items():
        values = rng.standard_normal(shape).astype(np.float32)
        if name.endswith("scale"):
            values = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        elif name.endswith(("out.weight", "down.weight")):
            values *= np.exp2(rng.integers(-6, 3, shape)).astype(np.float32) * shape[-1] ** -0.5
        elif not name.startswith("embed"):
            values *= shape[-1] ** -0.5
        elif config.tie_word_embeddings:
            values *= 2.0**-5  # or each token would draw itself
        params[name] = values
    return params


def model(config: TransformerConfig) -> Transformer:
    return build_transformer(config, parameters(config))


def engine(config: TransformerConfig, degree: int, **others: object) -> Engine:
    return Engine(model(config), config=ENGINE, tensor_parallel_size=degree, **others)  # type: ignore[arg-type]
