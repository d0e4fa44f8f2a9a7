"""Logical axis names of every parameter, for whoever lays them out over devices."""

VOCAB = "vocab"
EMBED = "embed"
KV_HEADS = "kv_heads"
QUERY_SIZE = "query_size"
MLP = "mlp"
SEGMENTS = "segments"

PARAMETER_AXES: dict[str, tuple[str | None, ...]] = {
    "embed.embedding": (VOCAB, EMBED),
    "attn_norm.scale": (EMBED,),
    "attention.qkv.weight": (KV_HEADS, None, None, EMBED),
    "attention.qkv.bias": (KV_HEADS, None, None),
    "attention.q_norm.scale": (None,),
    "attention.k_norm.scale": (None,),
    "attention.out.weight": (EMBED, QUERY_SIZE),
    "mlp_norm.scale": (EMBED,),
    "mlp.gate_up.weight": (None, MLP, EMBED),
    "mlp.down.weight": (EMBED, MLP),
    "final_norm.scale": (EMBED,),
    "lm_head.weight": (VOCAB, EMBED),
}
# Row-parallel weights where a `ParallelLayout` lays them out; all others keep their axes.
LAID_OUT_AXES: dict[str, tuple[str | None, ...]] = {
    "attention.out.weight": (SEGMENTS, EMBED, None),
    "mlp.down.weight": (SEGMENTS, EMBED, None),
}


def parameter_axes(name: str, *, laid_out: bool = False) -> tuple[str | None, ...]:
    """Axis names of a parameter such as "layers.3.mlp.down.weight".

    Args:
      name: of the parameter.
      laid_out: as a `ParallelLayout` has it; else as a checkpoint has it.

    Raises:
      ValueError: no parameter of ours has this name.
    """
    parts = name.split(".")
    suffix = ".".join(parts[2:] if parts[0] == "layers" else parts)
    if suffix not in PARAMETER_AXES:
        raise ValueError(f"no logical axes are known for the parameter {name!r}")
    axes = PARAMETER_AXES[suffix]
    return LAID_OUT_AXES.get(suffix, axes) if laid_out else axes
