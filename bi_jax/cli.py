"""The `bi-jax` command. Bad input is one sentence on stderr and exit status 2."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence

from .certify_command import add_certify_arguments, run_certify
from .generate_command import add_generate_arguments, run_generate


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 0, 1 (a check failed) or 2 (bad input)."""
    parser = argparse.ArgumentParser(
        prog="bi-jax", description="Batch-invariant inference for language models in JAX."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate",
        help="a model answers prompts",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_generate_arguments(generate)
    generate.set_defaults(run=run_generate)
    certify = commands.add_parser(
        "certify",
        help="run the invariance battery on this machine and write a certificate",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_certify_arguments(certify)
    certify.set_defaults(run=run_certify)
    arguments = parser.parse_args(argv)
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):  # a letter that it lacks costs no completions
            sys.stdout.reconfigure(errors="backslashreplace")
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # an OSError, but nobody is left to read a sentence
        _close_stdout()
        return 1
    except (ValueError, NotImplementedError, OSError) as error:
        sys.stdout.flush()
        print(f"error: {_sentence(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _close_stdout() -> None:
    """Drops what could not be written, or Python would try again at its end, and complain."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        name = f" {error.filename!r}" if error.filename else ""
        return f"{error.strerror}:{name}" if name else error.strerror
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
