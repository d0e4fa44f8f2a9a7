"""The audit of whole programs: optimised text, our model's step here, and as lowered for a GPU."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from bi_jax import Engine, EngineConfig, SamplingParams
from bi_jax.audit_hlo import HloAudit
from bi_jax.audit_program import audit, inspect
from bi_jax.kv_cache import make_cache
from bi_jax.models.config import RopeConfig, TransformerConfig
from bi_jax.models.transformer import build_transformer, random_params
from bi_jax.ops import ON_CPU, ON_HOPPER, transformer_ops
from bi_jax.pallas_kernels.ragged import RaggedBatch
from bi_jax.sampling import row_sampling, sample, stack_rows
from bi_jax.stock_ops import stock_ops

CONFIG = TransformerConfig(
    family="qwen3",
    vocab_size=128,
    hidden_size=128,
    intermediate_size=128,
    num_layers=1,
    num_query_heads=2,
    num_kv_heads=1,
    head_dim=64,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e4),
    max_position=256,
    qk_norm=True,
    dtype="bfloat16",
    param_dtype="bfloat16",
)
TOKENS, REQUESTS = 64, 2


def step_and_arguments(ops):
    """One forward pass of a small model with a cache, as the engine's step makes it."""
    graph, state = nnx.split(build_transformer(CONFIG, random_params(CONFIG, 0)))

    def zeros(*shape):
        return jnp.zeros(shape, jnp.int32)

    batch = RaggedBatch(
        positions=zeros(TOKENS),
        request=zeros(TOKENS),
        query_start=zeros(REQUESTS + 1),
        page_table=zeros(REQUESTS, 4),
        num_tokens=jnp.int32(TOKENS),
    )

    def step(state, cache, tokens, batch, rows):
        model = nnx.merge(graph, state)
        hidden, cache = model(tokens, batch, cache, ops)
        return model.logits(hidden.at[rows].get(mode="clip"), ops), cache

    cache = make_cache(CONFIG, num_pages=4, page_size=64)
    return step, (state, cache, zeros(TOKENS), batch, zeros(REQUESTS))


def test_our_step_passes_on_a_cpu():
    step, arguments = step_and_arguments(transformer_ops(CONFIG, backend=ON_CPU))
    report = audit(step, *arguments)
    assert report.ours["bi_attention"] == 1 and report.ours["bi_matmul"] == 4
    assert report.ours_compiled > 1000


def test_the_same_step_with_stock_ops_fails():
    step, arguments = step_and_arguments(stock_ops())
    report = inspect(step, *arguments, compiled=False)
    assert {"dot", "reduction", "arithmetic", "convert"} <= {f.kind for f in report.findings}
    assert all("stock_ops.py:" in f.where for f in report.findings)


ARITHMETIC = (
    *("add", "subtract", "multiply", "divide", "power", "exponential", "log", "rsqrt", "sqrt"),
    *("tanh", "logistic", "dot_general", "convolution", "reduce", "reduce_window", "maximum"),
    *("minimum", "cosine", "sine", "all_reduce", "reduce_scatter"),
)


def float_arithmetic(text):
    """Operations of a lowered program that compute floats."""
    found = re.findall(r"stablehlo\.(\w+)[ (].*-> .*tensor<(?:[0-9x]*)(?:bf16|f16|f32)>", text)
    found += re.findall(r"stablehlo\.(\w+) %.* : tensor<(?:[0-9x]*)(?:bf16|f16|f32)>", text)
    return sorted(name for name in found if name in ARITHMETIC)


def test_our_step_leaves_a_gpu_compiler_no_float_arithmetic():
    """Lowered for a GPU, which needs none: all that XLA will see of our ops are custom calls."""
    step, arguments = step_and_arguments(transformer_ops(CONFIG, backend=ON_HOPPER))
    assert audit(step, *arguments, compiled=False).ours["bi_attention"] == 1
    text = jax.jit(step).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert float_arithmetic(text) == []
    targets = Counter(re.findall(r"custom_call @(\w+)", text))
    assert set(targets) == {"mosaic_gpu_v2"} and targets["mosaic_gpu_v2"] >= 6


def test_choosing_tokens_leaves_a_gpu_compiler_no_float_arithmetic():
    """Filtered rows and top log-probabilities too: a search in three kernels, an order in two."""
    params = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, seed=0)
    rows = stack_rows([row_sampling(params, sample_index=0)], [0], size=8)

    def choose(logits):
        return sample(logits, rows, backend=ON_HOPPER.tokens, top=8)

    logits = jnp.zeros((8, 4096))
    report = audit(choose, logits, compiled=False)
    assert report.ours["bi_find_cut"] == report.ours["bi_top_tokens"] == 1
    text = jax.jit(choose).trace(logits).lower(lowering_platforms=("cuda",)).as_text()
    assert float_arithmetic(text) == []
    assert set(re.findall(r"custom_call @(\w+)", text)) == {"mosaic_gpu_v2"}


def test_float_arithmetic_in_a_lowered_program_is_seen():
    def fn(x):
        return jnp.sum(x * 2 + x, axis=0)

    text = jax.jit(fn).trace(jnp.ones((4, 4))).lower(lowering_platforms=("cuda",)).as_text()
    assert float_arithmetic(text) == ["add", "multiply", "reduce"]


OPTIMISED = """HloModule jit_f

FileNames
1 "model.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%body (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %m.1 = f32[4]{0} multiply(%p, %p)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %k = f32[4]{0} custom-call(%x), custom_call_target="kernel", METADATA
  ROOT %f = f32[4]{0} fusion(%k), kind=kLoop, calls=%body, METADATA
}
"""


SUM = """%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

"""


def optimised(kernel="jit(f)/bi_op/call", fusion="jit(f)/bi_op/while/body", extra=""):
    text = OPTIMISED
    for name in (kernel, fusion):
        metadata = f'metadata={{op_name="{name}" stack_frame_id=1}}'
        text = text.replace("METADATA", metadata, 1)
    if "%sum" in extra:
        text = text.replace("ENTRY", f"{SUM}ENTRY")
    return text.replace("  ROOT %f", f"{extra}  ROOT %f")


def findings(text, **options):
    return [(f.operation, f.kind) for f in HloAudit(text, ["bi_op"], {}, **options).findings]


def test_what_stands_in_our_op_is_ours():
    found = HloAudit(optimised(), ["bi_op"], {})
    assert found.findings == [] and found.kernels == {"kernel": 1}


@pytest.mark.parametrize(
    "text, expected",
    [
        (optimised(kernel="jit(f)/other"), [("custom-call", "kernel")]),
        (optimised(fusion="jit(f)/mul"), [("multiply", "arithmetic")]),
        (optimised(fusion="jit(f)/my_bi_op/mul"), [("multiply", "arithmetic")]),
        (
            optimised(extra="  %r = f32[] reduce(%k, %k), dimensions={0}, to_apply=%sum\n"),
            [("reduce", "reduction")],
        ),
        (
            optimised(extra="  %r = f32[4]{0} all-reduce(%k), to_apply=%sum\n"),
            [("all-reduce", "collective")],
        ),
        (
            optimised(extra="  %r = bf16[4]{0} dot(%k, %k)\n  %i = s32[4]{0} add(%k, %k)\n"),
            [("dot", "dot")],
        ),
    ],
)
def test_what_stands_outside_is_found(text, expected):
    assert findings(text) == expected


def test_around_a_kernel_the_compiler_computes_nothing_either():
    text = optimised(fusion="jit(f)/bi_op/mul")
    assert findings(text) == []
    named = optimised(extra='  %r = f32[4]{0} add(%k, %k), metadata={op_name="jit(f)/bi_op/a"}\n')
    assert findings(named) == []
    assert findings(named, kernels=["bi_op"]) == [("add", "arithmetic")]


def test_a_product_that_the_compiler_wrote_anew_is_its_users():
    name = 'metadata={op_name="jit(f)/bi_op/dot_general"}'
    used = f"  %r.1 = f32[4]{{0}} OPCODE(%k, %k)\n  %b = f32[4]{{0}} bitcast(%r.1), {name}\n"
    dot = optimised(extra=used.replace("OPCODE", "dot"))
    assert findings(dot) == []
    assert findings(dot, kernels=["bi_op"]) == [("dot", "dot")]
    # Somebody else reads it too; nobody reads it; devices are added over.
    elsewhere = used.replace("OPCODE", "dot") + "  %c = f32[4]{0} copy(%r.1)\n"
    assert findings(optimised(extra=elsewhere)) == [("dot", "dot")]
    assert findings(dot.replace("bitcast(%r.1)", "bitcast(%r.10)")) == [("dot", "dot")]
    across = used.replace("OPCODE(%k, %k)", "all-reduce(%k), to_apply=%sum")
    assert findings(optimised(extra=across)) == [("all-reduce", "collective")]


# What jaxlib 0.11.2 made of a loop over stacked pages: the fusion gives the result a buffer.
SLICED = """%sliced (p: f32[2,4], i: s32[], v: f32[4]) -> f32[4] {
  %p = f32[2,4]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %v = f32[4]{0} parameter(2)
  %s = f32[1,4]{1,0} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,4}
  %b = f32[4]{0} bitcast(%s)
  ROOT %k = f32[4]{0} custom-call(%b, %v), custom_call_target="kernel", ALIASING
}

"""


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("aliasing", ["output_to_operand_aliasing={{}: (0, {})}, ", ""])
def test_a_kernel_that_changes_its_operand_stands_in_no_fusion(fused, aliasing):
    metadata = 'metadata={op_name="jit(f)/bi_op/call"}'
    text = SLICED.replace("ALIASING", aliasing + metadata)
    call = "fusion(%x), kind=kCustom" if fused else "call(%x)"
    text += f"ENTRY %main (x: f32[4]) -> f32[4] {{\n  ROOT %f = f32[4] {call}, calls=%sliced\n}}\n"
    expected = [("custom-call", "alias")] if fused and aliasing else []
    assert findings(text) == expected


def test_findings_name_the_source_line():
    text = optimised(
        extra='  %r = f32[4]{0} add(%k, %k), metadata={op_name="jit(f)/add" stack_frame_id=1}\n'
    )
    (finding,) = HloAudit(text, ["bi_op"], {}).findings
    assert finding.where == "model.py:7" and finding.shape == "f32[4]"


def test_a_context_of_one_page_passes():
    """There the compiler unrolls the attention reference's loops into the step itself."""
    model = build_transformer(CONFIG, random_params(CONFIG, 0))
    settings = EngineConfig(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64)
    engine = Engine(model, config=settings)
    (output,) = engine.generate([[1]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3 and engine.identity.audited
    assert {tokens for tokens, *_ in engine.runner.programs} == {1}


@pytest.mark.gpu
def test_our_step_passes_on_a_gpu():
    backends = ON_HOPPER
    step, arguments = step_and_arguments(transformer_ops(CONFIG, backend=backends))
    report = audit(step, *arguments)
    assert sum(report.kernels.values()) >= 9
