"""The learning half of `train_grpo.py`: micro-batches, one sum, one update."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from bi_jax import flags
from bi_jax.gradient_sum import accumulate, clip_by_global_norm, sum_over
from bi_jax.identity import Identity, digest_of_state, warn_if_different
from bi_jax.identity_file import NAME, read_identity, write_identity
from bi_jax.models import Transformer
from bi_jax.pallas_kernels.policy_loss import policy_loss
from bi_jax.request import RequestOutput
from bi_jax.trainer_logprobs import token_logprobs

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Settings of the update; `micro_batch` alone changes no bit."""

    learning_rate: float
    updates: int
    kl_coef: float
    clip: float
    max_norm: float
    micro_batch: int


class Rollout(NamedTuple):
    """R completions as arrays [R, T] and their advantages [R].

    tokens and real (int32, 1 where there is a token), drawn (bool, tokens of the completion), old
    (float32, their log-probabilities as emitted).
    """

    tokens: Any  # NumPy on the host, traced inside a program
    real: Any
    drawn: Any
    old: Any
    advantages: Any

    @classmethod
    def of(cls, outputs: list[RequestOutput], advantages: np.ndarray, *, length: int) -> "Rollout":
        """Right-padded rows, question by question."""
        pairs = [(o.prompt_token_ids, c) for o in outputs for c in o.outputs]
        shape = (len(pairs), length)
        tokens, real = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        drawn, old = np.zeros(shape, np.bool_), np.zeros(shape, np.float32)
        for row, (prompt, completion) in enumerate(pairs):
            start, end = len(prompt), len(prompt) + len(completion.token_ids)
            tokens[row, :end] = [*prompt, *completion.token_ids]
            real[row, :end], drawn[row, start:end] = 1, True
            old[row, start:end] = completion.logprobs
        return cls(tokens, real, drawn, old, advantages.reshape(-1))

    def rows(self, start: int, count: int) -> "Rollout":
        return Rollout(*(a[start : start + count] for a in self))


class Trainer:
    """Float32 parameters, AdamW, and the programs that move them."""

    def __init__(self, model: Transformer, config: TrainerConfig) -> None:
        self.config = config
        self._model_config = model.config
        self._graph, state, self._rest = nnx.split(model, nnx.Param, ...)
        self._template = state
        self.params = {name: jnp.asarray(v[...]) for name, v in _named(state)}
        self._reference = dict(self.params) if config.kl_coef else None
        self._optimizer = optax.adamw(config.learning_rate, b1=0.9, b2=0.95, weight_decay=0.0)
        self.moments = self._optimizer.init(self.params)
        options = flags.compiler_options(jax.default_backend())
        self._gradient = jax.jit(self._gradient_of, compiler_options=options)
        self._logprobs = jax.jit(self._logprobs_of, compiler_options=options)
        self._apply = jax.jit(self._apply_to, compiler_options=options)

    def warm_up(self, length: int) -> None:
        """Compiles the gradient of micro-batches of `length` tokens, on rows of padding."""
        shape = (self.config.micro_batch, length)
        ids, old = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        blank = Rollout(ids, ids, np.zeros(shape, np.bool_), old, old[:, 0])
        jax.block_until_ready(self._gradient(self.params, blank, jnp.asarray(old), np.float32(1)))

    def update(self, rollout: Rollout) -> dict[str, Any]:
        """All inner updates on one rollout.

        Returns:
          Metrics of the first update, where the policy is still the one that sampled.

        Raises:
          RuntimeError: the trainer's log-probabilities are not the sampler's.
        """
        first: dict[str, Any] = {}
        reference = self._reference_logprobs(rollout)
        for index in range(self.config.updates):
            metrics = self._update_once(rollout, reference)
            first = first or metrics
            if index == 0 and metrics["sampler_trainer_difference"] != 0:
                raise RuntimeError(
                    "expected the log-probabilities that were emitted while sampling, got "
                    f"some that differ by {metrics['sampler_trainer_difference']}"
                )
        return first | {"last_clip_fraction": metrics["clip_fraction"]}

    def state(self) -> nnx.State:
        """The parameters as the model's state, for `Engine.update_weights`."""
        return nnx.state(nnx.merge(self._graph, self._as_state(self.params), self._rest))

    def digest(self) -> str:
        """Of the float32 parameters."""
        return digest_of_state(self._as_state(self.params))

    def save(self, folder: Path, step: int, identity: Identity) -> None:
        """Writes all that the next steps depend on, and the identity under which it came about.

        The identity comes last: a checkpoint without one was interrupted, and does not count.
        """
        path = folder.resolve() / "checkpoints" / f"{step:06d}"
        (path / NAME).unlink(missing_ok=True)
        with ocp.StandardCheckpointer() as checkpointer:
            state = {"params": self.params, "moments": self.moments}
            checkpointer.save(path / "state", state, force=True)
        write_identity(path, identity)

    def restore(self, folder: Path) -> tuple[int, Identity | None]:
        """Loads the last checkpoint.

        Returns:
          The steps behind it and its identity; 0 and None: there is no checkpoint.

        Raises:
          ValueError: it is damaged, or of another model.
        """
        root = folder.resolve() / "checkpoints"
        found = [path.parent for path in root.glob(f"*/{NAME}") if path.parent.name.isdigit()]
        if not found:
            return 0, None
        last = max(found, key=lambda path: int(path.name))
        like = {"params": self.params, "moments": self.moments}
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        try:
            with ocp.StandardCheckpointer() as checkpointer:
                saved = checkpointer.restore(last / "state", like)
        except Exception as error:  # Orbax raises plain Exception for files that are damaged
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(f"the checkpoint {last} cannot be restored: {reason}") from error
        self.params, self.moments = saved["params"], saved["moments"]
        return int(last.name), read_identity(last)

    def _update_once(self, rollout: Rollout, reference: list[jax.Array]) -> dict[str, Any]:
        size, total, parts = self.config.micro_batch, None, []
        tokens = np.float32(rollout.drawn.sum())
        for index, start in enumerate(range(0, len(rollout.tokens), size)):
            micro = rollout.rows(start, size)
            gradient, loss, terms = self._gradient(self.params, micro, reference[index], tokens)
            total = accumulate(total, {"gradient": gradient, "loss": loss}, sequences=size)
            parts.append(jax.device_get(terms))
        assert total is not None  # a rollout has rows
        result = total.result()
        self.params, self.moments, norm = self._apply(self.params, self.moments, result["gradient"])
        at = rollout.drawn
        logprobs, ratio, kl = (np.concatenate(a)[at] for a in zip(*parts, strict=True))
        clip = self.config.clip
        return {
            "loss": float(result["loss"]),
            "gradient_norm": float(norm),
            "kl": float(kl.astype(np.float64).mean()),
            "ratio_min": float(ratio.min()),
            "ratio_max": float(ratio.max()),
            "clip_fraction": float((np.abs(ratio - 1) > clip).mean()),
            "sampler_trainer_difference": float(np.abs(logprobs - rollout.old[at]).max()),
            "tokens": int(tokens),
        }

    def _reference_logprobs(self, rollout: Rollout) -> list[jax.Array]:
        """Per micro-batch; what was emitted, where there is no reference model."""
        size = self.config.micro_batch
        micros = [rollout.rows(start, size) for start in range(0, len(rollout.tokens), size)]
        if self._reference is None:
            return [jnp.asarray(micro.old) for micro in micros]
        return [self._logprobs(self._reference, micro) for micro in micros]

    def _logprobs_of(self, params: Params, rollout: Rollout) -> jax.Array:
        model = nnx.merge(self._graph, self._as_state(params), self._rest)
        return token_logprobs(model, rollout.tokens, segment_ids=rollout.real, scan_layers=True)

    def _gradient_of(
        self, params: Params, rollout: Rollout, reference: jax.Array, tokens: jax.Array
    ) -> tuple[Params, jax.Array, tuple[jax.Array, ...]]:
        def loss(params: Params) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            logprobs = self._logprobs_of(params, rollout)
            terms = policy_loss(
                logprobs,
                rollout.old,
                rollout.advantages,
                rollout.drawn,
                normaliser=tokens,
                reference=reference,
                clip_low=self.config.clip,
                clip_high=self.config.clip,
                kl_coef=self.config.kl_coef,
            )
            return terms.loss, (logprobs, terms.ratio, terms.kl)

        rows, pull, aux = jax.vjp(loss, params, has_aux=True)
        (gradient,) = pull(jnp.ones_like(rows))
        return gradient, sum_over(lambda row: row, rows), aux

    def _apply_to(
        self, params: Params, moments: Any, gradient: Params
    ) -> tuple[Params, Any, jax.Array]:
        gradient, norm = clip_by_global_norm(gradient, self.config.max_norm)
        updates, moments = self._optimizer.update(gradient, moments, params)
        moved: Any = optax.apply_updates(params, updates)
        return moved, moments, norm

    def _as_state(self, params: Params) -> nnx.State:
        flat = nnx.to_flat_state(self._template)
        return nnx.from_flat_state([(path, v.replace(params[_name(path)])) for path, v in flat])


def check_identity(saved: Identity, now: Identity) -> None:
    """Warns where a resumed run would compute other bits than the one that was interrupted.

    Raises:
      ValueError: all else is equal and the weights are not those that were saved.
    """
    other = warn_if_different(
        saved.with_weights(""), now.with_weights(""), what="interrupted and the resumed run"
    )
    if not other and saved.weights != now.weights:
        raise ValueError(
            f"the checkpoint is damaged: its weights have the digest {now.weights[:16]}, and "
            f"{saved.weights[:16]} was written"
        )


def _named(state: nnx.State) -> list[tuple[str, Any]]:
    return [(_name(path), variable) for path, variable in nnx.to_flat_state(state)]


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
