"""`bi-jax generate`: a model folder in, text and JSONL out; bad input is one sentence and 2."""

import io
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from bi_jax import Engine, EngineConfig, SamplingParams, cli, flags, program_store
from bi_jax.check import CheckReport, CheckRun, check_invariance
from bi_jax.identity import Identity
from bi_jax.prompts_file import read_prompts_file
from bi_jax.request import CompletionOutput, RequestOutput
from tests.models.fixture_models import copy_of, edit_config

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of random weights whose tokens are characters."""
    folder = copy_of("llama3", tmp_path_factory.mktemp("model"))
    words = [*SPECIAL, *map(chr, range(32, 127))]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch):
    """The command turns caches on for its process, which here is everybody's."""
    monkeypatch.setattr(flags, "enable_compilation_cache", lambda: None)
    monkeypatch.setattr(program_store, "enable_program_store", lambda folder: None)


def run(*options: object) -> int:
    return cli.main(["generate", *map(str, options)])


def test_a_file_of_prompts_becomes_a_file_of_completions(model, tmp_path, capsys):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(
        '{"prompt": "Hello", "seed": 5, "temperature": 1.0, "n": 2}\n\n'
        '{"prompt_token_ids": [40, 41, 42], "max_tokens": 3}\n'
    )
    status = run(
        *("--model", model, "--prompts-file", prompts, "--max-tokens", 8, "--ignore-eos"),
        *("--raw", "--output", output, "--max-num-seqs", 4, "--check"),
        *("--max-num-batched-tokens", 16),
    )
    shown = capsys.readouterr()
    assert status == 0, shown
    assert "PASSED: 3 completions, 19 tokens" in shown.out and "row buckets" in shown.out
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(r["index"], len(r["token_ids"])) for r in records] == [(0, 8), (1, 8), (0, 3)]
    assert records[0]["token_ids"] != records[1]["token_ids"]
    assert [r["seed"] for r in records[:2]] == [5, 5] and isinstance(records[2]["seed"], int)
    for record in records:
        bits = np.array([int(b, 16) for b in record["logprob_bits"]], np.uint32)
        assert bits.view(np.float32).tolist() == record["logprobs"]
        assert record["finish_reason"] == "length" and "top_logprobs" not in record
    identity = Identity.from_dict(records[0]["identity_fields"])
    assert {r["identity"] for r in records} == {identity.short}
    assert "identity_fields" not in records[1]
    assert not list(tmp_path.glob(".bi-jax-*"))


BAD = [
    (["--temperature", "-1"], "temperature"),
    (["--top-p", "0"], "top_p"),
    (["--n", "0"], "n=0"),
    (["--max-tokens", "0"], "max_tokens"),
    (["--prompt", ""], "empty"),
    (["--model", "no/such/model/anywhere"], "no/such/model/anywhere"),
    (["--prompts-file", "absent.txt"], "absent.txt"),
    (["--stream", "--n", "2"], "--stream"),
    (["--output", "absent/out.jsonl"], "absent/out.jsonl"),
    (["--output", "."], "folder"),
    (["--tensor-parallel-size", "3", "--tp-invariant"], "3"),
    (["--raw", "--prompt", "x" * 257], "256"),
    (["--raw", "--system", "be brief"], "--system"),
    (["--prompts-file", "twice.jsonl", "--stream"], "--stream"),
]


@pytest.mark.parametrize(("options", "said"), BAD, ids=[" ".join(o)[:32] for o, _ in BAD])
def test_bad_input_is_one_sentence(options, said, model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "twice.jsonl" in options:
        (model / "twice.jsonl").write_text('{"prompt": "a", "n": 2}\n')
        options = [str(model / o) if o == "twice.jsonl" else o for o in options]
    output = [] if "--output" in options else ["--output", "out.jsonl"]
    named = [] if "--model" in options else ["--model", model]
    assert run(*named, *output, *options) == 2
    refused(capsys, said)
    assert not list(tmp_path.iterdir())


LINES = [
    ("not json", "line 2 is not JSON"),
    ("[1, 2]", "line 2 must be a JSON object"),
    ('{"prompt": "a", "messages": []}', "line 2 must have exactly one of"),
    ('{"prompt": ""}', "line 2: prompt"),
    ('{"prompt": "a", "temprature": 1}', "line 2 has unknown fields: temprature"),
    ('{"prompt": "a", "top_p": 0}', "line 2: top_p"),
    ('{"prompt_token_ids": [3, 500]}', "line 2: token id 500 at place 1"),
    ('{"prompt_token_ids": [3, -1]}', "line 2: prompt_token_ids[1]=-1"),
    ('{"prompt": "a", "min_tokens": 300}', "line 2: min_tokens=300 must not exceed max_tokens=256"),
    ('{"prompt": "\\ud800"}', "line 2: the text holds half of a surrogate pair"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "line 2: the model has no chat template"),
]


@pytest.mark.parametrize(("line", "said"), LINES, ids=[said[:24] for _, said in LINES])
def test_a_bad_line_is_named(line, said, model, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    output = tmp_path / "out.jsonl"
    assert run("--model", model, "--prompts-file", prompts, "--output", output) == 2
    refused(capsys, said)
    assert list(tmp_path.iterdir()) == [prompts]


def test_lines_end_at_line_ends_only(tmp_path):
    """With a byte order mark, ends as on Windows, and characters that `splitlines` cuts at."""
    prompts = tmp_path / "prompts.jsonl"
    text = "one\u2028two\x85three\x0cfour"
    line = json.dumps({"prompt": text}, ensure_ascii=False)
    prompts.write_bytes(f"\ufeff{line}\r\n\r\n{line}\r\n".encode())
    assert [found.prompt for found in read_prompts_file(prompts)] == [text, text]
    plain = tmp_path / "prompts.txt"
    plain.write_bytes(f"\ufeff{text}\r\nlast".encode())
    assert [found.prompt for found in read_prompts_file(plain)] == [text, "last"]


@pytest.mark.parametrize("line", ['{"seed": ' + "1" * 5000 + "}", "[" * 200_000])
def test_lines_that_json_cannot_hold_are_named(line, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(ValueError, match="line 2 cannot be read"):
        read_prompts_file(prompts)


def test_completions_are_kept_where_nobody_reads_what_is_shown(tmp_path, monkeypatch):
    logprobs = np.array([-0.5, -0.25], np.float32)
    completion = CompletionOutput(index=0, token_ids=[7, 8], text="ab", logprobs=logprobs)
    answer = RequestOutput(request_id="r", prompt="a", prompt_token_ids=[5], outputs=[completion])
    stub = SimpleNamespace(
        tokenizer=SimpleNamespace(chat_template=None, encode=lambda text: [5]),
        make_request=lambda *_: None,
        generate=lambda *_, **__: [answer],
        identity=SimpleNamespace(to_dict=dict),
        model_name="stub",
    )
    monkeypatch.setattr("bi_jax.generate_command._engine", lambda _: stub)

    def gone(*_):
        raise BrokenPipeError

    monkeypatch.setattr("bi_jax.generate_command._show", gone)
    assert run("--prompt", "a", "--output", tmp_path / "out.jsonl") == 1
    assert json.loads((tmp_path / "out.jsonl").read_text())["token_ids"] == [7, 8]


def test_letters_that_the_terminal_lacks_are_shown_as_numbers(monkeypatch):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)

    def command(arguments):
        print("caf\xe9")
        return 0

    monkeypatch.setattr(cli, "run_generate", command)
    assert run() == 0
    assert shown.buffer.getvalue() == b"caf\\xe9\n"  # type: ignore[attr-defined]


def test_damaged_models_are_refused(model, tmp_path, capsys):
    cut = shutil.copytree(model, tmp_path / "cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert run("--model", cut) == 2
    refused(capsys, "model.safetensors")
    other = shutil.copytree(model, tmp_path / "other")
    edit_config(other, hidden_size=128)
    assert run("--model", other) == 2
    refused(capsys, "embed")


def refused(capsys: pytest.CaptureFixture[str], said: str) -> None:
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("error: ") and shown.err.count("\n") == 1
    assert said in shown.err and "Traceback" not in shown.err


def test_a_difference_is_found_and_named(model, capsys, monkeypatch):
    """The control: what the check compares with is changed in one bit."""
    settings = EngineConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=128)
    engine = Engine.from_pretrained(model, config=settings)
    prompts, params = [[40, 41], [50]], [SamplingParams(max_tokens=4, ignore_eos=True)] * 2
    outputs = engine.generate(prompts, params)
    assert check_invariance(engine, prompts, params, outputs).passed
    bad = outputs[1].outputs[0]
    logprobs = np.array(bad.logprobs)
    logprobs.view(np.uint32)[2] ^= 1
    changed = [outputs[0], replace(outputs[1], outputs=[replace(bad, logprobs=logprobs)])]
    report = check_invariance(engine, prompts, params, changed)
    assert not report.passed and len(report.runs) == 3
    assert "prompt 1, completion 0, log-probability 2:" in report.lines()[0]
    assert report.lines()[-1].startswith("FAILED")
    monkeypatch.setattr("bi_jax.check.check_invariance", lambda *_, **__: report)
    monkeypatch.setattr(Engine, "from_pretrained", lambda *_, **__: engine)
    assert run("--model", model, "--raw", "--prompt", "a", "--max-tokens", 2, "--check") == 1
    assert "DIFFERENT: prompt 1" in capsys.readouterr().out


def test_one_row_bucket_is_inconclusive():
    one = CheckRun(name="each alone", row_buckets=(16,), difference=None)
    report = CheckReport(completions=1, tokens=4, runs=(one, one))
    assert report.passed and report.lines()[-1].startswith("INCONCLUSIVE")
