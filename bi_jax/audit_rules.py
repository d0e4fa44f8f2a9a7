"""What the compiler may do to floats outside our ops, entry by entry with the reason; and what not.

Everything that is on no list is refused when it touches a float.
"""

from __future__ import annotations

MOVES = "moves values and computes none"
BITS = "works on sign bits or compares; one operand gives one result, however it is vectorised"
ROUNDS = "one correctly rounded result for each operand, with nothing to contract"
CONTROL = "runs programs that are audited themselves"
COTANGENTS = (
    "one correctly rounded float32 sum of two cotangents, which come out of loops or kernels of "
    "ours, so no product can be contracted into it; bfloat16 and float16 are refused, since a "
    "compiler may leave out the rounding between two such sums"
)
KEYS = "threefry: integer arithmetic of the key alone"

# JAX primitives on floats that are exact, to the reason. On integers and booleans every primitive
# below, and all arithmetic and sums, are exact in any order.
EXACT_PRIMITIVES: dict[str, str] = {
    **dict.fromkeys(
        (
            *("broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "rev", "copy"),
            *("slice", "dynamic_slice", "dynamic_update_slice", "concatenate", "pad", "gather"),
            *("select_n", "stack", "unstack", "split", "copy_p", "device_put", "iota", "tile"),
            *("optimization_barrier", "sharding_constraint", "layout_constraint", "reshard"),
            *("stop_gradient", "name", "empty", "broadcast", "mesh_cast", "array_copy"),
            *("all_gather", "all_gather_invariant", "all_to_all", "ppermute", "pbroadcast"),
            *("pvary", "bitcast_convert_type", "random_wrap", "random_unwrap", "full"),
            *("squeeze", "empty2", "axis_index", "platform_index", "ragged_all_to_all"),
            *("all_gather_start", "all_gather_done", "all_to_all_start", "all_to_all_done"),
            *("ppermute_start", "ppermute_done"),
        ),
        MOVES,
    ),
    **dict.fromkeys(
        (
            *("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to", "is_finite"),
            *("neg", "abs", "sign", "argmax", "argmin", "top_k"),
        ),
        BITS,
    ),
    **dict.fromkeys(("floor", "ceil", "round", "reduce_precision"), ROUNDS),
}

# Programs in programs.
CONTROL_PRIMITIVES = (
    *("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"),
    *("custom_jvp_call", "custom_vjp_call", "custom_lin", "while", "scan", "cond", "shard_map"),
    *("run_state", "custom_vmap_call", "xla_metadata_call", "mesh_call", "named_call"),
)

# What JAX puts in where a value is used twice and differentiated.
COTANGENT_SUM = "add_any"

KEY_PRIMITIVES = (
    *("random_bits", "random_fold_in", "random_seed", "random_split", "random_clone"),
    "threefry2x32",
)

# Whatever they work on: nobody can see what they do.
FOREIGN_PRIMITIVES: dict[str, str] = {
    **dict.fromkeys(
        (
            *("pallas_call", "core_map", "mpmd_map", "ffi_call", "custom_call"),
            *("triton_kernel_call", "mosaic_gpu_kernel", "pure_callback", "io_callback"),
        ),
        "kernel",
    ),
    "rng_bit_generator": "random",
    "rng_uniform": "random",
}

# Float operations that are refused, to the kind of the finding.
FORBIDDEN_PRIMITIVES: dict[str, str] = {
    "dot_general": "dot",
    "ragged_dot_general": "dot",
    "scaled_matmul": "dot",
    "conv_general_dilated": "convolution",
    **dict.fromkeys(
        (
            *("reduce_sum", "reduce_prod", "reduce", "reduce_max", "reduce_min"),
            *("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"),
            *("select_and_scatter_add", "fft", "cholesky", "triangular_solve", "lu", "qr", "eigh"),
            "svd",
        ),
        "reduction",
    ),
    **dict.fromkeys(("cumsum", "cumprod", "cumlogsumexp", "cummax", "cummin"), "cumulative"),
    **dict.fromkeys(("scatter-add", "scatter-mul", "scatter-min", "scatter-max"), "scatter"),
    "scatter_add": "scatter",
    **dict.fromkeys(
        (
            *("psum", "psum2", "psum_invariant", "pmax", "pmin", "reduce_scatter"),
            *("unreduced_psum", "unreduced_reduce_scatter", "unreduced_pmax", "unreduced_pmin"),
            *("psum_invariant_start", "psum_done", "reduce_scatter_start", "reduce_scatter_done"),
        ),
        "collective",
    ),
    **dict.fromkeys(
        (
            *("add", "sub", "mul", "div", "rem", "add_any", "max", "min", "clamp", "pow"),
            *("integer_pow", "exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "cbrt"),
            *("sin", "cos", "tan", "tanh", "sinh", "cosh", "asin", "acos", "atan", "atan2"),
            *("logistic", "erf", "erfc", "erf_inv", "square", "nextafter", "lgamma", "digamma"),
        ),
        "arithmetic",
    ),
}

# HLO instructions that are exact on floats.
EXACT_HLO = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "copy", "copy-start"),
        *("copy-done", "reshape", "transpose", "broadcast", "slice", "dynamic-slice", "pad"),
        *("dynamic-update-slice", "concatenate", "reverse", "gather", "select", "compare", "iota"),
        *("bitcast-convert", "reduce-precision", "negate", "abs", "sign", "is-finite", "floor"),
        *("ceil", "round-nearest-even", "round-nearest-afz", "optimization-barrier", "sort"),
        *("after-all", "partition-id", "replica-id", "all-gather", "all-to-all"),
        *("collective-permute", "collective-broadcast", "infeed", "outfeed", "send", "recv"),
        *("send-done", "recv-done", "domain", "add-dependency", "ragged-all-to-all", "topk"),
        *("async-start", "async-update", "async-done", "get-dimension-size"),
    )
)
# They call programs, whose instructions are looked at one by one.
CONTROL_HLO = frozenset(("fusion", "while", "conditional", "call", "map"))
FORBIDDEN_HLO: dict[str, str] = {
    "dot": "dot",
    "ragged-dot": "dot",
    "scaled-dot": "dot",
    "convolution": "convolution",
    "reduce": "reduction",
    "reduce-window": "reduction",
    "select-and-scatter": "scatter",
    "fft": "reduction",
    "cholesky": "reduction",
    "triangular-solve": "reduction",
    "all-reduce": "collective",
    "reduce-scatter": "collective",
    "rng": "random",
    "rng-bit-generator": "random",
}
# Custom calls that say something to the compiler and compute nothing.
EXACT_CUSTOM_CALLS = frozenset(
    (
        *("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement"),
        *("MoveToHost", "MoveToDevice", "LayoutConstraint", "AllocateBuffer"),
    )
)

# Kinds of findings that add floats up, or may: what `assert_no_foreign_reductions` looks for.
ADDING_KINDS = frozenset(
    ("dot", "convolution", "reduction", "cumulative", "scatter", "collective", "kernel", "vmap")
)

REASONS: dict[str, str] = {
    "dot": "the compiler picks the order of additions, by the number of rows too",
    "convolution": "the compiler picks the order of additions, by the batch too",
    "reduction": "the compiler picks the order, by the number of rows too",
    "cumulative": "the compiler picks the tree of a running sum",
    "scatter": "places that occur twice are combined in an order that nobody fixed",
    "collective": "the algorithm, and so the order, follows the message size",
    "convert": "without a reduce_precision before it a compiler may drop the rounding",
    "arithmetic": "bits follow what the compiler fuses, vectorises or contracts to multiply-adds",
    "kernel": "it is none of our marked ops, and nobody has shown its order of additions",
    "alias": (
        "it changes its operand in place, and in a fusion result and operand may be two buffers, "
        "of which it writes one"
    ),
    "random": "its numbers are not fixed by a request's key alone",
    "vmap": "a batched kernel is another program, whose order of additions nobody has shown",
    "unknown": "it is on no list of exact operations",
}
