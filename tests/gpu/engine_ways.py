"""Many schedules of one load, for tests of the engine on a card."""

import functools
import hashlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bi_jax import Engine, RequestOutput, SamplingParams
from bi_jax.models import Transformer, TransformerConfig, build_transformer, parameter_names

TOKENS = 256
REQUESTS = 64
LONGEST = 250  # with its completion no request is longer than 512 tokens
# Around pages, KV blocks and tiles.
LENGTHS = (1, 2, 5, 8, 17, 31, 33, 63, 64, 65, 77, 90, 127, 128, 129, 150, 191, 200, 249, LONGEST)

Load = list[tuple[list[int], SamplingParams]]


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key: jax.Array, *, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(shape[-1] ** -0.5, dtype)


def random_model(config: TransformerConfig) -> Transformer:
    """Random parameters made on the card, one small program a shape: all in one takes a minute."""
    names = parameter_names(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), len(names))
    params = {
        name: jnp.ones(shape, config.param_dtype)
        if name.endswith("scale")
        else _normal(key, shape=shape, dtype=config.param_dtype)
        for key, (name, shape) in zip(keys, names.items(), strict=True)
    }
    return build_transformer(config, params)


def load_of(vocab: int, requests: int = REQUESTS, tokens: int = TOKENS) -> Load:
    """Ragged requests, greedy and sampled in turn; some begin alike, so that pages are shared."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, vocab, 2 * 64).tolist()
    load = []
    for index in range(requests):
        ids = rng.integers(0, vocab, LENGTHS[index % len(LENGTHS)]).tolist()
        if index % 8 == 7:
            ids = (shared + ids)[:LONGEST]
        params = SamplingParams(
            temperature=(0.0, 1.0)[index % 2], seed=index, max_tokens=tokens, ignore_eos=True
        )
        load.append((ids, params))
    return load


def together(engine: Engine, load: Load) -> list[RequestOutput]:
    prompts, params = zip(*load, strict=True)
    return engine.generate(list(prompts), list(params))


def trickled(engine: Engine, load: Load) -> list[RequestOutput]:
    """One more request every other step."""
    actives, steps = [], 0
    while len(actives) < len(load) or engine.has_unfinished_requests:
        if steps % 2 == 0 and len(actives) < len(load):
            prompt, params = load[len(actives)]
            actives.append(engine.add_request(engine.make_request(prompt, params)))
        engine.step()
        steps += 1
    return [active.final for active in actives]


def among_aborted(engine: Engine, load: Load) -> list[RequestOutput]:
    """Half as many strangers come first and are aborted one by one while the load runs."""
    strangers, actives = [], []
    for index, (prompt, _) in enumerate(load[: len(load) // 2]):
        ids = [*prompt[::-1], *prompt[:7]]
        params = SamplingParams(temperature=1.0, seed=index, max_tokens=TOKENS, ignore_eos=True)
        strangers.append(engine.add_request(engine.make_request(ids, params)).request.request_id)
    for prompt, params in load:
        actives.append(engine.add_request(engine.make_request(prompt, params)))
    while engine.has_unfinished_requests:
        engine.step()
        engine.step()
        if strangers:
            engine.abort(strangers.pop())
    return [active.final for active in actives]


def warm(engine: Engine, load: Load) -> list[RequestOutput]:
    """Once more on the pages that a first run left behind."""
    together(engine, load)
    before = engine.metrics().tokens_reused
    outputs = together(engine, load)
    assert engine.metrics().tokens_reused > before
    return outputs


def preempted(engine: Engine, load: Load) -> list[RequestOutput]:
    """On fewer pages than the load needs."""
    outputs = together(engine, load)
    assert engine.metrics().preemptions > 0
    return outputs


def schedules(engine: Engine, load: Load) -> Iterator[tuple[str, list[RequestOutput]]]:
    """Name and outputs of the load under every schedule.

    `engine` has token buckets of 8, 64, 512 and 8192 and at least 64 places.
    """
    some = load[::9]
    twin = engine.rescheduled
    yield "once more, reversed", together(twin(), load[::-1])[::-1]
    yield "budget 64", together(twin(max_num_batched_tokens=64), load)
    yield "chunks of 77", together(twin(max_num_batched_tokens=77), load)
    yield (
        "one bucket of 512",
        together(twin(max_num_batched_tokens=512, token_buckets=(512,)), load),
    )
    yield "trickled", trickled(twin(), load)
    yield "no prefix cache", together(twin(prefix_caching=False), load)
    yield "warm prefix cache", warm(twin(), load)
    yield "preempted", preempted(twin(num_pages=120, max_num_batched_tokens=512), load)
    yield "neighbours aborted", among_aborted(twin(max_num_batched_tokens=512), load)
    yield "8 of them, 7 places", together(twin(max_num_seqs=7), some)


def completion_digests(outputs: list[RequestOutput]) -> list[str]:
    return [hashlib.sha256(o.outputs[0].bits()).hexdigest() for o in outputs]


def digest_of(digests: list[str]) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def distinct_tokens(outputs: list[RequestOutput], *, greedy: bool) -> int:
    """Token ids that occur in the greedy, or the sampled, completions."""
    chosen = (o for o in outputs if o.sampling_params.greedy == greedy)
    return len({token for o in chosen for token in o.outputs[0].token_ids})
