"""Ctrl-C waits while something is half done. Host only."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C that comes within it is acted on at its end, by whatever handles it there.

    For bookkeeping that must be done whole or not at all, and that takes no time. Python runs
    signal handlers in the main thread, so in others there is nothing to wait for.
    """
    in_main = threading.current_thread() is threading.main_thread()
    # None: something that is not Python handles it, and could not be put back.
    if not in_main or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    came = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def whole[**P, R](method: Callable[P, R]) -> Callable[P, R]:
    """A method that runs `uninterrupted`."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with uninterrupted():
            return method(*args, **kwargs)

    return run
