"""Processes that share the cards of a host: each prepares at once, and computes in its turn.

To compile a program is the work of one Python thread for the most part, so programs are compiled in
processes. A process says when it is ready and waits until its cards are free; those that use other
cards go on beside it.
"""

import dataclasses
import pathlib
import subprocess
import time
from collections.abc import Callable, Sequence

from bi_jax.flags import words_for_cards

POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A process that waits for its turn.

    Attributes:
      name: tells it from the others.
      command: words; `wait_for_turn(turn)` is called somewhere in it.
      cards: numbers of the cards that it sees, of those that this process sees.
      turn: file that does not exist yet, in a folder of its own.
    """

    name: str
    command: tuple[str, ...]
    cards: tuple[int, ...]
    turn: pathlib.Path


def wait_for_turn(turn: pathlib.Path | None) -> None:
    """Says that this process is ready and returns when its cards are its own; None: at once."""
    if turn is None:
        return
    _ready(turn).touch()
    while not turn.exists():
        time.sleep(POLL_SECONDS)


def run_in_turns(
    jobs: Sequence[Job],
    *,
    ended: Callable[[Job], None] = lambda job: None,
    begin: pathlib.Path | None = None,
) -> dict[str, int]:
    """Runs processes until all have ended.

    A turn is given to the first in order that is ready and whose cards nobody uses; one that is
    ready but has to wait is not overtaken.

    Args:
      jobs: in the order of their turns.
      ended: called after each.
      begin: file before whose appearance no turn is given.

    Returns:
      name -> exit status.
    """
    running = {job.name: (job, _start(job)) for job in jobs}
    waiting, used, status = list(jobs), dict[str, set[int]](), dict[str, int]()
    while running:
        time.sleep(POLL_SECONDS)
        for name, (job, process) in list(running.items()):
            if process.poll() is not None:
                del running[name]
                status[name] = process.returncode
                used.pop(name, None)
                waiting = [other for other in waiting if other is not job]
                ended(job)
        for job in [other for other in waiting if _ready(other.turn).exists()]:
            busy = set().union(*used.values())
            if busy & set(job.cards) or (begin is not None and not begin.exists()):
                break
            used[job.name] = set(job.cards)
            waiting.remove(job)
            job.turn.touch()
    return status


def side_by_side(count: int, among: int, place: int) -> tuple[int, ...]:
    """The cards of the `place`-th process that takes `count` of `among` cards."""
    groups = max(1, among // count)
    first = (place % groups) * count
    return tuple(range(first, first + count))


def _start(job: Job) -> subprocess.Popen:
    return subprocess.Popen([*words_for_cards(job.cards), *job.command])


def _ready(turn: pathlib.Path) -> pathlib.Path:
    return turn.with_suffix(".ready")
