"""Log-probabilities of given tokens for a trainer: the sampler's forward pass, differentiable."""

import dataclasses
import functools
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float32, Int32

from bi_jax.models.cast import to_compute_dtype
from bi_jax.models.config import TransformerConfig
from bi_jax.models.ops import TransformerOps
from bi_jax.models.transformer import Transformer
from bi_jax.pallas_kernels import contracts
from bi_jax.pallas_kernels.float_order import LOWEST
from bi_jax.pallas_kernels.log_softmax import target_logprobs

from .gradient_sum import sum_over
from .kv_cache import make_cache
from .ops import pick_backends, transformer_ops
from .sampling_params import inverse_temperature
from .token_layout import PAGE_SIZE, TokenLayout, lay_out, pages_for
from .trainer_mesh import RowMesh, pad_rows

LOGITS = 2**28  # float32 logits that exist at a time in the forward pass, at most; schedule
TOKEN_TABLE = ("embed", "embedding")


def token_logprobs(
    model: Transformer,
    tokens: Int32[Array, "B T"],
    positions: Int32[Array, "B T"] | None = None,
    segment_ids: Int32[Array, "B T"] | None = None,
    temperature: float = 1.0,
    mode: str = "raw",
    ops: TransformerOps | None = None,
    *,
    max_segments: int = 1,
    scan_layers: bool = False,
    mesh: Mesh | None = None,
) -> Float32[Array, "B T"]:
    """log p(tokens[b, t] | what precedes it in its sequence), as the engine reports it.

    For your own jitted train step: works under jit, grad, value_and_grad and jax.checkpoint, with
    parameters in float32 and the model's compute dtype, through the cast that
    `Engine.update_weights` uses.

    Args:
      model: the transformer.
      tokens: int32 [B, T]; padding, on whichever side or in the middle, may hold any id.
      positions: int32 [B, T] or None. Only its zeros count: a sequence starts at each. Positions
        themselves are counted from the start of the sequence.
      segment_ids: int32 [B, T] or None. 0 (or less) is padding, so a 0/1 mask will do; where a row
        holds several sequences, each has its id. None: every token is real.
      temperature: a number; divides the logits in mode "scaled". 0 is greedy: raw there.
      mode: "raw" (the model's) or "scaled" (after temperature).
      ops: what to compute with; None: what an engine on this platform takes.
      max_segments: sequences that a row may hold, static. A row with more gives NaN, as does one
        with a sequence longer than the model's context, or with a real id outside the vocabulary
        (-100, say, which other libraries put where nothing is to be scored).
      scan_layers: static, schedule: compile the blocks once, over a stacked copy of their
        parameters.
      mesh: static, schedule: the devices of a trainer, such as a mesh of ("fsdp", "tp"). Rows go
        over all of them, a power of two to each; parameters, stored as `sharding.TRAINER_RULES`
        has them, are gathered; gradients lie like parameters. None: one device.

    Returns:
      float32 [B, T]. The first token of a sequence and padding have 0.0 and no gradient.

    Raises:
      ValueError: shapes, dtypes, temperature or mode do not fit.
      NotImplementedError: mode "processed", whose cut has no derivative.

    Invariance: logp[b, t] depends on the parameters, on its sequence's tokens up to t, mode,
    temperature and the ops' topology: not on B, T, padding, packing, remat, the mesh or the program
    around it; it is what the engine emitted for that token. The gradient is a sum over rows by the
    tree of `gradient_sum`, and within a row over its tokens in ascending blocks. Each row's
    gradient of a weight is rounded once to the compute dtype, then everything is added in the
    parameters'.
    """
    _check(tokens, positions, segment_ids, max_segments)
    if model.layout is not None:
        raise ValueError(
            "token_logprobs: the parameters must lie as in a checkpoint, and this model's are laid "
            f"out over ranks for tensor_parallel_size={model.layout.degree}"
        )
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    call = _Call(
        graph=graph,
        config=model.config,
        ops=ops or default_ops(model.config),
        inv_temperature=_inverse(temperature, mode),
        max_segments=max_segments,
        scan_layers=scan_layers,
        mesh=None if mesh is None or mesh.size == 1 else RowMesh(mesh=mesh),
    )
    rows = _Rows(tokens, positions, segment_ids)
    if call.mesh is None:
        return _logprobs(call, params, rest, rows)
    return _logprobs(call, params, rest, rows.padded(call.mesh))[: tokens.shape[0]]


@functools.cache
def default_ops(config: TransformerConfig) -> TransformerOps:
    """The ops record that an engine on this platform takes, one object a config."""
    return transformer_ops(config, backend=pick_backends(jax.devices()[0], config.dtype))


class _Rows(NamedTuple):
    """[B, T] each, or None; see `token_logprobs`."""

    tokens: jax.Array
    positions: jax.Array | None
    segment_ids: jax.Array | None

    def padded(self, mesh: RowMesh) -> "_Rows":
        """With rows of padding, so that each device has as many."""
        count = mesh.padded(self.tokens.shape[0])
        ids = self.segment_ids
        if ids is None:
            ids = jnp.ones(self.tokens.shape, jnp.int32)
        return _Rows(
            pad_rows(self.tokens, count),
            None if self.positions is None else pad_rows(self.positions, count, 1),
            pad_rows(ids, count),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """What is static about a call."""

    graph: Any
    config: TransformerConfig
    ops: TransformerOps
    inv_temperature: float
    max_segments: int
    scan_layers: bool
    mesh: RowMesh | None

    def lay_out(self, rows: _Rows) -> TokenLayout:
        return lay_out(
            *rows,
            max_segments=self.max_segments,
            max_position=self.config.max_position,
            vocab_size=self.config.vocab_size,
        )


@functools.partial(jax.jit, static_argnums=0)
def _logprobs(call: _Call, params: nnx.State, rest: nnx.State, rows: _Rows) -> jax.Array:
    of_rows = functools.partial(_forward, call)
    gradients = functools.partial(_gradient, call)

    @jax.custom_vjp
    def run(params: nnx.State, rest: nnx.State, rows: _Rows) -> jax.Array:
        if call.mesh is None:
            return of_rows(params, rest, rows)
        return call.mesh.map_rows(of_rows, params, rest, rows)

    def forward(params: nnx.State, rest: nnx.State, rows: _Rows) -> tuple[jax.Array, Any]:
        return run(params, rest, rows), (params, rest, rows)

    def backward(saved: Any, cotangent: jax.Array) -> tuple[nnx.State, None, None]:
        params, rest, rows = saved
        if call.mesh is None:
            return gradients(params, rest, (rows, cotangent)), None, None
        return call.mesh.sum_rows(gradients, params, rest, (rows, cotangent)), None, None

    run.defvjp(forward, backward)
    return run(params, rest, rows)


def _gradient(
    call: _Call, params: nnx.State, rest: nnx.State, rows: tuple[_Rows, jax.Array]
) -> nnx.State:
    """The parameters' gradient of all rows."""
    # Cast once for all rows, so each row's gradients come in the compute dtype: that is their one
    # rounding. A token table's rows are added in its own dtype.
    cast = _in_compute_dtype(call, params, table=False)

    def one_row(row: tuple[_Rows, jax.Array]) -> nnx.State:
        row = jax.tree.map(lambda a: a[None], row)
        return _row_gradient(call, cast, rest, *row)

    return sum_over(one_row, rows, like=params)


def _in_compute_dtype(call: _Call, params: nnx.State, *, table: bool) -> nnx.State:
    """The parameters cast ahead of the loops that use them; the token table only if `table`."""

    def cast(path: tuple[Any, ...], variable: Any) -> Any:
        if path == TOKEN_TABLE and not table:
            return variable
        return variable.replace(to_compute_dtype(variable[...], call.config.dtype))

    return nnx.from_flat_state([(path, cast(path, v)) for path, v in nnx.to_flat_state(params)])


def _forward(call: _Call, params: nnx.State, rest: nnx.State, rows: _Rows) -> jax.Array:
    """All rows in one flat batch; float32 [B, T]."""
    layout = call.lay_out(rows)
    # Where the table is no head its rows are cast as they are looked up.
    params = _in_compute_dtype(call, params, table=call.config.tie_word_embeddings)
    head_rows = 1 << (LOGITS // call.config.vocab_size).bit_length() - 1
    flat = _flat_logprobs(call, params, rest, layout, rows.tokens.shape, head_rows=head_rows)
    out = jnp.zeros_like(flat)
    out = out.at[layout.target_place].set(flat, mode="drop", unique_indices=True)
    return jnp.where(layout.bad_row[:, None], jnp.nan, out.reshape(rows.tokens.shape))


def _row_gradient(
    call: _Call, params: nnx.State, rest: nnx.State, row: _Rows, cotangent: jax.Array
) -> nnx.State:
    """The parameters' gradient of one row [1, T], its forward pass made again.

    The row stands alone here and in company there: invariance is what makes both the same numbers.
    """
    layout = call.lay_out(row)
    flat = cotangent.reshape(-1).at[layout.target_place].get(mode="fill", fill_value=0)

    def logprobs(params: nnx.State) -> jax.Array:
        return _flat_logprobs(call, params, rest, layout, row.tokens.shape, head_rows=None)

    _, pull = jax.vjp(logprobs, params)
    (gradient,) = pull(flat)
    return gradient


def _flat_logprobs(
    call: _Call,
    params: nnx.State,
    rest: nnx.State,
    layout: TokenLayout,
    shape: tuple[int, ...],
    *,
    head_rows: int | None,
) -> jax.Array:
    """float32 [N]: row i scores `layout.target[i]`; rows without a target hold anything."""
    model = nnx.merge(call.graph, params, rest)
    pages = pages_for(shape[0], shape[1], call.max_segments)
    cache = make_cache(call.config, num_pages=pages, page_size=PAGE_SIZE)
    hidden, _ = model(layout.tokens, layout.batch, cache, call.ops, scan_layers=call.scan_layers)
    count, num_tokens = hidden.shape[0], layout.batch.num_tokens

    def score(hidden: jax.Array, target: jax.Array, num_rows: jax.Array) -> jax.Array:
        logits = model.logits(hidden, call.ops, num_rows=num_rows)
        rows, vocab = logits.shape
        logprobs, _ = target_logprobs(
            logits,
            target[:, None],
            jnp.full((rows,), call.inv_temperature, jnp.float32),
            jnp.full((rows,), LOWEST, jnp.int32),
            jnp.full((rows,), vocab, jnp.int32),
            backend=pick_backends(jax.devices()[0], model.config.dtype).log_softmax,
            num_rows=num_rows,
        )
        return logprobs[:, 0]

    if head_rows is None or count <= head_rows:
        return score(hidden, layout.target, num_tokens)
    chunks = -(-count // head_rows)
    extra = chunks * head_rows - count
    hidden = jnp.pad(hidden, ((0, extra), (0, 0))).reshape(chunks, head_rows, -1)
    target = jnp.pad(layout.target, (0, extra)).reshape(chunks, head_rows)
    left = num_tokens - jnp.arange(chunks, dtype=jnp.int32) * head_rows
    parts = lax.map(lambda x: score(*x), (hidden, target, jnp.clip(left, 0, head_rows)))
    return parts.reshape(-1)[:count]


def _inverse(temperature: float, mode: str) -> float:
    if mode == "processed":
        raise NotImplementedError(
            "token_logprobs: mode 'processed' is not supported, since the kept set has no "
            "derivative; expected 'raw' or 'scaled'"
        )
    if mode not in ("raw", "scaled"):
        raise ValueError(f"token_logprobs: mode={mode!r} must be 'raw' or 'scaled'")
    if not isinstance(temperature, numbers.Real) or not 0 <= temperature < float("inf"):
        raise ValueError(
            f"token_logprobs: temperature={temperature!r} must be a number of Python, 0 or above: "
            "its reciprocal is rounded on the host, as the sampler's is"
        )
    if mode == "raw" or temperature == 0:
        return 1.0
    return inverse_temperature(temperature)


def _check(tokens: Any, positions: Any, segment_ids: Any, max_segments: Any) -> None:
    op = "token_logprobs"
    if type(max_segments) is not int or max_segments < 1:
        raise ValueError(f"{op}: max_segments={max_segments!r} must be a positive whole number")
    contracts.check_shape(op, "tokens", tokens, (None, None))
    arrays = {"tokens": tokens, "positions": positions, "segment_ids": segment_ids}
    for name, array in arrays.items():
        if array is not None:
            contracts.check_dtype(op, name, array, jnp.int32)
            contracts.check_shape(op, name, array, tokens.shape)
    if 0 in tokens.shape:
        raise ValueError(f"{op}: tokens must hold at least one token, got shape {tokens.shape}")
