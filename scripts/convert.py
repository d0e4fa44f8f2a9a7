#!/usr/bin/env python
"""Converts a Hugging Face model or a GGUF file to a folder in Orbax's format.

    python scripts/convert.py MODEL OUTPUT [--dtype bfloat16]

The folder holds the parameters, their configuration (bi_jax.json) and the tokenizer's files, and is
named like any other model: `--model OUTPUT`. Loading it goes straight to the wanted devices. It
appears under its name only when it is complete.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from bi_jax.models.checkpoint import (
    ModelSource,
    find_model,
    load_params,
    read_config,
    save_orbax,
    weights_digest,
)
from bi_jax.models.checkpoint.gguf_file import copy_metadata
from bi_jax.models.config import COMPUTE_DTYPES

TOKENIZER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATE_FOLDER = "additional_chat_templates"


def convert(model: str, output: Path, *, dtype: str | None = None) -> str:
    """Writes `model` to the new folder `output`; gives the digest of its weights.

    Args:
      model: a path or hub id, as `read_config` takes it.
      output: a folder that does not exist yet.
      dtype: what to round the weights to; the checkpoint's own by default.

    Raises:
      ValueError: the model cannot be read, or `output` cannot be written.
      NotImplementedError: the model is not supported.
    """
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    config = read_config(model)
    dtype = dtype or config.param_dtype
    config = config.replace(dtype=dtype, param_dtype=dtype)
    _check_output(output)
    try:
        partial.mkdir()
    except OSError as error:
        raise ValueError(f"{output} cannot be written: {error.strerror}.") from None
    try:
        progress = functools.partial(tqdm, desc="Reading weights", unit="parameter", disable=None)
        params = load_params(model, config, dtype=dtype, progress=progress)
        _copy_tokenizer(find_model(model), partial)
        save_orbax(partial, config, params)
        partial.rename(output)
    except OSError as error:
        raise ValueError(f"{output} cannot be written: {error}.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return weights_digest(params)


def _check_output(output: Path) -> None:
    if output.exists() or output.is_symlink():
        raise ValueError(f"{output} is there already; name a folder that is not.")
    if not output.parent.is_dir():
        raise ValueError(f"{output} cannot be written: there is no folder {output.parent}.")


def _copy_tokenizer(source: ModelSource, target: Path) -> None:
    if source.kind == "gguf":
        copy_metadata(source.path, target / "tokenizer.gguf")
        return
    for name in TOKENIZER_FILES:
        if (source.path / name).is_file():
            shutil.copyfile(source.path / name, target / name)
    for path in sorted((source.path / TEMPLATE_FOLDER).glob("*.jinja")):
        (target / TEMPLATE_FOLDER).mkdir(exist_ok=True)
        shutil.copyfile(path, target / TEMPLATE_FOLDER / path.name)
    for path in source.path.glob("tokenizer.gguf"):
        shutil.copyfile(path, target / path.name)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="The model may be a Hugging Face folder, a hub id, a GGUF file or a converted one.",
    )
    parser.add_argument("model", help="path or hub id of the model")
    parser.add_argument("output", type=Path, help="folder to write; it must not exist yet")
    parser.add_argument(
        "--dtype", choices=COMPUTE_DTYPES, help="dtype of the weights (default: the checkpoint's)"
    )
    options = parser.parse_args(arguments)
    try:
        digest = convert(options.model, options.output, dtype=options.dtype)
    except (ValueError, NotImplementedError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(f"Wrote {options.output} (weights {digest[:16]}).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
