"""A progress bar on long work; silent where nobody watches."""

from __future__ import annotations

import sys
from types import TracebackType

from tqdm import tqdm


class Progress:
    """Counts finished requests and shows tokens a second, on a terminal only."""

    def __init__(self, *, total: int, shown: bool, what: str = "generating") -> None:
        hidden = not shown or not sys.stderr.isatty()
        self._bar = tqdm(total=total, desc=what, unit="request", disable=hidden, leave=False)
        self._tokens = 0

    def advance(self, tokens: int) -> None:
        """One more request is done, with this many tokens."""
        self._tokens += tokens
        elapsed = self._bar.format_dict["elapsed"] or 1e-9
        self._bar.set_postfix_str(f"{self._tokens / elapsed:.1f} tokens/s", refresh=False)
        self._bar.update(1)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
