"""The engine: requests in, completions out; plan, run, commit."""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from bi_jax.models.checkpoint import find_model, load_params, read_config
from bi_jax.models.config import TP_INVARIANT
from bi_jax.models.ops import TransformerOps
from bi_jax.models.transformer import Transformer, build_transformer

from .active import ActiveRequest
from .cache_size import check_page_size, plan_pages
from .call_arguments import Prompt, as_params, as_prompts
from .config import EngineConfig
from .flags import enable_compilation_cache
from .identity import Identity, PendingIdentity, digest_of_state, identity_of
from .interrupts import uninterrupted
from .ops import pick_backends, transformer_ops
from .progress import Progress
from .request import Request, RequestOutput, SamplingParams
from .runner import Runner, RunnerConfig
from .scheduler import Scheduler, SchedulerConfig
from .sharding import check_layout, model_placer
from .step_loop import StepLoop, locked
from .tokenizer import Tokenizer


class Engine(StepLoop):
    """Generates completions whose bits do not depend on what else is generated.

    Args:
      model: the transformer; its parameters are copied, cast to the compute dtype.
      tokenizer: turns text prompts into ids and ids into text; None: ids only.
      config: settings, all of them schedule.
      ops: what to compute with; None: what `bi_jax.ops` picks for this platform. Others, such as
        `stock_ops.stock_ops()`, keep no promise; they are for controls and benchmarks.
      model_name: said in outputs and errors.
      tensor_parallel_size: devices that the weights and the cache are cut over. It changes bits,
        and the identity says so, unless the model's topology is "tp_invariant".
      mesh: a mesh with the axes of `bi_jax.sharding`, of that many devices; None: the first ones.

    Raises:
      ValueError: the settings do not fit the model, or the degree does not fit the topology or the
        devices.
      NotImplementedError: no backend of ours runs on this platform.

    Invariance: a completion's token ids and log-probabilities depend on its prompt, its sampling
    parameters, its seed, its index and the engine's identity; not on `config`, other requests,
    their order, or when they were added.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        ops: TransformerOps | None = None,
        model_name: str = "",
        tensor_parallel_size: int = 1,
        mesh: Mesh | None = None,
    ) -> None:
        if not isinstance(model, Transformer):
            raise ValueError(
                f"Engine takes a Transformer, got a {type(model).__name__}; "
                "Engine.from_pretrained takes a model's name or path"
            )
        self.config = config or EngineConfig()
        self.model_config = model.config
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.backends = pick_backends(jax.devices()[0], model.config.dtype)
        self.placer = model_placer(model.config, self.backends, tensor_parallel_size, mesh)
        layout = None if self.placer is None else self.placer.layout
        check_layout(model, layout, ops)
        make_ops = functools.partial(
            transformer_ops, model.config, backend=self.backends, layout=layout
        )
        if ops is None:
            check_page_size(self.config.page_size, model.config)
        self.ops = ops or make_ops()

        def over_peers(peers: jax.Array) -> TransformerOps:
            return make_ops(peers=peers)

        # Other ops keep no promise, so there is nothing to hold them to.
        self.audited = self.config.audit and ops is None
        self.max_model_len = self.config.max_model_len or model.config.max_position
        if self.max_model_len > model.config.max_position:
            raise ValueError(
                f"max_model_len={self.max_model_len} must not exceed the model's context of "
                f"{model.config.max_position} tokens"
            )
        if self.config.compilation_cache and jax.config.jax_enable_compilation_cache:
            enable_compilation_cache()
        num_pages, self.cache_size = plan_pages(
            self.config, model.config, max_model_len=self.max_model_len, placer=self.placer
        )
        scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=self.config.max_num_seqs,
                max_num_batched_tokens=self.config.max_num_batched_tokens,
                num_pages=num_pages,
                page_size=self.config.page_size,
                max_model_len=self.max_model_len,
                prefix_caching=self.config.prefix_caching,
                decode_steps=self.config.decode_steps,
            )
        )
        self.runner = Runner(
            model,
            self.ops,
            RunnerConfig(
                token_buckets=self.config.buckets(jax.default_backend()),
                max_num_seqs=self.config.max_num_seqs,
                num_pages=num_pages,
                page_size=self.config.page_size,
                max_model_len=self.max_model_len,
            ),
            backend=self.backends.tokens,
            audited=self.audited,
            placer=self.placer,
            ops_over_peers=over_peers if self.config.peer_memory else None,
        )
        self.weights_version = 0
        # Hashing the weights takes seconds and needs nobody to wait for it.
        self._hashing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bi-jax-digest")
        self._pending_identity = self._hash_weights()
        self._request_ids = itertools.count()
        self._seq_ids = itertools.count()
        self._start_afresh(scheduler)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        dtype: str | None = None,
        tokenizer: str | Path | None = None,
        config: EngineConfig | None = None,
        tensor_parallel_size: int = 1,
        tp_invariant: bool = False,
        mesh: Mesh | None = None,
    ) -> Engine:
        """An engine for a Hugging Face folder or hub id, a GGUF file, or an Orbax checkpoint.

        Args:
          name: path or hub id.
          dtype: compute dtype; None: float32 on a CPU; on a GPU the checkpoint's own, bfloat16
            where that is float32.
          tokenizer: where the tokenizer is, if not with the model.
          config: the engine's settings.
          tensor_parallel_size, mesh: as for the engine; each device is sent its own part only.
          tp_invariant: take the topology whose bits do not depend on tensor_parallel_size.

        Raises:
          ValueError: there is no such model, or files are damaged or contradict one another.
          NotImplementedError: the model needs something that is not supported; it is named.
        """
        model_config = read_config(name)
        if dtype is None:
            dtype = _default_dtype(model_config.dtype)
        model_config = model_config.replace(dtype=dtype, param_dtype=dtype)
        if tp_invariant:
            model_config = model_config.replace(topology=TP_INVARIANT)
        backends = pick_backends(jax.devices()[0], dtype)
        placer = model_placer(model_config, backends, tensor_parallel_size, mesh)
        source = find_model(name)
        text = Tokenizer.from_pretrained(source.path if tokenizer is None else tokenizer)
        if placer is None:
            model = build_transformer(model_config, load_params(name, model_config, dtype=dtype))
        else:
            params = placer.load(name, model_config, dtype=dtype)
            model = build_transformer(model_config, params, layout=placer.layout)
        return cls(
            model,
            tokenizer=text,
            config=config,
            model_name=str(name),
            tensor_parallel_size=tensor_parallel_size,
            mesh=mesh,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Completes the prompts and returns when all are done, in the order of the prompts.

        Args:
          prompts: a text or a list of token ids, or a sequence of them.
          sampling_params: one for all, or one a prompt; None: the defaults.
          progress: show a progress bar on a terminal.

        Raises:
          ValueError: a prompt or a parameter cannot be served; nothing has been generated then.
        """
        prompts = as_prompts(prompts)
        pairs = zip(prompts, as_params(sampling_params, len(prompts)), strict=True)
        requests = [self.make_request(prompt, params) for prompt, params in pairs]
        actives: list[ActiveRequest] = []
        try:
            with self._lock, uninterrupted():
                self._check_room(len(requests))
                for request in requests:
                    actives.append(self._add(request, claimed=True))
            with Progress(total=len(requests), shown=progress) as bar:
                left = actives
                while left:
                    with self._lock:
                        if all(active.final is None for active in left):
                            self._step()
                    for active in left:
                        if active.final is not None:
                            bar.advance(active.num_drawn)
                    left = [active for active in left if active.final is None]
        finally:
            self._drop(actives)  # those that an exception left behind
        return [active.final for active in actives if active.final is not None]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Completes one prompt, yielding what there is whenever it grew, and the whole at the end.

        Leaving off (closing the iterator) aborts the request.
        """
        request = self.make_request(prompt, as_params(sampling_params, 1)[0])
        actives: list[ActiveRequest] = []
        try:
            with uninterrupted():
                actives.append(self._add(request, claimed=True))
            (active,) = actives
            output = None
            # Others run steps too: the end may come between two of ours, and must still be shown.
            while output is None or output is not active.final:
                output = self._advance(active)
                if output is not None:
                    yield output
        finally:
            self._drop(actives)

    async def stream_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `stream`, for many prompts at once in one event loop: they share their steps.

        A consumer that is slow holds nobody up. Closing the iterator, or cancelling its task,
        aborts its request and no other. Steps run in threads, so the loop stays free.

        Raises:
          ValueError: the request cannot be served.
          StepFailed: the step that this consumer waited for raised. Its request is aborted, and the
            other consumers' requests go on.
        """
        request = self.make_request(prompt, as_params(sampling_params, 1)[0])
        actives: list[ActiveRequest] = []
        left = threading.Event()

        def join() -> None:
            with self._lock:
                if not left.is_set():
                    actives.append(self._add(request, claimed=True))

        def leave() -> None:
            left.set()
            self._drop(actives)

        try:
            # A task that is cancelled does not wait for its thread, which joins all the same.
            await asyncio.to_thread(join)
            (active,) = actives
            output = None
            while output is None or output is not active.final:  # as in `stream`
                output = await asyncio.to_thread(self._advance, active)
                if output is not None:
                    yield output
        finally:
            await asyncio.to_thread(leave)  # it may have to wait for a step

    def make_request(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None
    ) -> Request:
        """A checked request for a text or token ids.

        Raises:
          ValueError: the prompt is empty or too long, or holds ids outside the vocabulary.
        """
        text = prompt if isinstance(prompt, str) else None
        if text is not None and self.tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer, and the engine has none")
        if text is not None and not text:
            raise ValueError("the prompt is empty; it needs at least one token")
        ids = self.tokenizer.encode(text) if text is not None and self.tokenizer else prompt
        request = Request(
            request_id=self._new_id() if request_id is None else request_id,
            prompt_token_ids=ids,  # type: ignore[arg-type]
            sampling_params=params,
            prompt=text,
        )
        self._check_request(request)
        return request

    def _new_id(self) -> str:
        """A name that no running request has; users may name theirs alike."""
        names = (f"request-{number}" for number in self._request_ids)
        return next(name for name in names if name not in self._active)

    def rescheduled(
        self,
        *,
        token_buckets: tuple[int, ...] | None = None,
        overlap: bool | None = None,
        **changes: Any,
    ) -> Engine:
        """An idle engine on the same weights and compiled programs, with a schedule of its own.

        Args:
          token_buckets: some of this engine's buckets; None: all.
          overlap: as in EngineConfig; None: as here.
          changes: fields of SchedulerConfig, none beyond what this engine was made for.

        Raises:
          ValueError: a bucket, or a size, that this engine does not have.
        """
        running = self.runner.config
        buckets = token_buckets or running.token_buckets
        if not set(buckets) <= set(running.token_buckets):
            raise ValueError(f"token_buckets={buckets} must be among {running.token_buckets}")
        scheduling = replace(self.scheduler.config, **changes)
        if scheduling.page_size != running.page_size:
            raise ValueError(
                f"page_size={scheduling.page_size} must be this engine's, {running.page_size}"
            )
        for name, most in (
            ("num_pages", running.num_pages),
            ("max_num_seqs", running.max_num_seqs),
            ("max_model_len", running.max_model_len),
            ("max_num_batched_tokens", max(buckets)),
        ):
            value = getattr(scheduling, name)
            if value > most:
                raise ValueError(f"{name}={value} must not exceed {most}, as this engine was made")
        twin = copy.copy(self)
        twin.config = replace(
            self.config, overlap=self.config.overlap if overlap is None else overlap
        )
        twin.runner = copy.copy(self.runner)
        twin.max_model_len = scheduling.max_model_len
        twin.runner.config = replace(running, token_buckets=buckets)
        twin.runner.buckets_used = set()
        twin.runner.reset_cache()
        twin._start_afresh(Scheduler(scheduling))
        return twin

    @locked
    def warm_up(self, *, note: Callable[[str], None] = lambda text: None) -> None:
        """Compiles the step of every token bucket before a request needs it, side by side.

        Steps with filtered rows, with most likely tokens or with prompts to be scored are compiled
        when they come up.

        Args:
          note: told of each program that is done, and of its seconds.

        Raises:
          AuditError: a program computes floats outside our ops.
        """
        steps = []
        for bucket in self.runner.config.token_buckets:
            steps.append(self.runner.blank_step(bucket))
            # Only steps of at most one token a sequence draw several at once.
            if self.config.decode_steps > 1 and bucket < 2 * self.config.max_num_seqs:
                steps.append(self.runner.blank_step(bucket, steps=self.config.decode_steps))
        with ThreadPoolExecutor(len(steps), thread_name_prefix="bi-jax-compile") as pool:
            for step, seconds in zip(steps, pool.map(self.runner.compile, steps), strict=True):
                note(f"compiled a step of {step.program[0]} tokens in {seconds:.1f} s")

    @locked
    def update_weights(self, state: nnx.State) -> None:
        """Replaces the model's parameters by a cast copy, without compiling anything again.

        Args:
          state: `nnx.state(model)` of a model like the engine's.

        Raises:
          ValueError: requests are running, or the structure or a shape differs.
        """
        if not isinstance(state, nnx.State):
            raise ValueError(
                f"update_weights takes a state, nnx.state(model), got a {type(state).__name__}"
            )
        if self._active:
            raise ValueError(
                "weights are replaced only while idle, and "
                f"{len(self._active)} requests are running"
            )
        self._pending_identity.settle()  # no more than two sets of weights on the device at once
        self.runner.update_state(state)
        self._pending_identity = self._hash_weights()
        self.weights_version += 1
        self.scheduler.cache.clear(weights_version=self.weights_version)

    @property
    def identity(self) -> Identity:
        """Everything that fixes the bits of this engine's completions.

        The weights are hashed in the background; this waits until they are.
        """
        return self._pending_identity.identity

    def _hash_weights(self) -> PendingIdentity:
        named = functools.partial(
            identity_of, self.model_config, self.ops.description, audited=self.audited
        )
        return PendingIdentity(self._submit_digest(), named)

    def _submit_digest(self) -> Future[str]:
        whole = self.runner.whole_parameters()
        return self._hashing.submit(digest_of_state, self.runner.state, whole=whole)


def _default_dtype(own: str) -> str:
    if jax.default_backend() == "cpu":
        return "float32"
    return "bfloat16" if own == "float32" else own
