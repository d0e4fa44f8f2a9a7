"""scripts/card_turns.py: who waits for whom."""

import itertools
import json
import sys
import textwrap
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.append(str(SCRIPTS))

from card_turns import Job, run_in_turns, side_by_side  # noqa: E402

PROGRAM = textwrap.dedent(
    """
    import json, os, pathlib, sys, time
    sys.path.append(sys.argv[1])
    from card_turns import wait_for_turn
    turn, status, prepared = pathlib.Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    time.sleep(prepared)
    wait_for_turn(turn)
    found = {"cards": os.environ["CUDA_VISIBLE_DEVICES"], "start": time.time()}
    turn.with_suffix(".began").touch()
    beside, until = [turn.with_name(name) for name in sys.argv[5:]], time.time() + 60
    while not all(file.exists() for file in beside) and time.time() < until:
        time.sleep(0.02)
    turn.with_suffix(".json").write_text(json.dumps({**found, "end": time.time()}))
    sys.exit(status)
    """
)


def job(
    folder: Path,
    name: str,
    cards: tuple[int, ...],
    *,
    status: int = 0,
    prepared: float = 0,
    beside: str = "",
) -> Job:
    turn = folder / f"{name}.turn"
    words = [str(SCRIPTS), str(turn), str(status), str(prepared)]
    words += [f"{beside}.began"] if beside else []
    return Job(name=name, command=(sys.executable, "-c", PROGRAM, *words), cards=cards, turn=turn)


def ran(jobs: list[Job]) -> dict[str, dict]:
    return {j.name: json.loads(j.turn.with_suffix(".json").read_text()) for j in jobs}


def test_processes_that_share_a_card_follow_one_another(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    jobs = [
        job(tmp_path, "all", (0, 1, 2, 3)),
        job(tmp_path, "some", (1, 2), status=3),
        job(tmp_path, "late", (2,), prepared=1.0),
    ]
    order: list[str] = []
    status = run_in_turns(jobs, ended=lambda done: order.append(done.name))
    assert status == {"all": 0, "some": 3, "late": 0}
    assert sorted(order) == sorted(status)
    found = ran(jobs)
    assert [found[j.name]["cards"] for j in jobs] == ["4,5,6,7", "5,6", "6"]
    spans = sorted((each["start"], each["end"]) for each in found.values())
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))


def test_processes_of_other_cards_run_side_by_side(tmp_path):
    begin = tmp_path / "begin"
    jobs = [
        job(tmp_path, "left", (0, 1), beside="right"),
        job(tmp_path, "right", (2, 3), beside="left"),
    ]
    begin.touch()
    assert run_in_turns(jobs, begin=begin) == {"left": 0, "right": 0}
    found = ran(jobs)
    assert found["left"]["start"] < found["right"]["end"]
    assert found["right"]["start"] < found["left"]["end"]


def test_cards_of_processes_that_fit_side_by_side():
    assert [side_by_side(2, 4, place) for place in range(3)] == [(0, 1), (2, 3), (0, 1)]
    assert side_by_side(4, 4, 5) == (0, 1, 2, 3)
    assert [side_by_side(1, 4, place) for place in (0, 3, 4)] == [(0,), (3,), (0,)]
