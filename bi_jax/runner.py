"""The one place that jits: runs a step's plan in the smallest bucket that holds it."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bi_jax.models.cast import to_compute_dtype
from bi_jax.models.ops import TransformerOps
from bi_jax.models.transformer import Transformer
from bi_jax.pallas_kernels.ragged import RaggedBatch

from . import flags
from .audited import AuditedJit
from .batch import LogitRow, arrays_one_on, bucket_for, token_arrays, top_bucket
from .kv_cache import make_cache
from .peer_memory import peer_memory, peers_table
from .program_store import ProgramStore, program_store
from .row_products import TENSOR_AXIS
from .sampling import TokenBackends, TokenChoice, sample, stack_rows
from .sampling_rows import StackedRows
from .scheduler import PlannedSequence, StepPlan
from .scheduler import Sequence as ScheduledSequence
from .sharding import Placer
from .step_arguments import Launched, LogitRows, StepArguments, pack, ragged, unpack
from .vocabulary_rows import rows_for, with_rows


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """Shapes of the compiled steps; all of it is schedule."""

    token_buckets: tuple[int, ...]
    max_num_seqs: int
    num_pages: int
    page_size: int
    max_model_len: int

    @property
    def pages_a_request(self) -> int:
        return -(-self.max_model_len // self.page_size)


def compute_state(state: nnx.State, dtype: str) -> nnx.State:
    """A copy of a model's state with every parameter cast to the compute dtype, once.

    Sampler and trainer round parameters by the same function, so both see the same bits. Tables
    that are no parameters (rotary) keep their dtype.
    """

    def cast(variable: Any) -> Any:
        if isinstance(variable, nnx.Param):
            return variable.replace(to_compute_dtype(variable[...], dtype))
        return variable

    return jax.tree.map(cast, state, is_leaf=lambda v: isinstance(v, nnx.Variable))


class Runner:
    """Holds parameters and cache on the device and runs steps.

    A program is compiled for each (token bucket, logit rows, top tokens, filters, steps) that comes
    up; which one runs is schedule.
    """

    def __init__(
        self,
        model: Transformer,
        ops: TransformerOps,
        config: RunnerConfig,
        *,
        backend: TokenBackends,
        audited: bool = True,
        placer: Placer | None = None,
        ops_over_peers: Callable[[jax.Array], TransformerOps] | None = None,
    ) -> None:
        self.config = config
        self.model_config = model.config
        self._ops = ops
        self._ops_over_peers = ops_over_peers
        self._peers = None
        if ops_over_peers is not None and placer is not None and placer.mesh is not None:
            self._peers = peer_memory(placer.mesh, TENSOR_AXIS)
        self._backend = backend
        self._graph, state = nnx.split(model)
        self._placer = placer
        self._table_rows = rows_for(model.config.vocab_size, ops)
        state = compute_state(state, model.config.dtype)
        if placer is not None:
            self._keep(placer.place_state(state, laid_out=model.layout is not None))
        else:
            self._keep(with_rows(state, self._table_rows))
        self.reset_cache()
        options = flags.compiler_options(jax.default_backend())
        self.step_program = AuditedJit(
            self._step,
            audited=audited,
            store=self._program_store(options) if placer is None else None,
            static_argnames=("top", "filters", "steps", "logit_rows"),
            donate_argnames=("cache",),
            compiler_options=options,
        )
        self.programs: dict[tuple[int, int, int, bool, int], float] = {}
        self.buckets_used: set[int] = set()
        self._stacked: StackedRows | None = None

    def _program_store(self, options: Any) -> ProgramStore | None:
        """Where this runner's programs may be kept; see there for what else tells them apart."""
        parts = {"graph": self._graph, "model": self.model_config, "ops": self._ops.description}
        return program_store({**parts, "backend": self._backend, "options": options})

    @property
    def sums_through_peers(self) -> bool:
        """Whether sums over cards go through memory that they write into directly."""
        return self._peers is not None

    def step_arguments(self, plan: StepPlan, rows: Sequence[LogitRow]) -> StepArguments:
        """The host arrays of a step, in the smallest buckets that hold it."""
        config = self.config
        tokens = bucket_for(plan.num_tokens, config.token_buckets)
        few = min(tokens, config.max_num_seqs)
        return StepArguments(
            tokens=token_arrays(
                plan,
                num_rows=tokens,
                num_requests=config.max_num_seqs,
                pages_a_request=config.pages_a_request,
            ),
            rows=self._logit_rows(rows, size=few if len(rows) <= few else tokens),
            top=top_bucket(rows, self.model_config.vocab_size),
            filters=any(row.sampling.filtered for row in rows),
            steps=plan.num_steps,
        )

    def _logit_rows(self, rows: Sequence[LogitRow], *, size: int) -> LogitRows:
        # From one step to the next often only the positions change.
        sampling = [row.sampling for row in rows]
        stacked = self._stacked
        if stacked is None or not stacked.is_of(sampling, size):
            arrays = stack_rows(sampling, [0] * len(rows), size=size)
            stacked = self._stacked = StackedRows(sampling=sampling, size=size, arrays=arrays)
        return LogitRows(
            row=_column([row.row for row in rows], size),
            target=_column([row.target for row in rows], size),
            num_rows=np.asarray(len(rows), np.int32),
            sampling=dataclasses.replace(
                stacked.arrays, position=_column([row.position for row in rows], size)
            ),
        )

    def start(self, plan: StepPlan, rows: Sequence[LogitRow]) -> Launched:
        """Hands a plan's step to the device: tokens are computed, keys stored, rows chosen."""
        started = time.perf_counter()
        step = self.step_arguments(plan, rows)
        choice, following = self.launch(step)
        return Launched(
            plan=plan, rows=rows, step=step, choice=choice, following=following, started=started
        )

    def start_one_on(self, before: Launched, plan: StepPlan) -> Launched:
        """Hands over the step after `before`, on the tokens that `before` draws on the device.

        Args:
          before: a step in which each sequence draws and does nothing else.
          plan: the same sequences, each one token further.
        """
        started = time.perf_counter()
        old, sampling = before.step, before.step.rows.sampling
        further = dataclasses.replace(sampling, position=sampling.position + 1)
        step = dataclasses.replace(
            old,
            tokens=arrays_one_on(old.tokens, plan, self.config.page_size),
            rows=dataclasses.replace(old.rows, sampling=further),
        )
        choice, following = self.launch(step, tokens=before.following)
        return Launched(
            plan=plan,
            rows=before.rows,
            later=before.later + 1,
            step=step,
            choice=choice,
            following=following,
            started=started,
        )

    def collect(self, launched: Launched) -> list[TokenChoice]:
        """Waits for a step.

        Returns:
          For each of the plan's steps: NumPy arrays, one entry a row.
        """
        host, step = jax.device_get(launched.choice), launched.step
        if step.program not in self.programs:
            self.programs[step.program] = time.perf_counter() - launched.started
        count = len(launched.rows)
        return [jax.tree.map(lambda a, i=i: a[i, :count], host) for i in range(step.steps)]

    def launch(
        self,
        step: StepArguments,
        *,
        tokens: jax.Array | None = None,
        words: jax.Array | None = None,
    ) -> tuple[TokenChoice, jax.Array]:
        """Hands a step to the device and does not wait for it.

        Args:
          step: its arrays.
          tokens: int32 [T] on the device, in place of the step's own.
          words: over several devices, what `pack` makes of the step, on them already.

        Returns:
          On the device: the choices of all steps, [steps, R] each, and int32 [T], the tokens of the
          step after them if each of this one's rows draws.
        """
        self.buckets_used.add(step.program[0])
        arguments = self._arguments(step, tokens, words)
        self._cache, chosen = self.step_program(*arguments, **step.statics)
        return chosen

    def compile(self, step: StepArguments) -> float:
        """Compiles a step's program without running it; several threads may, for several steps.

        Returns:
          The seconds that it took.
        """
        started = time.perf_counter()
        self.step_program.compile(*self._arguments(step), **step.statics)
        seconds = time.perf_counter() - started
        self.programs.setdefault(step.program, seconds)
        return seconds

    def blank_step(
        self, tokens: int, *, logit_rows: int | None = None, steps: int = 1
    ) -> StepArguments:
        """A step that only has the shapes of one, for `compile`.

        Args:
          tokens: at most the largest bucket.
          logit_rows: None: as many as a step that draws needs.
          steps: in one dispatch.
        """
        config = self.config
        bucket = bucket_for(tokens, config.token_buckets)
        item = PlannedSequence(ScheduledSequence(seq_id=-1, token_ids=[0]), 0, 1, (0,))
        return StepArguments(
            tokens=token_arrays(
                StepPlan(items=(item,)),
                num_rows=bucket,
                num_requests=config.max_num_seqs,
                pages_a_request=config.pages_a_request,
            ),
            rows=self._logit_rows([], size=logit_rows or min(bucket, config.max_num_seqs)),
            top=0,
            filters=False,
            steps=steps,
        )

    def _arguments(
        self,
        step: StepArguments,
        tokens: jax.Array | None = None,
        words: jax.Array | None = None,
    ) -> tuple[Any, ...]:
        # NumPy arrays: the jitted step takes them as they are.
        named = step.tokens.tokens if tokens is None else tokens
        peers = None if self._peers is None else self._peers.addresses
        batch: Any = ragged(step.tokens)
        rows: LogitRows | None = step.rows
        if self._over_devices:
            # Each array goes to each device, and that costs the host more than cutting one up.
            batch, rows = pack(step) if words is None else words, None
        return step.program, self._leaves, self._cache, named, batch, rows, peers

    @property
    def _over_devices(self) -> bool:
        return self._placer is not None and self._placer.mesh is not None

    def reset_cache(self) -> None:
        """An empty cache in place of the old one, whose buffers a failed step may have taken."""
        self._cache = None  # the old one's memory is free before the new one is made
        placer = self._placer
        self._cache = make_cache(
            self.model_config,
            num_pages=self.config.num_pages,
            page_size=self.config.page_size,
            heads=None if placer is None else placer.layout.cache_heads,
            sharding=None if placer is None else placer.cache_sharding(),
        )

    def update_state(self, state: nnx.State) -> None:
        """Replaces the parameters by a cast copy of `state`; no program is compiled again."""
        new = compute_state(state, self.model_config.dtype)
        if self._placer is not None:
            new = self._placer.place_state(new)
        else:
            new = with_rows(new, self._table_rows)
        if jax.tree.structure(new) != jax.tree.structure(self._state):
            raise ValueError("the new weights must have the structure of the engine's model")
        for old, fresh in zip(jax.tree.leaves(self._state), jax.tree.leaves(new), strict=True):
            if old.shape != fresh.shape or old.dtype != fresh.dtype:
                raise ValueError(
                    f"expected a weight of shape {list(old.shape)} {old.dtype}, got "
                    f"{list(fresh.shape)} {fresh.dtype}"
                )
        self._keep(jax.tree.map(jnp.copy, new))

    def _keep(self, state: nnx.State) -> None:
        # A step is handed the bare leaves: to flatten a state takes milliseconds each time.
        self._state = state
        self._leaves, self._structure = jax.tree.flatten(state)

    @property
    def state(self) -> nnx.State:
        """The parameters that steps run on, in the compute dtype."""
        vocab_size = self.model_config.vocab_size
        if self._placer is not None or self._table_rows == vocab_size:
            return self._state
        return with_rows(jax.tree.map(lambda leaf: leaf, self._state), vocab_size)

    def whole_parameters(self) -> Mapping[str, Any] | None:
        """Name -> array as in a checkpoint, on the host; None where `state` has them so."""
        return None if self._placer is None else self._placer.restored(self._state)

    def _step(
        self, leaves: list[jax.Array], cache: Any, *step: Any, **statics: Any
    ) -> tuple[Any, tuple[TokenChoice, jax.Array]]:
        state = jax.tree.unflatten(self._structure, leaves)
        run = functools.partial(self._step_function, **statics)
        if self._placer is not None:
            run = self._placer.over_ranks(run, state)
        return run(state, cache, *step)

    def _step_function(
        self,
        state: nnx.State,
        cache: Any,
        tokens: jax.Array,
        batch: Any,
        rows: LogitRows | None,
        peers: jax.Array | None,
        *,
        top: int,
        filters: bool,
        steps: int,
        logit_rows: int,
    ) -> tuple[Any, tuple[TokenChoice, jax.Array]]:
        """The cache, and what `launch` returns."""
        if rows is None:
            batch, rows = unpack(
                batch,
                num_tokens=tokens.shape[0],
                num_requests=self.config.max_num_seqs,
                pages_a_request=self.config.pages_a_request,
                logit_rows=logit_rows,
            )
        ops = self._ops
        if peers is not None and self._ops_over_peers is not None:
            ops = self._ops_over_peers(peers_table(peers, TENSOR_AXIS))

        def one(cache: Any, tokens: jax.Array, batch: RaggedBatch, rows: LogitRows) -> Any:
            return self._one_step(state, cache, tokens, batch, rows, ops, top=top, filters=filters)

        if steps == 1:
            cache, choice = one(cache, tokens, batch, rows)
            following = begun_with(tokens, choice.token)
            return cache, (jax.tree.map(lambda a: a[None], choice), following)

        def go_on(carry: Any, _: None) -> Any:
            # Every item is one token, so row i of the logits is row i of the tokens.
            cache, tokens, positions, drawn_at = carry
            here = dataclasses.replace(batch, positions=positions)
            sampling = dataclasses.replace(rows.sampling, position=drawn_at)
            cache, choice = one(cache, tokens, here, dataclasses.replace(rows, sampling=sampling))
            tokens = begun_with(tokens, choice.token)
            return (cache, tokens, positions + 1, drawn_at + 1), choice

        start = (cache, tokens, batch.positions, rows.sampling.position)
        (cache, following, *_), choices = jax.lax.scan(go_on, start, None, length=steps)
        return cache, (choices, following)

    def _one_step(
        self,
        state: nnx.State,
        cache: Any,
        tokens: jax.Array,
        batch: RaggedBatch,
        rows: LogitRows,
        ops: TransformerOps,
        *,
        top: int,
        filters: bool,
    ) -> tuple[Any, TokenChoice]:
        model = nnx.merge(self._graph, state)
        hidden, cache = model(tokens, batch, cache, ops)
        picked = hidden.at[rows.row].get(mode="clip")
        logits = model.logits(picked, ops, num_rows=rows.num_rows)
        logits = logits[:, : self.model_config.vocab_size]
        choice = sample(
            logits,
            rows.sampling,
            backend=self._backend,
            num_rows=rows.num_rows,
            top=top,
            filters=filters,
            target=rows.target,
        )
        return cache, choice


def begun_with(tokens: jax.Array, first: jax.Array) -> jax.Array:
    """Tokens whose first ones are others."""
    # Not `tokens.at[:n].set(first)`: where n is all of them, its index has no entries and becomes
    # an operand of the shard_map whose user XLA takes away; over what is left Shardy's
    # canonicalizer in jaxlib 0.11.2 ends the process (SIGSEGV).
    return jax.lax.dynamic_update_slice(tokens, first, (0,))


def _column(values: list[int], size: int) -> np.ndarray:
    return np.array(values + [0] * (size - len(values)), np.int32)
