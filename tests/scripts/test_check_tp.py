"""scripts/check_tp.py and bench_collectives.py: verdicts, exit statuses, and that they run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.append(str(SCRIPTS))

import tp_claims  # noqa: E402


def run(script, *options):
    command = [sys.executable, str(SCRIPTS / script), *options]
    return subprocess.run(command, capture_output=True, text=True)


def claim(check):
    return tp_claims.run_claim("it holds", check)


def wrong() -> str:
    raise AssertionError("bits differ")


def too_few() -> str:
    tp_claims.need_order(2)
    return ""


def elsewhere() -> str:
    raise tp_claims.NotHere("a claim about cards")


def test_verdicts_and_the_exit_status():
    shown, failed, open_, absent = map(claim, (lambda: "8 rows", wrong, too_few, elsewhere))
    assert (shown.verdict, shown.detail) == ("shown", "8 rows")
    assert (failed.verdict, failed.detail) == ("FAILED", "bits differ")
    assert (open_.verdict, open_.detail) == ("inconclusive", "needs 4 ranks, there are 2")
    assert tp_claims.exit_status([shown, absent]) == 0
    assert tp_claims.exit_status([shown, open_]) == 3
    assert tp_claims.exit_status([shown, open_, failed]) == 1
    assert tp_claims.exit_status([]) == 3


def test_wrong_arguments():
    done = run("check_tp.py", "--virtual", "2", "--degrees", "1,4")
    assert done.returncode == 2 and "there are 2 devices" in done.stderr
    done = run("check_tp.py", "--parallel")
    assert done.returncode == 2 and "--parallel needs --cards" in done.stderr


@pytest.mark.slow
def test_claims_about_cards_alone_and_topologies_by_name():
    done = run("check_tp.py", "--virtual", "2", "--parts", "peers")
    assert done.returncode == 0 and done.stdout.count("not on a CPU") == 2
    done = run("check_tp.py", "--virtual", "2", "--topologies", "tp_invariant,other")
    assert done.returncode == 2 and "--topologies must be of default, tp_invariant" in done.stderr


@pytest.mark.slow
def test_the_benchmark_of_steps_runs(tmp_path):
    out = tmp_path / "steps.json"
    options = ("--tiny", "--degrees", "2", "--topologies", "default", "--round-seconds", "0.05")
    done = run("bench_tp_engine.py", *options, "--json", str(out))
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["ratios"]
    assert len(rows) == 3 and all("over psum float32" in row for row in rows)


@pytest.mark.slow
def test_two_ranks_are_inconclusive(tmp_path):
    out = tmp_path / "claims.json"
    options = ("--virtual", "2", "--parts", "collectives", "--largest-kib", "256")
    done = run("check_tp.py", *options, "--json", str(out))
    assert done.returncode == 3, done.stdout + done.stderr
    report = json.loads(out.read_text())
    verdicts = {claim["name"]: claim["verdict"] for claim in report["claims"]}
    assert verdicts["2 ranks: control: another rank order has other bits"] == "inconclusive"
    assert set(verdicts.values()) == {"shown", "inconclusive"}
    assert report["versions"]["jax"] and report["command"].startswith("python scripts/check_tp.py")


@pytest.mark.slow
def test_four_ranks_show_all():
    options = ("--virtual", "4", "--parts", "collectives,engine", "--largest-kib", "16", "--quick")
    done = run("check_tp.py", *options, "--tokens", "4", "--layers", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout and "one digest at all degrees" in done.stdout


@pytest.mark.slow
def test_processes_that_take_turns_show_the_same(tmp_path):
    out = tmp_path / "claims.json"
    options = ("--virtual", "2", "--parallel", "--parts", "engine", "--quick", "--tokens", "4")
    done = run("check_tp.py", *options, "--layers", "1", "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert "FAILED" not in done.stdout and report["status"] == 0
    assert len(report["digests"]) == 4 and len(set(report["digests"].values())) == 3
    assert report["command"].startswith("python scripts/check_tp.py --virtual 2 --parallel")


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path):
    out = tmp_path / "bench.json"
    done = run("bench_collectives.py", "--virtual", "2", "--largest-kib", "8", "--json", str(out))
    assert done.returncode == 0, done.stderr
    sizes = json.loads(out.read_text())["sizes"]
    assert [size["kib"] for size in sizes] == [4, 8]
    assert sizes[0]["rows"]["ordered"]["us"] > 0
