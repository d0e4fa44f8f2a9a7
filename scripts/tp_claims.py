"""Claims that a run of checks makes, each with its verdict, and the exit status that follows."""

import time
from collections.abc import Callable
from dataclasses import dataclass

SHOWN, FAILED, INCONCLUSIVE, NOT_HERE = "shown", "FAILED", "inconclusive", "not on a CPU"
EXIT_SHOWN, EXIT_FAILED, EXIT_INCONCLUSIVE = 0, 1, 3
RANKS_FOR_ORDER = 4  # a sum of two has no order, and one of three hardly any tree


class Inconclusive(Exception):
    """Nothing can be said here; the message says why."""


class NotHere(Exception):
    """A claim about cards, on a CPU; it does not count."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim.

    Attributes:
      name: what is claimed.
      verdict: SHOWN, FAILED, INCONCLUSIVE or NOT_HERE.
      detail: figures, the first difference, or why nothing can be said.
      seconds: it took.
    """

    name: str
    verdict: str
    detail: str
    seconds: float


def run_claim(name: str, check: Callable[[], str]) -> Claim:
    """Runs a check, which returns its figures or raises; prints the outcome at once."""
    started = time.perf_counter()
    try:
        verdict, detail = SHOWN, check()
    except AssertionError as error:
        verdict, detail = FAILED, str(error)
    except Inconclusive as error:
        verdict, detail = INCONCLUSIVE, str(error)
    except NotHere as error:
        verdict, detail = NOT_HERE, str(error)
    seconds = round(time.perf_counter() - started, 1)
    print(f"{verdict:12s} {name} ({seconds} s){': ' if detail else ''}{detail}", flush=True)
    return Claim(name=name, verdict=verdict, detail=detail, seconds=seconds)


def need_order(ranks: int) -> None:
    """Raises Inconclusive where there are too few ranks for an order to show."""
    if ranks < RANKS_FOR_ORDER:
        raise Inconclusive(f"needs {RANKS_FOR_ORDER} ranks, there are {ranks}")


def exit_status(claims: list[Claim]) -> int:
    """EXIT_FAILED if any failed, else EXIT_INCONCLUSIVE if nothing could be said about any."""
    verdicts = {claim.verdict for claim in claims}
    if FAILED in verdicts:
        return EXIT_FAILED
    return EXIT_INCONCLUSIVE if INCONCLUSIVE in verdicts or not claims else EXIT_SHOWN
