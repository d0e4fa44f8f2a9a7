"""Google Tunix (0.1.7): its trainers on what our engine sampled, with a difference of exactly 0.

    import functools
    from bi_jax.integrations import tunix as bi_tunix

    bi_tunix.install()                          # Tunix's log-probabilities of an Actor are ours
    actor = bi_tunix.Actor(model)               # float32 parameters, the model's compute dtype
    ClusterConfig(..., rollout_engine=functools.partial(bi_tunix.Rollout, engine_config=...))

Tunix computes every log-probability, the trainer's, the reference's and the rollout's, through one
function, `tunix.rl.common.compute_per_token_logps`. `install` puts one in its place that scores an
`Actor` with `token_logprobs` and leaves every other model to Tunix.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

try:
    from tunix.rl import common  # pyright: ignore[reportMissingImports]
    from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        f"bi_jax.integrations.tunix needs google-tunix ({error}); "
        "`pip install 'bi-jax[tunix]'` installs it"
    ) from error

from bi_jax.config import EngineConfig
from bi_jax.engine import Engine
from bi_jax.request import SamplingParams
from bi_jax.trainer_logprobs import token_logprobs

from .tunix_actor import MAX_SEGMENTS, Actor

__all__ = ["Actor", "Rollout", "compute_per_token_logps", "install", "installed", "uninstall"]


class Rollout(base_rollout.BaseRollout):
    """Tunix's rollout worker on our engine.

    Args:
      rollout_actor: an `Actor`; the engine runs on a copy of its parameters in the compute dtype,
        so that Tunix sees other arrays and sends new weights after each step.
      tokenizer: with Tunix's encode, decode, bos_id, eos_id and pad_id.
      mesh: of one device.
      rollout_config: Tunix's RolloutConfig; its seed (None: 0) and how many prompts this worker
        has completed make the seed of a completion.
      engine_config: the engine's settings, all of them schedule.

    Raises:
      ValueError: the actor is no `Actor`, the data type is another, or `install` was not called.
      NotImplementedError: a mesh of several devices.

    Invariance: the k-th prompt of a run has the same completion however prompts are cut into calls.
    """

    def __init__(
        self,
        rollout_actor: Any,
        tokenizer: Any,
        mesh: Any,
        rollout_config: Any,
        *,
        engine_config: EngineConfig | None = None,
    ) -> None:
        if not isinstance(rollout_actor, Actor):
            raise ValueError(
                f"rollout_actor must be a bi_jax Actor, got {type(rollout_actor).__name__}"
            )
        if mesh is not None and not mesh.empty and mesh.size > 1:
            raise NotImplementedError(
                f"bi_jax's Tunix rollout runs on one device, got a mesh of {mesh.size}"
            )
        if not installed():
            raise ValueError(
                "bi_jax.integrations.tunix.install() must come first: without it Tunix's trainer "
                "computes log-probabilities of its own, which differ from the sampled ones"
            )
        wanted, own = rollout_config.data_type, jnp.dtype(rollout_actor.config.dtype)
        if wanted is not None and jnp.dtype(wanted) != own:
            raise ValueError(
                f"data_type={jnp.dtype(wanted)} must be the model's compute dtype {own}, or the "
                "sampler and the trainer would round differently"
            )
        self._tokenizer = tokenizer
        self._config = rollout_config
        self._actor_graph, state = nnx.split(rollout_actor)
        self._whole = nnx.graphdef(rollout_actor.model)
        self._graph, _, self._rest = nnx.split(rollout_actor.model, nnx.Param, ...)
        self._engine = Engine(rollout_actor.model, config=engine_config)
        self._completed = 0
        self.update_params(state)

    @property
    def engine(self) -> Engine:
        """What samples; `engine.identity` says under which identity."""
        return self._engine

    def generate(self, prompts: list[str], rollout_config: Any, **kwargs: Any) -> Any:
        """One completion a prompt; its last token is the one that ended it.

        Args:
          prompts: texts.
          rollout_config: lengths, temperature, top_p, top_k, seed, eos_tokens, return_logprobs.
          kwargs: nothing is supported.

        Returns:
          Tunix's RolloutOutput; `logprobs`, where asked for, are after temperature and before
          top_p and top_k, as Tunix's trainers expect.

        Raises:
          ValueError: a prompt is too long or begins with the padding id.
        """
        if any(value is not None for value in kwargs.values()):
            raise NotImplementedError(f"bi_jax's Tunix rollout has no options, got {kwargs}")
        self._config = rollout_config
        ids = [self._encode(prompt, rollout_config.max_prompt_length) for prompt in prompts]
        params = [self._sampling(rollout_config, self._completed + i) for i in range(len(ids))]
        outputs = self._engine.generate(ids, params)
        self._completed += len(ids)
        padded = np.full((len(ids), rollout_config.max_prompt_length), self.pad_id(), np.int32)
        for row, prompt in zip(padded, ids, strict=True):
            row[len(row) - len(prompt) :] = prompt
        drawn = [output.outputs[0] for output in outputs]
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(list(c.token_ids)) for c in drawn],
            logits=[],
            tokens=[np.asarray(c.token_ids, np.int32) for c in drawn],
            left_padded_prompt_tokens=padded,
            logprobs=[c.logprobs for c in drawn] if rollout_config.return_logprobs else None,
        )

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """float32 [B, T] of the completions under the engine's weights, at its temperature."""
        state = nnx.state(self.model())
        return compute_per_token_logps(
            self._actor_graph,
            state,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            pad_id=self.pad_id(),
            eos_id=self.eos_id(),
            temperature=float(self._config.temperature),
        )

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Gives the engine the actor's new parameters: a copy, cast as the trainer casts.

        Raises:
          NotImplementedError: low-rank adapters alone.
          ValueError: structure or shapes differ.
        """
        if filter_types is not None and tuple(filter_types) != (nnx.Param,):
            raise NotImplementedError(
                f"bi_jax's Tunix rollout takes all parameters, got only {filter_types}"
            )
        device = jax.devices()[0]
        flat = [
            (path[1:], variable.replace(jax.device_put(variable[...], device)))
            for path, variable in nnx.to_flat_state(params)
            if isinstance(variable, nnx.Param)
        ]
        model = nnx.merge(self._graph, nnx.from_flat_state(flat), self._rest)
        self._engine.update_weights(nnx.state(model))

    def pad_id(self) -> int:
        """The tokenizer's."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The tokenizer's."""
        return self._tokenizer.eos_id()

    def model(self) -> Actor:
        """An actor of the engine's own arrays, never of the trainer's."""
        return Actor(nnx.merge(self._whole, self._engine.runner.state))

    def _encode(self, prompt: str, longest: int) -> list[int]:
        """As Tunix's own sampler: one beginning-of-sequence id in front, if there is one."""
        ids = [int(token) for token in self._tokenizer.encode(prompt)]
        begin = self._tokenizer.bos_id()
        if begin and ids[:1] != [begin]:
            ids = [begin, *ids]
        if len(ids) > longest:
            raise ValueError(
                f"a prompt has {len(ids)} tokens, expected at most {longest} (max_prompt_length): "
                f"{prompt[:60]!r}"
            )
        if ids[:1] == [self.pad_id()]:
            raise ValueError(
                f"a prompt begins with the padding id {ids[0]}, which Tunix takes for padding"
            )
        return ids

    def _sampling(self, config: Any, index: int) -> SamplingParams:
        ends = config.eos_tokens or [self.eos_id()]
        return SamplingParams(
            temperature=float(config.temperature),
            top_p=1.0 if config.top_p is None else float(config.top_p),
            top_k=config.top_k or 0,
            seed=_seed(config.seed, index),
            max_tokens=config.max_tokens_to_generate,
            stop_token_ids=[int(token) for token in ends],
            ignore_eos=True,
            logprobs_mode="scaled",
        )


def _seed(base: Any, index: int) -> int:
    if base is None:
        words = [0]
    elif isinstance(base, int):
        words = [base]
    else:
        is_key = jnp.issubdtype(base.dtype, jax.dtypes.prng_key)
        words = np.asarray(jax.random.key_data(base) if is_key else base).reshape(-1).tolist()
    return int(np.random.SeedSequence([*words, index]).generate_state(1, np.uint64)[0] >> 1)


def compute_per_token_logps(
    graphdef: Any,
    state: Any,
    prompt_tokens: jax.Array,
    completion_tokens: jax.Array,
    pad_id: int,
    eos_id: int,
    images: Any = None,
    stop_gradient: bool = True,
    return_logits: bool = False,
    segment_ids: jax.Array | None = None,
    segment_positions: jax.Array | None = None,
    temperature: float = 1.0,
) -> Any:
    """Tunix's function of this name for an `Actor`; another model goes to Tunix's own.

    Args:
      graphdef, state: an actor as `nnx.split` gives it.
      prompt_tokens: int32 [B, P], padded on the left.
      completion_tokens: int32 [B, C], padded on the right; in packed rows P is 0.
      pad_id: the padding id. Inside a prompt or a completion it is a token like others.
      eos_id: not read.
      images: None.
      stop_gradient: no gradient.
      return_logits: also float32 [B, C, V] after temperature. It takes another forward pass.
      segment_ids: int32 [B, C] of packed rows, 0 is padding; at most MAX_SEGMENTS a row.
      segment_positions: not read; a sequence starts where the id changes.
      temperature: of the sampler; 0 counts as 1.

    Returns:
      float32 [B, C], 0 at padding and at a sequence's first token; with the logits, if asked for.
    """
    if not isinstance(nnx.merge(graphdef, state), Actor):
        theirs = _theirs or common.compute_per_token_logps
        return theirs(
            graphdef,
            state,
            prompt_tokens,
            completion_tokens,
            pad_id,
            eos_id,
            images,
            stop_gradient,
            return_logits,
            segment_ids,
            segment_positions,
            temperature,
        )
    if images is not None:
        raise NotImplementedError("bi_jax's models take no images")
    return _logps(
        graphdef,
        state,
        prompt_tokens,
        completion_tokens,
        segment_ids,
        pad_id=pad_id,
        stop_gradient=stop_gradient,
        return_logits=return_logits,
        temperature=float(temperature),
    )


@functools.partial(
    jax.jit, static_argnames=("pad_id", "stop_gradient", "return_logits", "temperature")
)
def _logps(
    graphdef: Any,
    state: Any,
    prompt: jax.Array,
    completion: jax.Array,
    segment_ids: jax.Array | None,
    *,
    pad_id: int,
    stop_gradient: bool,
    return_logits: bool,
    temperature: float,
) -> Any:
    actor = nnx.merge(graphdef, state)
    tokens = jnp.concatenate([prompt, completion], axis=1).astype(jnp.int32)
    packed = segment_ids is not None
    if segment_ids is None:
        before = jnp.cumsum(prompt != pad_id, axis=1) > 0
        after = jnp.cumsum((completion != pad_id)[:, ::-1], axis=1)[:, ::-1] > 0
        segment_ids = jnp.concatenate([before, after], axis=1)
    segment_ids = segment_ids.astype(jnp.int32)
    start, segments = (0, MAX_SEGMENTS) if packed else (prompt.shape[1], 1)
    logps = token_logprobs(
        actor.model,
        tokens,
        segment_ids=segment_ids,
        temperature=temperature,
        mode="scaled",
        max_segments=segments,
    )[:, start:]
    if stop_gradient:
        logps = jax.lax.stop_gradient(logps)
    if not return_logits:
        return logps
    logits = actor.logits(tokens, segment_ids, max_segments=segments)
    # Row t holds what token t was drawn from, which is computed at the token before it.
    logits = jnp.pad(logits[:, :-1], ((0, 0), (1, 0), (0, 0)))[:, start:]
    if temperature not in (0.0, 1.0):
        logits /= temperature
    return logps, jax.lax.stop_gradient(logits) if stop_gradient else logits


_theirs: Any = None


def install() -> None:
    """From now on Tunix scores every `Actor` with `token_logprobs`. Call it before training."""
    global _theirs
    if not installed():
        _theirs = common.compute_per_token_logps
        common.compute_per_token_logps = compute_per_token_logps


def uninstall() -> None:
    """Gives Tunix its own function back; programs that are compiled already keep ours."""
    global _theirs
    if installed():
        common.compute_per_token_logps = _theirs
        _theirs = None


def installed() -> bool:
    """Whether Tunix's log-probabilities of an `Actor` are ours."""
    return common.compute_per_token_logps is compute_per_token_logps
