"""The engine: requests in, completions out; plan, run, commit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from bi_jax.models.checkpoint import find_model, load_params, read_config
from bi_jax.models.transformer import Transformer, build_transformer

from .active import ActiveRequest
from .batch import LogitRow, first_rows
from .config import EngineConfig
from .identity import Identity, digest_of_state, identity_of
from .kv_cache import bytes_a_page
from .ops import pick_backend, transformer_ops
from .progress import Progress
from .request import Request, RequestOutput, SamplingParams
from .runner import Runner, RunnerConfig
from .scheduler import Scheduler, SchedulerConfig, StepPlan
from .tokenizer import Tokenizer

Prompt = str | Sequence[int]


class Engine:
    """Generates completions whose bits do not depend on what else is generated.

    Args:
      model: the transformer; its parameters are copied, cast to the compute dtype.
      tokenizer: turns text prompts into ids and ids into text; None: ids only.
      config: settings, all of them schedule.
      model_name: said in outputs and errors.

    Raises:
      ValueError: the settings do not fit the model.
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
        model_name: str = "",
    ) -> None:
        self.config = config or EngineConfig()
        self.model_config = model.config
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.backend = pick_backend(jax.default_backend())
        self.ops = transformer_ops(model.config, backend=self.backend)
        self.max_model_len = self.config.max_model_len or model.config.max_position
        if self.max_model_len > model.config.max_position:
            raise ValueError(
                f"max_model_len={self.max_model_len} must not exceed the model's context of "
                f"{model.config.max_position} tokens"
            )
        num_pages = self._num_pages()
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=self.config.max_num_seqs,
                max_num_batched_tokens=self.config.max_num_batched_tokens,
                num_pages=num_pages,
                page_size=self.config.page_size,
                max_model_len=self.max_model_len,
            )
        )
        self.runner = Runner(
            model,
            self.ops,
            RunnerConfig(
                token_buckets=self.config.buckets(),
                max_num_seqs=self.config.max_num_seqs,
                num_pages=num_pages,
                page_size=self.config.page_size,
                max_model_len=self.max_model_len,
            ),
            backend=self.backend,
        )
        self.weights_version = 0
        # Hashing the weights takes seconds and needs nobody to wait for it.
        self._hashing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bi-jax-digest")
        self._weights_digest = self._hashing.submit(digest_of_state, self.runner.state)
        self._identity: Identity | None = None
        self._active: dict[str, ActiveRequest] = {}
        self._owners: dict[int, ActiveRequest] = {}
        self._request_ids = itertools.count()
        self._seq_ids = itertools.count()

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        dtype: str | None = None,
        tokenizer: str | Path | None = None,
        config: EngineConfig | None = None,
    ) -> Engine:
        """An engine for a Hugging Face folder or hub id, a GGUF file, or an Orbax checkpoint.

        Args:
          name: path or hub id.
          dtype: compute dtype; None: float32 on a CPU, the checkpoint's own on a GPU.
          tokenizer: where the tokenizer is, if not with the model.
          config: the engine's settings.

        Raises:
          ValueError: there is no such model, or files are damaged or contradict one another.
          NotImplementedError: the model needs something that is not supported; it is named.
        """
        model_config = read_config(name)
        if dtype is None:
            dtype = "float32" if jax.default_backend() == "cpu" else model_config.dtype
        model_config = model_config.replace(dtype=dtype, param_dtype=dtype)
        source = find_model(name)
        text = Tokenizer.from_pretrained(source.path if tokenizer is None else tokenizer)
        params = load_params(name, model_config, dtype=dtype)
        model = build_transformer(model_config, params)
        return cls(model, tokenizer=text, config=config, model_name=str(name))

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
        prompts = _as_prompts(prompts)
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"expected one SamplingParams for each of {len(prompts)} prompts, got "
                f"{len(sampling_params)}"
            )
        requests = [self.make_request(p, s) for p, s in zip(prompts, sampling_params, strict=True)]
        for request in requests:
            self.add_request(request)
        done: dict[str, RequestOutput] = {}
        wanted = {request.request_id for request in requests}
        with Progress(total=len(requests), shown=progress) as bar:
            while wanted - done.keys():
                for output in self.step():
                    if output.request_id in wanted:
                        done[output.request_id] = output
                        bar.advance(sum(len(c.token_ids) for c in output.outputs))
        return [done[request.request_id] for request in requests]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Completes one prompt, yielding what there is after each step and the whole at the end."""
        request = self.make_request(prompt, sampling_params or SamplingParams())
        active = self.add_request(request)
        while not active.finished:
            self.step()
            yield active.output(self.identity.short, self.weights_version)

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
            request_id=request_id or f"request-{next(self._request_ids)}",
            prompt_token_ids=ids,  # type: ignore[arg-type]
            sampling_params=params,
            prompt=text,
        )
        request.check_against_model(
            vocab_size=self.model_config.vocab_size, max_model_len=self.max_model_len
        )
        self._check_logprobs(params)
        longest = min(len(request.prompt_token_ids) + params.max_tokens, self.max_model_len)
        self.scheduler.check_fits(longest)
        return request

    def add_request(self, request: Request) -> ActiveRequest:
        """Queues a request's completions; a request without a seed is given one here.

        Raises:
          ValueError: a request of this id is running.
        """
        if request.request_id in self._active:
            raise ValueError(f"the request {request.request_id!r} is already running")
        active = ActiveRequest(
            request,
            seq_ids=self._seq_ids,
            tokenizer=self.tokenizer,
            eos_token_ids=self._eos_token_ids(),
            max_model_len=self.max_model_len,
        )
        self._active[request.request_id] = active
        for completion in active.completions:
            self._owners[completion.sequence.seq_id] = active
            self.scheduler.add(completion.sequence)
        return active

    def abort(self, request_id: str) -> RequestOutput:
        """Ends a running request and returns what there is of it.

        Raises:
          ValueError: no such request is running.
        """
        if request_id not in self._active:
            raise ValueError(f"no request {request_id!r} is running")
        active = self._active[request_id]
        for completion in active.completions:
            if not completion.finished:
                completion.abort()
                self._release(completion.sequence)
        return self._finish(active)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._active)

    def step(self) -> list[RequestOutput]:
        """One step: plan, run, commit. Returns the requests that finished in it."""
        plan = self.scheduler.plan()
        if plan is None:
            return []
        rows = self._logit_rows(plan)
        result = self.runner.run(plan, rows)
        drawn: dict[int, int] = {}
        for index, row in enumerate(rows):
            sequence = plan.items[row.item].sequence
            owner = self._owners[sequence.seq_id]
            token = owner.take(sequence.seq_id, row, result, index)
            if token is not None:
                drawn[sequence.seq_id] = token
        self.scheduler.commit(plan, drawn)
        return self._collect(plan)

    def update_weights(self, state: nnx.State) -> None:
        """Replaces the model's parameters by a cast copy, without compiling anything again.

        Raises:
          ValueError: requests are running, or the structure or a shape differs.
        """
        if self._active:
            raise ValueError(
                "weights are replaced only while idle, and "
                f"{len(self._active)} requests are running"
            )
        self.runner.update_state(state)
        self._weights_digest = self._hashing.submit(digest_of_state, self.runner.state)
        self.weights_version += 1

    @property
    def identity(self) -> Identity:
        """Everything that fixes the bits of this engine's completions."""
        weights = self._weights_digest.result()
        if self._identity is None:
            self._identity = identity_of(self.model_config, self.ops.description)
        if self._identity.weights != weights:
            self._identity = self._identity.with_weights(weights)
        return self._identity

    def _logit_rows(self, plan: StepPlan) -> list[LogitRow]:
        rows: list[LogitRow] = []
        for index, item, first in first_rows(plan):
            owner = self._owners[item.sequence.seq_id]
            rows += owner.logit_rows(index, item, first)
        return rows

    def _collect(self, plan: StepPlan) -> list[RequestOutput]:
        touched = {self._owners[item.sequence.seq_id].request.request_id for item in plan.items}
        finished = []
        for request_id in sorted(touched):
            active = self._active[request_id]
            for completion in active.completions:
                if completion.finished and completion.sequence.seq_id in self._owners:
                    self._release(completion.sequence)
            if active.finished:
                finished.append(self._finish(active))
        return finished

    def _release(self, sequence: Any) -> None:
        self.scheduler.remove(sequence)
        del self._owners[sequence.seq_id]

    def _finish(self, active: ActiveRequest) -> RequestOutput:
        del self._active[active.request.request_id]
        return active.output(self.identity.short, self.weights_version)

    def _check_logprobs(self, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self.model_config.vocab_size:
                raise ValueError(
                    f"{name}={count} must not exceed the vocabulary of "
                    f"{self.model_config.vocab_size} tokens"
                )

    def _eos_token_ids(self) -> tuple[int, ...]:
        ids = set(self.model_config.eos_token_ids)
        if self.tokenizer is not None:
            ids.update(self.tokenizer.eos_token_ids)
        return tuple(sorted(ids))

    def _num_pages(self) -> int:
        pages_of_one = -(-self.max_model_len // self.config.page_size)
        if self.config.num_pages is not None:
            return self.config.num_pages
        fit = self.config.cache_bytes // bytes_a_page(self.model_config, self.config.page_size)
        most = pages_of_one * self.config.max_num_seqs
        return max(pages_of_one, min(fit, most))


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Sequence):
        raise ValueError(
            f"prompts must be a text, token ids or a sequence of them, got {type(prompts).__name__}"
        )
    if prompts and all(isinstance(p, int) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
