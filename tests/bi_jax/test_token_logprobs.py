"""The trainer recomputes, in another program, exactly what the engine emitted while sampling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bi_jax import trainer_logprobs
from bi_jax.audit_program import audit, inspect
from bi_jax.gradient_sum import accumulate
from bi_jax.kv_cache import make_cache
from bi_jax.models.families.llama import LLAMA_3_1_8B, SMOLLM2_135M
from bi_jax.models.transformer import Transformer
from bi_jax.ops import ON_HOPPER, transformer_ops
from bi_jax.stock_ops import stock_ops
from bi_jax.testing import assert_same_bits, bit_difference
from bi_jax.token_layout import PAGE_SIZE, lay_out, pages_for
from bi_jax.trainer_logprobs import token_logprobs
from tests.bi_jax import small_trainer as small
from tests.models.numpy_decoder import decoder_logits

SEQUENCES = len(small.LENGTHS)


def _emitted_again(batch: small.Batch, logprobs: jax.Array) -> None:
    at = batch.weights != 0
    assert_same_bits(np.asarray(logprobs)[at], batch.emitted[at])


def _global_gradient(
    size: int, batch: small.Batch, **step
) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """Of the whole batch, and of its micro-batches of `size`; log-probabilities are checked too."""
    params = small.split()[1]
    run, total, parts = small.train_step(**step), None, []
    for start in range(0, SEQUENCES, size):
        micro = batch.rows(start, size)
        gradient, logprobs = run(params, micro)
        _emitted_again(micro, logprobs)
        total = accumulate(total, gradient, sequences=size)
        parts.append(small.host(gradient))
    assert total is not None
    return small.host(total.result()), parts


@pytest.fixture(scope="module")
def rows_and_sum() -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    return _global_gradient(1, small.batch_of(small.completions()))


@pytest.fixture(scope="module")
def one_by_one(rows_and_sum) -> dict[str, np.ndarray]:
    return rows_and_sum[0]


def _same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name in actual:
        assert_same_bits(actual[name], expected[name])


@pytest.mark.parametrize(
    ("size", "side", "remat"),
    [
        pytest.param(2, "left", False, marks=pytest.mark.slow),
        (8, "hole", True),
        pytest.param(4, "right", False, marks=pytest.mark.slow),
    ],
)
def test_micro_batch_padding_and_remat_change_no_bit(size, side, remat, one_by_one, monkeypatch):
    # So that logits come in several parts.
    monkeypatch.setattr(trainer_logprobs, "LOGITS", 512 * small.CONFIG.vocab_size)
    batch = small.batch_of(small.completions(), side=side, length=192 if side == "hole" else 160)
    _same(_global_gradient(size, batch, remat=remat)[0], one_by_one)


def test_every_parameter_has_a_gradient(one_by_one):
    for name, value in one_by_one.items():
        assert np.isfinite(value).all(), name
        assert np.abs(value).max() > 0, name


def test_plain_sums_do_depend_on_the_order(rows_and_sum):
    """The control: the same gradients added one after the other."""
    total, parts = rows_and_sum
    plain = dict(parts[0])
    for part in parts[1:]:
        plain = {name: plain[name] + part[name] for name in plain}
    assert any(bit_difference(plain[name], total[name]) for name in plain)


def test_a_stock_trainer_computes_something_else():
    """The control: the same tokens through plain jnp."""
    batch = small.batch_of(small.completions()).rows(0, 2)
    model = small.model()
    stock = jax.jit(lambda t, m: token_logprobs(model, t, segment_ids=m, ops=stock_ops()))
    at = batch.weights != 0
    emitted, logprobs = batch.emitted[at], np.asarray(stock(batch.tokens, batch.mask))[at]
    assert bit_difference(logprobs, emitted) is not None
    assert np.abs(logprobs - emitted).max() < 1e-4


def _float64_loss(params: dict[str, np.ndarray], batch: small.Batch) -> float:
    total = 0.0
    for tokens, mask, weights in zip(batch.tokens, batch.mask, batch.weights, strict=True):
        real = mask > 0
        tokens, weights = tokens[real], weights[real].astype(np.float64)
        logits = decoder_logits(small.CONFIG, params, tokens[:-1]) if len(tokens) > 1 else None
        if logits is not None:
            top = logits.max(-1, keepdims=True)
            norm = top[:, 0] + np.log(np.exp(logits - top).sum(-1))
            picked = logits[np.arange(len(logits)), tokens[1:]]
            total += float(((picked - norm) * weights[1:]).sum())
    return total


def test_gradients_agree_with_finite_differences_in_float64(one_by_one):
    batch = small.batch_of(small.completions())
    params = {n: v.astype(np.float64) for n, v in small.parameters().items()}
    rng = np.random.default_rng(3)
    for name, value in params.items():
        direction = rng.standard_normal(value.shape)
        step = 1e-5 * np.linalg.norm(value) / np.linalg.norm(direction)
        slope = 0.0
        for sign in (1, -1):
            moved = {**params, name: value + sign * step * direction}
            slope += sign * _float64_loss(moved, batch) / (2 * step)
        own = one_by_one[name].astype(np.float64)
        assert abs((own * direction).sum() - slope) < 1e-4 * np.linalg.norm(own), name


@pytest.mark.slow
def test_gradients_agree_with_stock_autodiff(one_by_one):
    """Plain jnp, differentiated by JAX through the whole batch."""
    batch = small.batch_of(small.completions())
    graph, params, rest = small.split()

    def loss(params):
        model = nnx.merge(graph, params, rest)
        layout = lay_out(
            jnp.asarray(batch.tokens),
            None,
            jnp.asarray(batch.mask),
            max_segments=1,
            max_position=256,
            vocab_size=small.CONFIG.vocab_size,
        )
        pages = pages_for(*batch.tokens.shape, 1)
        cache = make_cache(small.CONFIG, num_pages=pages, page_size=PAGE_SIZE)
        hidden, _ = model(layout.tokens, layout.batch, cache, stock_ops())
        logprobs = jax.nn.log_softmax(model.logits(hidden, stock_ops()))
        picked = jnp.take_along_axis(logprobs, layout.target[:, None], 1)[:, 0]
        weights = jnp.asarray(batch.weights).reshape(-1)
        weights = weights.at[layout.target_place].get(mode="fill", fill_value=0)
        return jnp.sum(picked * weights)

    stock = small.host(jax.jit(jax.grad(loss))(params))
    for name, value in one_by_one.items():
        error = np.abs(value - stock[name]).max() / np.abs(stock[name]).max()
        assert error < 2e-5, (name, error)


def test_scaled_log_probabilities():
    batch = small.batch_of(small.completions(temperature=0.7), side="left")
    model = small.model()
    run = jax.jit(
        lambda tokens, mask: token_logprobs(
            model, tokens, segment_ids=mask, temperature=0.7, mode="scaled"
        )
    )
    for start in range(0, SEQUENCES, 4):
        micro = batch.rows(start, 4)
        _emitted_again(micro, run(micro.tokens, micro.mask))


def _packed() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Five short completions in one row: tokens, ids, where they were drawn, and what came out."""
    tokens, ids, drawn, emitted = [], [], [], []
    for index, output in enumerate(small.completions()):
        prompt, completion = output.prompt_token_ids, output.outputs[0]
        if len(prompt) + len(completion.token_ids) > 70:
            continue
        tokens += [*prompt, *completion.token_ids]
        ids += [index + 1] * (len(prompt) + len(completion.token_ids))
        drawn += [*[0] * len(prompt), *[1] * len(completion.token_ids)]
        emitted += completion.logprobs.tolist()
    row = (np.asarray(a, np.int32)[None] for a in (tokens, ids, drawn))
    return (*row, np.asarray(emitted, np.float32))


def test_packed_rows_hold_the_same_log_probabilities():
    tokens, ids, drawn, emitted = _packed()
    packed = token_logprobs(small.model(), tokens, segment_ids=ids, max_segments=8)
    assert_same_bits(np.asarray(packed)[drawn > 0], emitted)
    starts = np.flatnonzero(np.diff(ids[0], prepend=0))
    assert len(starts) > 3
    assert not np.asarray(packed)[0, starts].any()


def test_layouts_by_segment_and_by_position_are_one():
    tokens, ids, _, _ = (jnp.asarray(a) for a in _packed())
    room = dict(max_segments=8, max_position=256, vocab_size=small.CONFIG.vocab_size)
    jitted = jax.jit(lay_out, static_argnames=tuple(room))
    by_segment = jitted(tokens, None, ids, **room)
    starts = jnp.flatnonzero(jnp.diff(ids[0], prepend=0))
    positions = by_segment.batch.positions[None]
    assert jnp.array_equal(jnp.flatnonzero(positions[0] == 0), starts)
    by_position = jitted(tokens, positions, None, **room)
    for a, b in zip(jax.tree.leaves(by_segment), jax.tree.leaves(by_position), strict=True):
        assert jnp.array_equal(a, b)
    assert not by_segment.bad_row.any()
    assert jitted(tokens, None, ids, **{**room, "max_segments": 4}).bad_row.all()
    assert jitted(tokens, None, ids, **{**room, "max_position": 20}).bad_row.all()


def test_ids_outside_the_vocabulary_spoil_their_row_unless_they_are_padding():
    """-100 in place of a prompt must not quietly score the rest after some other token."""
    room = dict(max_segments=1, max_position=256, vocab_size=96)
    jitted = jax.jit(lay_out, static_argnames=tuple(room))
    tokens, mask = np.full((3, 12), 5, np.int32), np.ones((3, 12), np.int32)
    mask[2, 9:], tokens[2, 9:] = 0, -100
    for foreign, bad in ((95, False), (96, True), (-1, True), (-100, True), (2**31 - 1, True)):
        tokens[1, 4] = foreign
        layout = jitted(tokens, None, mask, **room)
        assert layout.bad_row.tolist() == [False, bad, False], foreign


@pytest.mark.slow
def test_bfloat16_compute_on_float32_parameters():
    params = small.split("bfloat16")[1]
    batch = small.batch_of(small.completions("bfloat16"), side="left")
    gradient, logprobs = small.train_step("bfloat16")(params, batch)
    _emitted_again(batch, logprobs)
    assert {v.dtype for v in small.host(gradient).values()} == {np.dtype("float32")}


@pytest.mark.parametrize(
    ("dtype", "compiled"),
    [
        ("float32", False),
        ("bfloat16", False),
        pytest.param("float32", True, marks=pytest.mark.slow),
    ],
)
def test_the_differentiated_program_computes_in_our_ops_alone(dtype, compiled):
    graph, params, rest = small.split(dtype)

    def gradient(params, tokens, mask, cotangent):
        def logprobs(params):
            return token_logprobs(nnx.merge(graph, params, rest), tokens, segment_ids=mask)

        out, pull = jax.vjp(logprobs, params)
        return out, pull(cotangent)

    ids = jax.ShapeDtypeStruct((4, 160), jnp.int32)
    cotangent = jax.ShapeDtypeStruct((4, 160), jnp.float32)
    report = audit(gradient, params, ids, ids, cotangent, compiled=compiled)
    expected = {"bi_attention_gradient", "bi_matmul_weight_gradient", "bi_merge_gradients"}
    assert expected <= report.ours.keys()
    plain = inspect(lambda x: jax.nn.softmax(x), cotangent, compiled=False)
    assert plain.findings  # the control


@pytest.mark.slow
@pytest.mark.parametrize("config", [SMOLLM2_135M, LLAMA_3_1_8B], ids=["SmolLM2", "Llama 8B"])
def test_the_differentiated_program_lowers_for_a_card(config):
    """In bfloat16 for sm90: every product, backwards too, is a launch of a kernel of ours."""
    config = config.replace(num_layers=2, dtype="bfloat16", param_dtype="float32")
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    ops = transformer_ops(config, backend=ON_HOPPER)

    def step(params, rest, tokens, mask):
        def loss(params):
            model = nnx.merge(graph, params, rest)
            out = token_logprobs(model, tokens, segment_ids=mask, ops=ops, scan_layers=True)
            return jnp.sum(out), out

        return jax.value_and_grad(loss, has_aux=True)(params)

    ids = jax.ShapeDtypeStruct((2, 320), jnp.int32)
    traced = jax.jit(step).trace(params, rest, ids, ids)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "dot_general" not in text
    assert text.count("custom_call @mosaic_gpu") > 25


def test_refusals_name_what_came():
    model, tokens = small.model(), jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(NotImplementedError, match="mode 'processed'"):
        token_logprobs(model, tokens, mode="processed")
    with pytest.raises(ValueError, match="mode='warm' must be"):
        token_logprobs(model, tokens, mode="warm")
    with pytest.raises(ValueError, match="temperature=-1 must be"):
        token_logprobs(model, tokens, temperature=-1, mode="scaled")
    with pytest.raises(ValueError, match="temperature='hot' must be"):
        token_logprobs(model, tokens, temperature="hot", mode="scaled")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_segments=0 must be a positive whole number"):
        token_logprobs(model, tokens, max_segments=0)
    with pytest.raises(ValueError, match="tokens must be int32"):
        token_logprobs(model, tokens.astype(jnp.int16))
    with pytest.raises(ValueError, match=r"segment_ids must have shape \[1, 4\], got \[1, 5\]"):
        token_logprobs(model, tokens, segment_ids=jnp.zeros((1, 5), jnp.int32))
