"""Files that get their new content whole or not at all. Host only."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def check_writable(path: str | Path) -> None:
    """Finds out before some work whether `write_whole` can write its result; leaves no trace.

    Raises:
      OSError: it cannot; the path is named.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(21, "the output path is a folder", str(path))
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(13, "the file is there and may not be written", str(path))
    try:
        if _is_regular(path):
            _temporary_beside(path).unlink()
    except OSError as error:
        raise _named(error, path) from None


def write_whole(path: str | Path, text: str) -> None:
    """Writes a file as UTF-8: to a temporary one beside it, which is moved over it when complete.

    A link is followed, permissions stay, and what is no regular file (a pipe, a terminal) is
    written to directly.

    Raises:
      OSError: it cannot be written; the path is named, and the file that was there still is.
    """
    path = Path(path)
    try:
        if not _is_regular(path):
            path.write_text(text, encoding="utf-8")
            return
        temporary = _temporary_beside(path)
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.chmod(_mode(path))
            temporary.replace(os.path.realpath(path))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _named(error, path) from None


def _temporary_beside(path: Path) -> Path:
    handle, name = tempfile.mkstemp(dir=Path(os.path.realpath(path)).parent, prefix=".bi-jax-")
    os.close(handle)
    return Path(name)


def _is_regular(path: Path) -> bool:
    """Whether it is, or will be, an ordinary file."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return True


def _mode(path: Path) -> int:
    """The permissions of the file that is there, else those that a new one gets."""
    if path.exists():
        return stat.S_IMODE(path.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _named(error: OSError, path: Path) -> OSError:
    return OSError(error.errno, error.strerror, str(path))
