"""On a card a second process finds the audited steps on disk and runs them, with equal bits."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

CODE = """
import sys, time, hashlib
from pathlib import Path
from bi_jax import Engine, EngineConfig, SamplingParams
from bi_jax.models.families.qwen3 import QWEN3_0_6B
from bi_jax.program_store import enable_program_store
from tests.gpu.engine_ways import completion_digests, digest_of, random_model, together

assert enable_program_store(Path(sys.argv[1]))
model = random_model(QWEN3_0_6B.replace(num_layers=2, max_position=1024))
config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, num_pages=40)
engine = Engine(model, config=config)
params = SamplingParams(temperature=1.0, seed=1, max_tokens=32, ignore_eos=True)
started = time.perf_counter()
outputs = together(engine, [(list(range(5, 5 + n)), params) for n in (1, 9, 40)])
reports = engine.runner.step_program.reports
ours = sum(sum(report.ours.values()) for report in reports.values())
print(digest_of(completion_digests(outputs)), len(reports), ours, engine.runner.step_program.found)
print(f"{time.perf_counter() - started:.1f} s", file=sys.stderr)
"""


def test_a_second_process_compiles_nothing(tmp_path):
    def run() -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", CODE, str(tmp_path / "programs")],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        print(done.stdout, done.stderr.splitlines()[-1])
        return done.stdout.split()

    first, second = run(), run()
    assert first[3] == "0"  # it made its programs
    assert second[3] == second[1] == first[1]  # and this one found all of them
    assert second[:3] == first[:3] and int(first[2]) > 10
