"""Logical axis names of every parameter, for whoever lays them out over devices."""

VOCAB = "vocab"
EMBED = "embed"
KV_HEADS = "kv_heads"
QUERY_SIZE = "query_size"
MLP = "mlp"

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


def parameter_axes(name: str) -> tuple[str | None, ...]:
    """Axis names of a parameter such as "layers.3.mlp.down.weight".

    Raises:
      ValueError: no parameter of ours has this name.
    """
    parts = name.split(".")
    suffix = ".".join(parts[2:] if parts[0] == "layers" else parts)
    if suffix not in PARAMETER_AXES:
        raise ValueError(f"no logical axes are known for the parameter {name!r}")
    return PARAMETER_AXES[suffix]
