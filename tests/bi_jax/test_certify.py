"""Certificates: equal for equal set-ups, failed for stock ops, and never more than was shown."""

import copy
import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bi_jax import EngineConfig, SamplingParams
from bi_jax.battery import FAILED, PASSED, battery_requests
from bi_jax.certificate import Certificate, differences, verdict_of
from bi_jax.certificate_page import page
from bi_jax.certify_engine import certify
from bi_jax.cli import main
from bi_jax.engine import Engine
from bi_jax.identity import IdentityWarning
from bi_jax.models.transformer import build_transformer, random_params
from bi_jax.stock_ops import stock_ops
from bi_jax.testing import Inconclusive, assert_same_completions, assert_schedule_invariant
from tests.bi_jax import tiny

SMALL = tiny.CONFIG.replace(
    num_layers=1, vocab_size=96, num_query_heads=2, num_kv_heads=1, intermediate_size=64
)
SETTINGS = EngineConfig(
    max_num_seqs=4, max_num_batched_tokens=16, token_buckets=(4, 16), page_size=8, max_model_len=48
)


@pytest.fixture(scope="module")
def engine():
    params = random_params(SMALL, 1)
    return Engine(build_transformer(SMALL, params), config=SETTINGS, model_name="small")


@pytest.fixture(scope="module")
def stock(engine):
    model = nnx.merge(engine.runner._graph, engine.runner.state)
    return Engine(model, ops=stock_ops(), config=SETTINGS)


@pytest.fixture(scope="module")
def certificate(engine):
    return certify(engine, tokens=6, filters=False)


def test_our_engine_passes(certificate):
    data = certificate.data
    assert certificate.verdict == "passed"
    checks = data["battery"]["checks"]
    assert {check["promise"] for check in checks} == {"repeat", "batch", "schedule", "scoring"}
    assert {bucket for check in checks for bucket in check["programs"]} == {4, 16}
    assert data["control"]["differ"] == data["control"]["completions"] > 0
    assert data["audited"] and all(program["audit"]["passed"] for program in data["programs"])
    assert data["programs"][0]["audit"]["ours"]["bi_matmul"] == 4
    assert data["identity"]["audited"] and data["sample"] is None


def test_two_certificates_are_equal_but_for_times(engine, certificate):
    # The control's engine would be compiled again; its numbers are looked at above.
    first = Certificate(data={**certificate.data, "control": None})
    again = certify(engine, tokens=6, filters=False, control=False)
    assert again.stable() == first.stable()
    assert differences(first, again) == []
    read = Certificate(data=json.loads(again.to_json()))
    assert read.stable() == first.stable()


def test_a_change_of_weights_changes_identity_and_bits(engine, certificate):
    params = random_params(SMALL, 1)
    scale = np.asarray(params["final_norm.scale"])
    params["final_norm.scale"] = jnp.asarray(np.nextafter(scale, np.float32(2)))
    other = Engine(build_transformer(SMALL, params), config=SETTINGS, model_name="small")
    other.runner.step_program = engine.runner.step_program
    changed = certify(other, tokens=6, filters=False, control=False)
    found = differences(certificate, changed)
    assert found[0].startswith("identity, weights: was ")
    assert found[1].startswith("bits of the battery: digest was")
    assert any(line.startswith("control") for line in found)


@pytest.mark.slow
def test_an_engine_with_stock_ops_fails(stock):
    """The battery's own negative control, run as a certificate."""
    certificate = certify(stock, tokens=6, filters=False, control=False)
    assert certificate.verdict == "failed" and not certificate.data["audited"]
    wrong = [c for c in certificate.data["battery"]["checks"] if c["verdict"] == FAILED]
    assert wrong and "ULP apart" in wrong[0]["detail"]
    text = page(certificate)
    assert "Failed" in text and "DIFFERENT BITS" in text and "were not audited" in text


def test_schedules_of_engines(engine, stock):
    requests = battery_requests(engine, tokens=6, filters=False)
    others = [engine.rescheduled(max_num_batched_tokens=5, prefix_caching=False)]
    assert_schedule_invariant(engine, requests, others=others)
    with pytest.raises(AssertionError, match=r"not schedule-invariant: each alone.*request \d"):
        assert_schedule_invariant(stock, requests)
    with pytest.raises(Inconclusive, match="meets no neighbour"):
        assert_schedule_invariant(engine, requests[:1])
    one = [(prompt, dataclasses.replace(params, max_tokens=1)) for prompt, params in requests]
    with pytest.raises(Inconclusive, match="500 are needed"):
        assert_schedule_invariant(engine, one, min_tokens=500)


def test_completions_of_another_identity_are_compared_with_a_warning(engine, stock):
    requests = battery_requests(engine, tokens=6, filters=False)
    prompts, params = zip(*requests, strict=True)
    ours, again = (engine.generate(list(prompts), list(params)) for _ in range(2))
    assert_same_completions(again, ours)
    with (
        pytest.warns(IdentityWarning, match=engine.identity.short),
        pytest.raises(AssertionError, match="completions differ: request 0, completion 0"),
    ):
        assert_same_completions(stock.generate(list(prompts), list(params)), ours)
    with (
        pytest.warns(IdentityWarning, match=r"engines compared .* they differ in ops.matmul"),
        pytest.raises(AssertionError, match="on another engine"),
    ):
        assert_schedule_invariant(engine, requests, others=[stock])


def test_a_busy_engine_is_refused(engine):
    twin = engine.rescheduled()
    twin.add_request(twin.make_request([1, 2], SamplingParams(max_tokens=3)))
    with pytest.raises(ValueError, match="while it is idle"):
        certify(twin)


def test_the_page_says_what_is_and_is_not_promised(certificate):
    text = page(certificate, json_name="mine.json")
    for words in (
        "Passed",
        "What this says",
        "What it does not say",
        "Not that the model's answers are right or good",
        "stock XLA ops",
        certificate.identity.short,
        certificate.digest[:16],
        "--verify mine.json",
        "k_segments=1",
    ):
        assert words in text
    assert "<script" not in text and "http" not in text


def test_the_page_escapes_what_it_shows(certificate):
    data = copy.deepcopy(dict(certificate.data))
    data["sample"] = {"prompt": "p", "text": "<script>alert(1)</script>"}
    assert "<script" not in page(Certificate(data=data))


CHECKS = [
    {"verdict": PASSED, "programs": [4]},
    {"verdict": PASSED, "programs": [16]},
]


@pytest.mark.parametrize(
    "checks, control, verdict",
    [
        (CHECKS, {"differ": 3}, "passed"),
        (CHECKS, None, "passed"),
        (CHECKS, {"differ": 0}, "inconclusive"),
        (CHECKS[:1], {"differ": 3}, "inconclusive"),
        ([*CHECKS, {"verdict": FAILED, "programs": [4]}], {"differ": 0}, "failed"),
    ],
)
def test_a_verdict_claims_no_more_than_was_shown(checks, control, verdict):
    assert verdict_of(checks, control) == verdict


def test_bad_files_are_one_sentence(tmp_path, capsys):
    bad = tmp_path / "bad.json"
    for content, words in (("{", "is not JSON"), ("[]", "is not a certificate")):
        bad.write_text(content)
        assert main(["certify", "--verify", str(bad)]) == 2
        assert words in capsys.readouterr().err
    assert main(["certify", "--verify", str(tmp_path / "absent.json")]) == 2


def test_bad_files_are_found_before_anything_is_computed(
    certificate, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("bi_jax.certify_command._certify", lambda _: pytest.fail("computed"))
    bad = tmp_path / "bad.json"
    whole = json.loads(certificate.to_json())
    for name in ("verdict", "battery", "identity"):
        bad.write_text(json.dumps({key: value for key, value in whole.items() if key != name}))
        assert main(["certify", "--verify", str(bad)]) == 2
        assert "bad.json is damaged" in capsys.readouterr().err
    assert main(["certify", "--output", str(tmp_path / "absent" / "mine")]) == 2
    assert "absent/mine.json" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [bad]


@pytest.mark.slow
def test_the_command_certifies_and_verifies_the_demo_model(tmp_path, capsys):
    base = str(tmp_path / "mine")
    assert main(["certify", "--output", base, "--tokens", "4", "--no-control"]) == 0
    assert (tmp_path / "mine.html").read_text().startswith("<!doctype html>")
    assert "PASSED" in capsys.readouterr().out
    again = ["certify", "--tokens", "4", "--no-control", "--verify", base + ".json"]
    assert main(again) == 0
    assert "EQUAL" in capsys.readouterr().out
