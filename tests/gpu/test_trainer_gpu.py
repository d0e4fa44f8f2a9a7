"""The trainer on a card: it recomputes what was emitted, and its gradients keep their bits."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bi_jax import Engine, EngineConfig, RequestOutput, SamplingParams, token_logprobs
from bi_jax.audit_program import audit_compiled
from bi_jax.gradient_sum import accumulate
from bi_jax.models import (
    Transformer,
    build_transformer,
    find_demo_model,
    load_params,
    read_config,
)
from bi_jax.models.families.llama import LLAMA_3_1_8B
from bi_jax.pallas_kernels.float_order import LOWEST
from bi_jax.pallas_kernels.log_softmax import target_logprobs
from bi_jax.pallas_kernels.primitive import HOPPER
from bi_jax.pallas_kernels.sampling import choose_and_score
from bi_jax.stock_ops import stock_ops
from bi_jax.testing import assert_same_bits, bit_difference
from tests.bi_jax.trainer_rows import Rows
from tests.gpu.engine_ways import random_model

pytestmark = pytest.mark.gpu
ROWS, NEW, LENGTH = 64, 256, 320
DTYPES = dict(dtype="bfloat16", param_dtype="float32")
# Of four layers, three stand in a loop; shorter loops the compiler may take apart.
MODELS = ("SmolLM2-135M-Instruct", "four layers of Llama-3.1-8B")
Case = tuple[float, int, str, bool]
# Temperature, rows of a micro-batch, side of the padding, remat.
CASES = (
    (1.0, 1, "left", False),
    (1.0, 16, "right", True),
    (0.7, 2, "right", False),
    (0.7, 4, "left", True),
)
GRADIENT_ROWS = 8
SIZES = (1, 2, 4, 8)


def mode_at(temperature: float) -> str:
    return "raw" if temperature == 1 else "scaled"


def model_of(name: str) -> Transformer:
    if name == MODELS[0]:
        source = find_demo_model()
        config = read_config(source).replace(**DTYPES, max_position=1024)
        return build_transformer(config, load_params(source, config, dtype="float32"))
    small = dict(vocab_size=32768, bos_token_id=1, eos_token_ids=(2,), pad_token_id=None)
    return random_model(LLAMA_3_1_8B.replace(**DTYPES, **small, num_layers=4, max_position=1024))


def sampled(model: Transformer, modes: dict[float, str]) -> dict[float, list[RequestOutput]]:
    """64 completions of 256 tokens after prompts of 1 to 64, for each temperature."""
    settings = EngineConfig(
        max_num_seqs=128,
        max_num_batched_tokens=512,
        token_buckets=(128, 512),
        max_model_len=LENGTH,
        num_pages=700,
    )
    engine = Engine(model, config=settings)
    engine.warm_up(note=print)
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, LENGTH - NEW + 1, ROWS)
    prompts = [rng.integers(5, model.config.vocab_size, n).tolist() for n in lengths]
    params = [
        SamplingParams(
            temperature=temperature, seed=i, max_tokens=NEW, ignore_eos=True, logprobs_mode=mode
        )
        for temperature, mode in modes.items()
        for i in range(ROWS)
    ]
    started = time.perf_counter()
    outputs = engine.generate(prompts * len(modes), params)
    print(f"sampled in {time.perf_counter() - started:.1f} s", flush=True)
    assert len({token for o in outputs for token in o.outputs[0].token_ids}) > 1000
    return {t: outputs[i * ROWS : (i + 1) * ROWS] for i, t in enumerate(modes)}


class Trainer:
    """A model, what an engine emitted with it, and a user's programs, compiled side by side."""

    def __init__(
        self, name: str, model: Transformer, cases: Sequence[Case], sizes: Sequence[int] = ()
    ) -> None:
        self.name, self.model = name, model
        self.graph, self.params, self.rest = nnx.split(self.model, nnx.Param, ...)
        self._pool = ThreadPoolExecutor(4)
        self.forward = {case: self._compiled(*self._forward(*case)) for case in cases}
        self.gradient = {size: self._compiled(*self._gradient(size)) for size in sizes}
        self.audited = [self.forward[cases[0]]]
        if sizes:
            self.audited.append(self._compiled(*self._pullback(2)))
        modes = {temperature: mode_at(temperature) for temperature, *_ in cases}
        self.sampled = sampled(self.model, modes)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def rows(self, temperature: float, side: str) -> Rows:
        return Rows.of(self.sampled[temperature], LENGTH, side)

    def recompute(self, case: Case) -> tuple[np.ndarray, np.ndarray]:
        """What the trainer computes for all tokens drawn, and what was emitted."""
        temperature, size, side, _ = case
        rows = self.rows(temperature, side)
        _, program = self.forward[case].result()
        micros = [rows.micro(start, size) for start in range(0, ROWS, size)]
        started = time.perf_counter()
        found = [np.asarray(program(self.params, m.tokens, m.mask))[m.drawn] for m in micros]
        found, emitted = np.concatenate(found), rows.emitted[rows.drawn]
        differ = int((found.view(np.int32) != emitted.view(np.int32)).sum())
        seconds = time.perf_counter() - started
        print(f"{self.name}, {case}: {differ} of {found.size} differ, {seconds:.1f} s", flush=True)
        return found, emitted

    def logprobs(self, params: Any, tokens: Any, mask: Any, temperature: float) -> jax.Array:
        return token_logprobs(
            nnx.merge(self.graph, params, self.rest),
            tokens,
            segment_ids=mask,
            temperature=temperature,
            mode=mode_at(temperature),
            scan_layers=True,
        )

    def _forward(
        self, temperature: float, size: int, side: str, remat: bool
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        del side

        def run(params: Any, tokens: Any, mask: Any) -> jax.Array:
            return self.logprobs(params, tokens, mask, temperature)

        ids = jax.ShapeDtypeStruct((size, LENGTH), jnp.int32)
        return jax.checkpoint(run) if remat else run, (self.params, ids, ids)

    def _gradient(self, size: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        def loss(params: Any, tokens: Any, mask: Any, weights: Any) -> tuple[jax.Array, jax.Array]:
            out = self.logprobs(params, tokens, mask, 1.0)
            return jnp.sum(out * weights), out

        ids = jax.ShapeDtypeStruct((size, LENGTH), jnp.int32)
        weights = jax.ShapeDtypeStruct((size, LENGTH), jnp.float32)
        return jax.value_and_grad(loss, has_aux=True), (self.params, ids, ids, weights)

    def _pullback(self, size: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Without a loss of the user's, whose sum is XLA's."""

        def run(params: Any, tokens: Any, mask: Any, weights: Any) -> tuple[jax.Array, Any]:
            out, pull = jax.vjp(lambda p: self.logprobs(p, tokens, mask, 1.0), params)
            return out, pull(weights)

        return run, self._gradient(size)[1]

    def _compiled(self, run: Callable[..., Any], arguments: tuple[Any, ...]) -> Future[Any]:
        def compile_it() -> tuple[Any, Any]:
            started = time.perf_counter()
            traced = jax.jit(run).trace(*arguments)
            program = traced.lower().compile()
            seconds = time.perf_counter() - started
            print(f"compiled for {arguments[1].shape} in {seconds:.1f} s", flush=True)
            return traced, program

        return self._pool.submit(compile_it)


@pytest.fixture(scope="module", params=MODELS)
def trainer(request) -> Iterator[Trainer]:
    made = Trainer(request.param, model_of(request.param), CASES, SIZES)
    yield made
    made.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_trainer_recomputes_what_was_emitted(trainer, case):
    assert_same_bits(*trainer.recompute(case))


def test_the_trainer_recomputes_what_a_whole_model_of_8b_emitted():
    """All layers and the whole vocabulary, random weights; takes most of a card's memory."""
    model = random_model(LLAMA_3_1_8B.replace(**DTYPES, max_position=1024))
    case = (1.0, 4, "left", False)
    trainer = Trainer("Llama-3.1-8B", model, (case,))
    try:
        assert_same_bits(*trainer.recompute(case))
        print(f"audited, kernels {audit_compiled(*trainer.audited[0].result()).kernels}")
    finally:
        trainer.close()


@pytest.mark.parametrize("vocab", [32768, 49152, 128256, 151936])
def test_sampler_and_scorer_score_alike_at_every_temperature(vocab):
    """Two kernels, in which the last compiler once contracted different multiply-adds."""
    rows, rng = 64, np.random.default_rng(vocab)
    logits = jnp.asarray(4 * rng.standard_normal((rows, vocab)), jnp.float32)
    inverse = jnp.asarray(1 / rng.uniform(0.3, 3, rows), jnp.float32)
    words = jnp.asarray(rng.integers(0, 2**32, (rows, 2)), jnp.uint32)
    whole = jnp.full((rows,), LOWEST, jnp.int32), jnp.full((rows,), vocab, jnp.int32)

    @jax.jit
    def drawn(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        token, _, logprob = choose_and_score(
            logits, words, inverse, whole, inverse, whole, backend=HOPPER
        )
        return token, logprob

    @jax.jit
    def scored(logits: jax.Array, token: jax.Array) -> jax.Array:
        return target_logprobs(logits, token[:, None], inverse, *whole, backend=HOPPER)[0][:, 0]

    token, logprob = drawn(logits)
    assert_same_bits(np.asarray(scored(logits, token)), np.asarray(logprob))
    many, tokens = jnp.tile(logits, (16, 1)), jnp.tile(token, 16)
    inverse, whole = jnp.tile(inverse, 16), tuple(jnp.tile(a, 16) for a in whole)
    many_scores = target_logprobs(many, tokens[:, None], inverse, *whole, backend=HOPPER)[0]
    assert_same_bits(np.asarray(many_scores)[:rows, 0], np.asarray(logprob))


@functools.cache
def weights_of(trainer: Trainer) -> np.ndarray:
    """Random cotangents of the drawn tokens of the first rows."""
    drawn = trainer.rows(1.0, "right").drawn[:GRADIENT_ROWS]
    weights = np.random.default_rng(1).standard_normal(drawn.shape).astype(np.float32)
    return np.where(drawn, weights, np.float32(0))


def _ends(gradient: Any) -> list[Any]:
    """The first and the last leaf: a token table, and a norm's scale or the head."""
    return [jax.tree.leaves(gradient)[at] for at in (0, -1)]


def test_gradients_are_equal_for_every_micro_batch(trainer):
    rows, weights = trainer.rows(1.0, "right"), weights_of(trainer)
    expected, alone = None, []
    for size in SIZES:
        _, program = trainer.gradient[size].result()
        total, started = None, time.perf_counter()
        for start in range(0, GRADIENT_ROWS, size):
            micro = rows.micro(start, size)
            operands = (trainer.params, micro.tokens, micro.mask, weights[start : start + size])
            (_, out), gradient = program(*operands)
            assert_same_bits(np.asarray(out)[micro.drawn], micro.emitted[micro.drawn])
            total = accumulate(total, gradient, sequences=size)
            if size == 1:
                alone.append([np.asarray(leaf) for leaf in _ends(gradient)])
        assert total is not None
        found = [np.asarray(leaf) for leaf in jax.tree.leaves(total.result())]
        seconds = time.perf_counter() - started
        print(f"{trainer.name}: gradient in micro-batches of {size}, {seconds:.1f} s", flush=True)
        assert all(np.isfinite(leaf).all() and leaf.any() for leaf in found)
        expected = expected or found
        for got, wanted in zip(found, expected, strict=True):
            assert_same_bits(got, wanted)
    assert expected is not None
    # The control: one after the other. (The few elements of a scale may add up exactly.)
    plain = [functools.reduce(np.add, leaves) for leaves in zip(*alone, strict=True)]
    assert any(map(bit_difference, plain, _ends(expected)))


def test_the_trainers_programs_compute_in_our_ops_alone(trainer):
    """In the differentiated one too; nor is a kernel that changes pages in place fused."""
    for audited in trainer.audited:
        report = audit_compiled(*audited.result())
        print(f"{trainer.name}: audited, kernels {report.kernels}", flush=True)
    assert "bi_matmul_weight_gradient" in report.ours


def test_a_stock_trainer_computes_something_else(trainer):
    rows = trainer.rows(1.0, "right").micro(0, 16)
    stock = jax.jit(
        lambda p, t, m: token_logprobs(
            nnx.merge(trainer.graph, p, trainer.rest), t, segment_ids=m, ops=stock_ops()
        )
    )
    found = np.asarray(stock(trainer.params, rows.tokens, rows.mask))[rows.drawn]
    emitted = rows.emitted[rows.drawn]
    assert bit_difference(found, emitted) is not None
    error, share = np.abs(found - emitted), (found != emitted).mean()
    print(
        f"{trainer.name}: stock differs in {share:.1%} of {found.size}, "
        f"by up to {error.max():.3g}, {error.mean():.3g} on average",
        flush=True,
    )
    assert np.isfinite(error).all()
