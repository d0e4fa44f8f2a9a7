"""`bi-jax certify`: the invariance battery on this machine, a certificate and a report."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .certificate import Certificate


def add_certify_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--model", help="folder, hub id, GGUF or Orbax; unset: SmolLM2-135M")
    parser.add_argument("--tokenizer", help="where the tokenizer is, if not with the model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--output", default="certificate", help="writes OUTPUT.json, OUTPUT.html")
    parser.add_argument("--verify", metavar="FILE", help="run again and compare with this one")
    parser.add_argument("--tokens", type=int, default=16, help="new tokens of each completion")
    parser.add_argument(
        "--filters",
        action=argparse.BooleanOptionalAction,
        help="also sample with top-p, which compiles further programs; unset: on a GPU only",
    )
    parser.add_argument(
        "--control",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also run stock XLA ops, to show that the battery can tell",
    )
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--max-num-batched-tokens", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=512)


def run_certify(arguments: argparse.Namespace) -> int:
    """Runs the command: 0 passed or equal, 1 not.

    Raises: ValueError, OSError for files and settings that cannot be used, before anything is
      computed.
    """
    from .certificate import Certificate, differences

    if not arguments.verify:
        return _certify_to_files(arguments)
    old = Certificate.read(arguments.verify)
    new = _certify(arguments)
    found = differences(old, new)
    for line in found:
        print(f"different: {line}")
    if not found:
        print(
            f"EQUAL: identity {new.identity.short} and digest {new.digest[:16]} are those of "
            f"{arguments.verify}. Equal digests mean equal bits on this battery, and no more."
        )
    return 1 if found else 0


def _certify(arguments: argparse.Namespace) -> Certificate:
    import jax

    from bi_jax.models.checkpoint import find_demo_model

    from .certify_engine import certify
    from .config import CPU_CACHE_BYTES, EngineConfig
    from .engine import Engine
    from .flags import enable_compilation_cache

    enable_compilation_cache()
    engine = Engine.from_pretrained(
        arguments.model if arguments.model is not None else find_demo_model(),
        dtype=arguments.dtype,
        tokenizer=arguments.tokenizer,
        config=EngineConfig(
            max_num_seqs=arguments.max_num_seqs,
            max_num_batched_tokens=arguments.max_num_batched_tokens,
            token_buckets=_buckets(arguments.max_num_seqs, arguments.max_num_batched_tokens),
            max_model_len=arguments.max_model_len,
            # Small, since the battery makes further engines on the same device.
            cache_bytes=CPU_CACHE_BYTES,
        ),
    )
    filters = arguments.filters
    if filters is None:
        filters = jax.default_backend() != "cpu"
    return certify(
        engine,
        tokens=arguments.tokens,
        filters=filters,
        control=arguments.control,
        note=lambda text: print(text, flush=True),
    )


def _buckets(sequences: int, tokens: int) -> tuple[int, ...]:
    """Two step sizes at least, so that there is something to compare."""
    return tuple(sorted({min(sequences, max(tokens // 2, 1)), tokens}))


def _certify_to_files(arguments: argparse.Namespace) -> int:
    from .certificate_page import page
    from .whole_file import check_writable, write_whole

    base = Path(arguments.output.removesuffix(".json").removesuffix(".html"))
    data, report = (base.with_name(base.name + suffix) for suffix in (".json", ".html"))
    check_writable(data)
    check_writable(report)
    certificate = _certify(arguments)
    write_whole(data, certificate.to_json())
    write_whole(report, page(certificate, json_name=data.name))
    print(f"{certificate.verdict.upper()}: wrote {data} and {report}")
    print(f"identity {certificate.identity.short}, digest {certificate.digest[:16]}")
    return 0 if certificate.verdict == "passed" else 1
