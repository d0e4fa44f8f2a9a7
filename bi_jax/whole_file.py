"""Files that get their new content whole or not at all. Host only."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from types import TracebackType


class WholeFile:
    """A file that some work ends with; entered before the work, so that a bad path fails first.

    The content goes to a temporary file beside the target and is moved over it when it is
    complete; leaving without `write` changes nothing. A link is followed, and what is no regular
    file (a pipe, a terminal) is written to directly.

    Args:
      path: None: nothing is written.

    Raises:
      OSError: (on entering, and by `write`) the file cannot be written; it is named.
    """

    def __init__(self, path: str | Path | None) -> None:
        self._path = None if path is None else Path(path)
        self._target = Path()
        self._temporary: Path | None = None

    def __enter__(self) -> WholeFile:
        if self._path is None:
            return self
        self._target = Path(os.path.realpath(self._path))
        if self._path.is_dir():
            raise IsADirectoryError(21, "the output path is a folder", str(self._path))
        if self._path.exists() and not os.access(self._path, os.W_OK):
            raise PermissionError(13, "the file is there and may not be written", str(self._path))
        if self._is_regular():
            try:
                handle, name = tempfile.mkstemp(dir=self._target.parent, prefix=".bi-jax-")
            except OSError as error:
                raise self._named(error) from None
            os.close(handle)
            self._temporary = Path(name)
        return self

    def write(self, text: str) -> None:
        """Puts the text into the file, as UTF-8."""
        if self._path is None:
            return
        try:
            if self._temporary is None:
                self._path.write_text(text, encoding="utf-8")
                return
            self._temporary.write_text(text, encoding="utf-8")
            self._temporary.chmod(self._mode())
            os.replace(self._temporary, self._target)
        except OSError as error:
            raise self._named(error) from None
        self._temporary = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)

    def _is_regular(self) -> bool:
        try:
            return stat.S_ISREG(os.stat(self._target).st_mode)
        except FileNotFoundError:
            return True
        except OSError as error:
            raise self._named(error) from None

    def _mode(self) -> int:
        """The permissions of the file that is there, else those that a new one gets."""
        if self._target.exists():
            return stat.S_IMODE(self._target.stat().st_mode)
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self._path))
