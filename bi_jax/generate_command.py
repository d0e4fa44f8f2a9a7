"""`bi-jax generate`: prompts in, completions to the terminal and a file."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .prompts_file import PromptLine, read_prompts_file
from .request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from .engine import Engine

DEFAULT_PROMPT = "What is the capital of France?"


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command; sampling options have the field's usual names."""
    model = parser.add_argument_group("model")
    model.add_argument("--model", help="folder, hub id, GGUF or Orbax; unset: SmolLM2-135M")
    model.add_argument("--tokenizer", help="where the tokenizer is, if not with the model")
    model.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    model.add_argument(
        "--tensor-parallel-size", type=int, default=1, help="devices that the model is cut over"
    )
    model.add_argument(
        "--tp-invariant",
        action="store_true",
        help="the topology whose bits are the same at every tensor-parallel size",
    )
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--prompt", action="append", help="repeatable")
    prompts.add_argument("--prompts-file", help="text (a prompt a line) or .jsonl")
    prompts.add_argument("--system", help="system message of the conversation")
    shape = prompts.add_mutually_exclusive_group()
    shape.add_argument("--chat", action="store_true", help="apply the chat template")
    shape.add_argument("--raw", action="store_true", help="the prompt as it is")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    sampling.add_argument("--top-p", type=float, default=1.0)
    sampling.add_argument("--top-k", type=int, default=0)
    sampling.add_argument("--min-p", type=float, default=0.0)
    sampling.add_argument("--seed", type=int)
    sampling.add_argument("--n", type=int, default=1, help="completions of each prompt")
    sampling.add_argument("--max-tokens", type=int, default=256)
    sampling.add_argument("--min-tokens", type=int, default=0)
    sampling.add_argument("--stop", action="append", help="repeatable")
    sampling.add_argument("--stop-token-id", action="append", type=int, help="repeatable")
    sampling.add_argument("--ignore-eos", action="store_true")
    sampling.add_argument("--logprobs", type=int, help="also report this many likely tokens")
    sampling.add_argument("--prompt-logprobs", type=int)
    sampling.add_argument("--logprobs-mode", choices=("raw", "scaled", "processed"), default="raw")
    engine = parser.add_argument_group("engine (schedule: changes no bit)")
    engine.add_argument("--max-num-seqs", type=int, default=16)
    engine.add_argument("--max-num-batched-tokens", type=int, default=128)
    engine.add_argument("--max-model-len", type=int)
    output = parser.add_argument_group("output")
    output.add_argument("--output", help="write JSONL here, whole or not at all")
    output.add_argument("--stream", action="store_true", help="show text as it comes")
    output.add_argument(
        "--check",
        action="store_true",
        help="generate again alone, reversed and among strangers, and compare bits",
    )


def run_generate(arguments: argparse.Namespace) -> int:
    """Runs the command; 0, or 1 when --check found a difference.

    Raises:
      ValueError, NotImplementedError, OSError: bad input, in one sentence.
    """
    from .output_file import as_json_lines
    from .whole_file import check_writable, write_whole

    lines = _prompt_lines(arguments)
    defaults = _sampling_params(arguments)
    requests = []
    for line in lines:
        with _naming(line):
            requests.append(line.params(defaults))
    if arguments.stream and (len(lines) > 1 or requests[0].n > 1):
        raise ValueError("--stream shows one completion; give one prompt and n=1")
    if arguments.output is not None:
        check_writable(arguments.output)
    engine = _engine(arguments)
    prompts = []
    for line, params in zip(lines, requests, strict=True):
        with _naming(line):
            prompts.append(_token_ids(engine, line, arguments))
            engine.make_request(prompts[-1], params)  # what is wrong with it is said here
    if arguments.stream:
        outputs = [_stream(engine, prompts[0], requests[0])]
    else:
        outputs = engine.generate(prompts, requests, progress=True)
    try:
        if not arguments.stream:
            _show(lines, outputs)
    finally:  # also where nobody reads on: completions are costly
        if arguments.output is not None:
            write_whole(arguments.output, as_json_lines(lines, outputs, engine))
    return _check(engine, prompts, requests, outputs) if arguments.check else 0


@contextlib.contextmanager
def _naming(line: PromptLine) -> Iterator[None]:
    """Puts the file and line before what is wrong with a prompt; a file may hold thousands."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{line.where}: {error}" if line.where else str(error)) from None


def _engine(arguments: argparse.Namespace) -> Engine:
    import jax

    from bi_jax.models.checkpoint import find_demo_model

    from .config import EngineConfig
    from .engine import Engine
    from .flags import enable_compilation_cache
    from .program_store import enable_program_store

    cache = enable_compilation_cache()
    enable_program_store(cache and cache / "audited")
    if arguments.tensor_parallel_size > 1:
        # So that it can be tried on a CPU, whose cores count as one device otherwise. Where JAX
        # runs already it has the devices that it has, and the engine says if they are too few.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", arguments.tensor_parallel_size)
    config = EngineConfig(
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_model_len=arguments.max_model_len,
    )
    engine = Engine.from_pretrained(
        arguments.model if arguments.model is not None else find_demo_model(),
        dtype=arguments.dtype,
        tokenizer=arguments.tokenizer,
        config=config,
        tensor_parallel_size=arguments.tensor_parallel_size,
        tp_invariant=arguments.tp_invariant,
    )
    if engine.cache_size is not None:
        print(engine.cache_size, file=sys.stderr)
    return engine


def _sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        n=arguments.n,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
        min_tokens=arguments.min_tokens,
        stop=arguments.stop or (),
        stop_token_ids=arguments.stop_token_id or (),
        ignore_eos=arguments.ignore_eos,
        logprobs=arguments.logprobs,
        prompt_logprobs=arguments.prompt_logprobs,
        logprobs_mode=arguments.logprobs_mode,
    )


def _prompt_lines(arguments: argparse.Namespace) -> list[PromptLine]:
    lines = [PromptLine(prompt=prompt) for prompt in arguments.prompt or ()]
    if arguments.prompts_file is not None:
        lines += read_prompts_file(Path(arguments.prompts_file))
    if not lines:
        lines = [PromptLine(prompt=DEFAULT_PROMPT)]
    for line in lines:
        if line.prompt == "":
            raise ValueError("the prompt is empty; it needs at least one character")
    return lines


def _token_ids(engine: Engine, line: PromptLine, arguments: argparse.Namespace) -> list[int]:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    given, template = line.prompt_token_ids, tokenizer.chat_template
    if template is None and (arguments.chat or line.messages is not None):
        raise ValueError("the model has no chat template; use --raw")
    plain = line.messages is None and (arguments.raw or template is None)
    if arguments.system is not None and (given is not None or plain):
        raise ValueError(
            "--system is a message of a conversation; token ids, --raw prompts and models without "
            "a chat template have none"
        )
    if given is not None:
        return list(given)
    if plain:
        return tokenizer.encode(line.prompt or "")
    messages = line.messages or [{"role": "user", "content": line.prompt or ""}]
    if arguments.system is not None:
        messages = [{"role": "system", "content": arguments.system}, *messages]
    return tokenizer.encode_chat(messages)


def _stream(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
    shown = 0
    output = None
    for output in engine.stream(prompt, params):
        text = output.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print()
    assert output is not None
    return output


def _show(lines: Sequence[PromptLine], outputs: Sequence[RequestOutput]) -> None:
    many = len(lines) > 1 or any(len(output.outputs) > 1 for output in outputs)
    for number, (line, output) in enumerate(zip(lines, outputs, strict=True)):
        for completion in output.outputs:
            if many:
                print(f"--- prompt {number}, completion {completion.index}: {line.label()}")
            print(completion.text.strip("\n"))


def _check(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    outputs: Sequence[RequestOutput],
) -> int:
    from .check import check_invariance

    def note(name: str) -> None:
        print(f"check: {name} ...", file=sys.stderr)

    report = check_invariance(engine, prompts, params, outputs, note=note)
    print("\nDo the bits depend on the batch?")
    print("\n".join(report.lines()))
    return 0 if report.passed and len(report.row_buckets) > 1 else 1
