"""The engine over 1, 2, 4 and 8 devices: one digest, or one for each degree."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bi_jax import RequestOutput, collectives
from bi_jax.engine import Engine
from bi_jax.models.checkpoint import load_params, read_config, save_orbax
from bi_jax.models.checkpoint.plan import parameter_shapes
from bi_jax.models.config import TP_INVARIANT
from bi_jax.models.parallel_layout import ParallelLayout
from bi_jax.models.transformer import build_transformer
from bi_jax.runner import begun_with
from bi_jax.scoring import score
from bi_jax.sharding import make_mesh, replicas
from bi_jax.testing import assert_same_bits
from tests.bi_jax import parallel_models, tiny
from tests.bi_jax.parallel_models import ENGINE, FAMILIES, LLAMA, PARAMS, PROMPTS

DEGREES = (1, 2, 4, 8)
INVARIANT = LLAMA.replace(topology=TP_INVARIANT)


@functools.cache
def invariant_engine(degree: int) -> Engine:
    return parallel_models.engine(INVARIANT, degree)


def generate(engine: Engine) -> list[RequestOutput]:
    return engine.generate(PROMPTS, PARAMS)


def assert_long_and_varied(outputs: list[RequestOutput]) -> None:
    assert min(len(o.outputs[0].token_ids) for o in outputs) >= 128
    sampled = [o for o, p in zip(outputs, PARAMS, strict=True) if p.temperature > 0]
    assert len(sampled) == 2 and tiny.distinct_tokens(sampled) >= 32


def test_one_device_and_eight_give_one_digest_and_one_identity():
    one, eight = (invariant_engine(degree) for degree in (1, 8))
    outputs = generate(one)
    assert_long_and_varied(outputs)
    tiny.assert_same_completions(generate(eight), outputs, "8 ranks")
    assert one.identity.short == eight.identity.short
    assert dict(one.identity.ops)["row_products"].startswith("8 segments of K, one balanced tree")
    # The audit has looked at the program of all ranks, and at the collectives in it.
    (report,) = eight.runner.step_program.reports.values()
    assert not report.findings
    text = eight.runner.step_program.text(next(iter(eight.runner.step_program.reports)))
    assert "all-gather" in text and "reduce-scatter" not in text


def test_a_trainer_on_one_device_scores_what_eight_drew():
    """The trainer's parameters lie as in a checkpoint and are cut inside its program."""
    outputs = generate(invariant_engine(8))[:1]
    (scores,) = score(parallel_models.model(INVARIANT), outputs)
    assert_same_bits(scores[0], outputs[0].outputs[0].logprobs, context="scores")


def test_new_weights_are_laid_out_without_compiling_again():
    engine, other = invariant_engine(8), parallel_models.parameters(INVARIANT, seed=1)
    before, programs = generate(engine), len(engine.runner.programs)
    digest = engine.identity.weights
    own = nnx.state(parallel_models.model(INVARIANT))
    mesh = make_mesh(fsdp=4, tp=2)
    sharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    trainer = nnx.state(build_transformer(INVARIANT, jax.device_put(other, sharded)))
    engine.update_weights(trainer)
    changed = generate(engine)
    assert tiny.digest(changed) != tiny.digest(before) and engine.identity.weights != digest
    engine.update_weights(own)
    tiny.assert_same_completions(generate(engine), before, "the first weights again")
    assert engine.identity.weights == digest and len(engine.runner.programs) == programs
    wrong = nnx.state(parallel_models.model(INVARIANT.replace(intermediate_size=96)))
    with pytest.raises(ValueError, match="expected a weight"):
        engine.update_weights(wrong)


def test_degrees_that_do_not_fit_are_refused():
    model = parallel_models.model(INVARIANT)
    with pytest.raises(ValueError, match="tensor_parallel_size=3 must divide the 8 segments"):
        Engine(model, tensor_parallel_size=3)
    with pytest.raises(ValueError, match="tensor_parallel_size=16 needs 16 devices"):
        Engine(parallel_models.model(LLAMA), tensor_parallel_size=16)
    with pytest.raises(ValueError, match="must be the size of the mesh's axis 'tp'"):
        Engine(model, tensor_parallel_size=2, mesh=make_mesh(tp=4))
    with pytest.raises(ValueError, match="take one of its `replicas`"):
        Engine(model, tensor_parallel_size=2, mesh=make_mesh(tp=2, fsdp=2))
    with pytest.raises(ValueError, match="needs 16, and there are 8"):
        make_mesh(tp=4, fsdp=4)


def weight_bytes(engine: Engine, device: Any) -> int:
    """Bytes of parameters that one device holds."""
    params = nnx.to_flat_state(engine.runner.state)
    arrays = [v[...] for _, v in params if isinstance(v, nnx.Param)]
    shards = [s for a in arrays for s in a.addressable_shards if s.device == device]
    return sum(shard.data.nbytes for shard in shards)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["default", TP_INVARIANT])
def test_a_rank_holds_and_multiplies_its_share(topology: str):
    """Of a model whose sizes divide: from the compiled programs, at most 1/tp and 5 %."""
    config = LLAMA.replace(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=2048,
        num_query_heads=16,
        num_kv_heads=8,
        max_position=64,
        topology=topology,
    )
    params = {n: jnp.zeros(s, jnp.float32) for n, s in parameter_shapes(config).items()}
    costs = {}
    for degree in DEGREES:
        settings = dataclasses.replace(ENGINE, num_pages=2)
        engine = Engine(
            build_transformer(config, params), config=settings, tensor_parallel_size=degree
        )
        engine.generate([[1, 2, 3]], tiny.params_of(1, max_tokens=1))
        (program,) = engine.runner.step_program._programs.values()
        costs[degree] = (
            [weight_bytes(engine, device) for device in jax.devices()[:degree]],
            program.memory_analysis().argument_size_in_bytes,
            program.cost_analysis()["flops"],
        )
    whole = costs[1]
    for degree in DEGREES[1:]:
        share = 1 / degree + 0.05
        weights, arguments, operations = costs[degree]
        assert len(weights) == degree
        assert max(weights) <= share * whole[0][0]
        assert arguments <= share * whole[1]
        assert operations <= share * whole[2]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_at_every_degree(family: str):
    config = FAMILIES[family].replace(topology=TP_INVARIANT)
    outputs = {d: generate(parallel_models.engine(config, d)) for d in DEGREES}
    assert_long_and_varied(outputs[1])
    for degree in DEGREES[1:]:
        tiny.assert_same_completions(outputs[degree], outputs[1], f"{family}, {degree} ranks")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("degree", DEGREES[1:])
def test_the_default_topology_is_invariant_at_each_degree(family: str, degree: int):
    engine = parallel_models.engine(FAMILIES[family], degree)
    outputs = generate(engine)
    assert_long_and_varied(outputs)
    for name, schedule in {
        "chunks of 7 tokens": {"max_num_batched_tokens": 7},
        "two at a time": {"max_num_seqs": 2},
        "pages are short": {"num_pages": 9},
        "five tokens a dispatch": {"decode_steps": 5},
    }.items():
        again = engine.rescheduled(**schedule)
        tiny.assert_same_completions(generate(again), outputs, f"{family}, {degree}: {name}")
    alone = engine.rescheduled(prefix_caching=False)
    for i in (2, 0, 1):
        (output,) = alone.generate([PROMPTS[i]], [PARAMS[i]])
        tiny.assert_same_completions([output], [outputs[i]], f"{family}, {degree}: alone")


@pytest.mark.parametrize("count", [3, 16])
def test_tokens_that_were_drawn_go_on_over_devices(count: int):
    """All of the tokens too: `.at[:16].set` of sixteen ended the process when it was compiled."""
    mesh, whole = make_mesh(tp=2), jax.sharding.PartitionSpec()
    run = jax.shard_map(
        begun_with, mesh=mesh, in_specs=(whole, whole), out_specs=whole, check_vma=False
    )
    tokens, drawn = np.arange(16, dtype=np.int32), -1 - np.arange(count, dtype=np.int32)
    got = jax.jit(run)(tokens, drawn)
    np.testing.assert_array_equal(got, [*drawn, *tokens[count:]])


@pytest.mark.slow
def test_several_tokens_a_dispatch_where_every_token_draws():
    config = dataclasses.replace(ENGINE, token_buckets=(4, 16))
    engine = Engine(parallel_models.model(LLAMA), config=config, tensor_parallel_size=2)
    outputs = generate(engine)
    again = generate(engine.rescheduled(decode_steps=3))
    tiny.assert_same_completions(again, outputs, "three tokens a dispatch")
    assert {program[0] for program in engine.runner.programs if program[-1] == 3} == {4}


@pytest.mark.slow
def test_the_default_topology_follows_the_degree_and_says_so(monkeypatch: pytest.MonkeyPatch):
    """Control: degrees differ in bits and in identity, and so does a reversed rank order."""
    engines = {d: parallel_models.engine(LLAMA, d) for d in DEGREES}
    digests = {d: tiny.digest(generate(engine)) for d, engine in engines.items()}
    assert len(set(digests.values())) == len(DEGREES)
    assert len({engine.identity.short for engine in engines.values()}) == len(DEGREES)
    assert len({engine.identity.weights for engine in engines.values()}) == 1
    with pytest.raises(ValueError, match="equal bits are promised within one identity only"):
        score(parallel_models.model(LLAMA), generate(engines[4]))
    own = collectives.ordered_sum
    monkeypatch.setattr(collectives, "ordered_sum", lambda parts, **rest: own(parts[::-1], **rest))
    for degree in (4, 8):
        assert tiny.digest(generate(parallel_models.engine(LLAMA, degree))) != digests[degree]


@pytest.mark.slow
def test_replicas_stand_side_by_side():
    outputs = []
    for mesh in replicas(make_mesh(fsdp=2, tp=2)):
        engine = parallel_models.engine(INVARIANT, 2, mesh=mesh)
        assert {d for a in jax.tree.leaves(engine.runner.state) for d in a.devices()} == set(
            mesh.devices.flat
        )
        outputs.append(generate(engine))
    tiny.assert_same_completions(outputs[1], outputs[0], "the second replica")
    tiny.assert_same_completions(generate(invariant_engine(1)), outputs[0], "one device")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "qwen2", "mistral"])
def test_checkpoints_load_straight_into_shards(name: str, tmp_path: Any):
    """From safetensors and from Orbax, to the bits of the same parameters laid out afterwards."""
    from bi_jax.ops import ON_CPU
    from bi_jax.sharding import model_placer
    from tests.models.fixture_models import CHECKPOINTS

    folder = CHECKPOINTS / name
    config = read_config(folder).replace(dtype="float32", param_dtype="float32")
    params = load_params(folder, config, dtype="float32")
    save_orbax(tmp_path, config, params)
    placer = model_placer(config, ON_CPU, 4)
    assert placer is not None
    for source in (folder, tmp_path):
        loaded = placer.load(source, config, dtype="float32")
        layout = ParallelLayout(config=config, degree=4)
        for path, whole in params.items():
            expected = layout.lay_out(path, np.asarray(whole))
            assert_same_bits(np.asarray(loaded[path]), expected, context=f"{source} {path}")
            axis = layout.sharded_axis(path)
            held = loaded[path].addressable_shards[0].data.size
            assert held * (1 if axis is None else 4) == expected.size


@pytest.mark.slow
def test_an_engine_from_a_checkpoint_and_one_from_a_model(monkeypatch: pytest.MonkeyPatch):
    from tests.models.fixture_models import CHECKPOINTS

    folder = CHECKPOINTS / "smollm2"
    monkeypatch.setattr("bi_jax.engine.Tokenizer.from_pretrained", lambda _: None)
    loaded = Engine.from_pretrained(
        folder, dtype="float32", config=ENGINE, tensor_parallel_size=2, tp_invariant=True
    )
    config = read_config(folder).replace(
        dtype="float32", param_dtype="float32", topology=TP_INVARIANT
    )
    whole = build_transformer(config, load_params(folder, config, dtype="float32"))
    prompts = [[1, 2, 3], list(range(20, 60))]
    outputs = loaded.generate(prompts, PARAMS[:2])
    one = Engine(whole, config=ENGINE)
    tiny.assert_same_completions(one.generate(prompts, PARAMS[:2]), outputs, "one device")
    assert one.identity.short == loaded.identity.short
    with pytest.raises(ValueError, match="laid out for 2 devices in 8 segments"):
        graph_model = build_transformer(
            config,
            loaded.placer.load(folder, config, dtype="float32"),
            layout=loaded.placer.layout,
        )
        Engine(graph_model, tensor_parallel_size=4)
