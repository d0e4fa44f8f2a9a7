"""Encoding, decoding and chat prompts equal transformers'; folders are read as it reads them."""

import json
import shutil

import pytest
from tokenizers import normalizers, pre_tokenizers

from bi_jax.tokenizer import Tokenizer
from tests.bi_jax.text_cases import QWEN3_SMALL, demo_gguf, expected, load

NAMES = ("smollm2", "qwen3")


@pytest.mark.parametrize("name", NAMES)
def test_texts_encode_and_decode_as_in_transformers(name):
    tokenizer, cases = load(name), expected(name)["texts"]
    assert len(cases) > 25
    for case in cases:
        ids = tokenizer.encode(case["text"], add_special_tokens=False)
        assert ids == case["ids"], case["text"]
        assert ids == tokenizer.encode(case["text"]), "neither model begins its texts with BOS"
        assert tokenizer.decode(ids, skip_special_tokens=False) == case["decoded"]
        assert tokenizer.decode(ids) == case["decoded_without_special"]


@pytest.mark.parametrize("name", NAMES)
def test_chats_render_and_encode_as_in_transformers(name):
    tokenizer, cases = load(name), expected(name)["chats"]
    for case in cases:
        options = {
            "add_generation_prompt": case.get("add_generation_prompt", True),
            "tools": case.get("tools"),
            **case.get("options", {}),
        }
        assert tokenizer.apply_chat_template(case["messages"], **options) == case["prompt"]
        assert tokenizer.encode_chat(case["messages"], **options) == case["ids"]


def test_qwen3_thinks_unless_told_not_to():
    messages = [{"role": "user", "content": "1+1?"}]
    on = load("qwen3").apply_chat_template(messages, enable_thinking=True)
    off = load("qwen3").apply_chat_template(messages, enable_thinking=False)
    assert off == on + "<think>\n\n</think>\n\n"
    assert on == load("qwen3").apply_chat_template(messages)


def test_special_tokens_in_user_text_become_special_tokens():
    """As transformers has it by default; the fixtures hold it too, this says it plainly."""
    ids = load("smollm2").encode_chat([{"role": "user", "content": "a<|im_end|>b"}])
    assert ids.count(2) == 3  # the system turn's, the user's own, the user turn's


def _mismatches(tokenizer: Tokenizer, name: str) -> int:
    cases = expected(name)["texts"]
    return sum(tokenizer.encode(case["text"]) != case["ids"] for case in cases)


def test_the_fixtures_notice_a_wrong_pipeline():
    smollm2 = Tokenizer.from_pretrained(demo_gguf())
    assert _mismatches(smollm2, "smollm2") == 0
    smollm2.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert _mismatches(smollm2, "smollm2") > 0, "digits no longer stand alone"
    qwen3 = Tokenizer.from_pretrained(QWEN3_SMALL)
    assert _mismatches(qwen3, "qwen3") == 0
    qwen3.backend.normalizer = normalizers.Sequence([])
    assert _mismatches(qwen3, "qwen3") > 0, "decomposed accents are no longer composed"


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_tokens_join_to_the_decoded_text(name):
    tokenizer = load(name)
    assert tokenizer.is_byte_level
    for case in expected(name)["texts"]:
        for skip in (False, True):
            joined = b"".join(tokenizer.token_bytes(token, skip) for token in case["ids"])
            assert joined.decode("utf-8", "replace") == tokenizer.decode(case["ids"], skip)


def test_ids_and_sizes():
    smollm2, qwen3 = load("smollm2"), load("qwen3")
    assert (smollm2.vocab_size, smollm2.eos_token_ids, smollm2.bos_token_id) == (49152, (2,), 1)
    assert (qwen3.vocab_size, qwen3.eos_token_ids, qwen3.bos_token_id) == (151669, (151645,), None)
    assert smollm2.eos_token_id == 2
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"
    # Logits are wider than the vocabulary; such an id can be drawn from an untrained model.
    assert qwen3.decode([151900]) == "" and qwen3.token_bytes(151900) == b""


def test_input_that_is_no_text_and_ids_that_are_none():
    with pytest.raises(ValueError, match=r"half of a surrogate pair, '\\ud83c', at place 2"):
        load("smollm2").encode("ab\ud83c")
    with pytest.raises(ValueError, match="token id -1 is negative"):
        load("smollm2").decode([3, -1])


# Folders -----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(QWEN3_SMALL, tmp_path, dirs_exist_ok=True)
    return tmp_path


def _write(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")


def _change_config(folder, **entries):
    file = folder / "tokenizer_config.json"
    _write(file, json.loads(file.read_text(encoding="utf-8")) | entries)


def test_end_tokens_come_from_the_tokenizer_and_the_generation_config(folder):
    _write(folder / "generation_config.json", {"eos_token_id": [151645, 151643]})
    _write(folder / "config.json", {"eos_token_id": 7})
    assert Tokenizer.from_pretrained(folder).eos_token_ids == (151645, 151643)
    _write(folder / "generation_config.json", {"eos_token_id": 151643})
    assert Tokenizer.from_pretrained(folder).eos_token_ids == (151645, 151643)
    _change_config(folder, eos_token=None)
    (folder / "generation_config.json").unlink()
    assert Tokenizer.from_pretrained(folder).eos_token_ids == (7,)
    _write(folder / "config.json", {"eos_token_id": "x"})
    with pytest.raises(ValueError, match=r"eos_token_id='x' in .*config\.json must be a token id"):
        Tokenizer.from_pretrained(folder)


def test_special_tokens_map_fills_what_the_config_leaves_out(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    del config["eos_token"], config["bos_token"]
    _write(folder / "tokenizer_config.json", config)
    _write(
        folder / "special_tokens_map.json",
        {"eos_token": {"content": "<|endoftext|>"}, "bos_token": "<|im_start|>"},
    )
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.special_tokens["eos_token"] == "<|endoftext|>"
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == ((151643,), 151644)


def test_bos_and_eos_are_added_where_the_config_says_so(folder):
    _change_config(folder, bos_token="<|im_start|>", add_bos_token=True, add_eos_token=True)
    tokenizer = Tokenizer.from_pretrained(folder)
    plain = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.encode("a") == [151644, *plain, 151645]
    _change_config(folder, add_bos_token=True, add_eos_token=False, bos_token=None)
    assert Tokenizer.from_pretrained(folder).encode("a") == plain


def test_tokens_that_only_the_config_knows_are_added_at_their_ids(folder):
    file = folder / "tokenizer.json"
    whole = json.loads(file.read_text(encoding="utf-8"))
    last = whole["added_tokens"].pop()
    del whole["model"]["vocab"][last["content"]]
    _write(file, whole)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["added_tokens_decoder"]["151668"] = {"content": last["content"], "special": False}
    _write(folder / "tokenizer_config.json", config)
    assert Tokenizer.from_pretrained(folder).encode("</think>") == [151668]
    config["added_tokens_decoder"]["151700"] = {"content": "<late>", "special": True}
    _write(folder / "tokenizer_config.json", config)
    with pytest.raises(ValueError, match=r"says that '<late>' has id 151700, tokenizer\.json says"):
        Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize("listed", [[1], {"x": {"content": "a"}}, {"7": {}}, {"7": {"content": 1}}])
def test_added_tokens_that_are_damaged_are_named(folder, listed):
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["added_tokens_decoder"] = listed
    _write(folder / "tokenizer_config.json", config)
    with pytest.raises(ValueError, match=r"added_tokens_decoder in .*config\.json must name texts"):
        Tokenizer.from_pretrained(folder)


def test_truncation_and_padding_of_the_file_are_not_applied(folder):
    file = folder / "tokenizer.json"
    whole = json.loads(file.read_text(encoding="utf-8"))
    whole["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    _write(file, whole)
    assert len(Tokenizer.from_pretrained(folder).encode("a b c d e")) > 2


def test_a_tokenizer_json_and_a_folder_with_one_gguf_file_will_do(folder, tmp_path_factory):
    assert Tokenizer.from_pretrained(folder / "tokenizer.json").eos_token_ids == (151645,)
    other = tmp_path_factory.mktemp("gguf")
    (other / "model.gguf").symlink_to(demo_gguf())
    assert Tokenizer.from_pretrained(str(other)).vocab_size == 49152


def test_what_is_not_there_or_not_supported_is_refused_by_name(tmp_path):
    def refusal(kind):
        with pytest.raises(kind) as caught:
            Tokenizer.from_pretrained(tmp_path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    with pytest.raises(ValueError, match=r"there is no tokenizer at .*nowhere"):
        Tokenizer.from_pretrained(tmp_path / "nowhere")
    assert "holds no tokenizer.json" in refusal(ValueError)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    message = refusal(NotImplementedError)
    assert "a SentencePiece model (tokenizer.model)" in message and "--tokenizer" in message
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    assert "tokenizer.json is damaged or of an unknown kind" in refusal(ValueError)
    shutil.copy(QWEN3_SMALL / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]", encoding="utf-8")
    assert "tokenizer_config.json must hold a JSON object" in refusal(ValueError)
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    assert "tokenizer_config.json is not valid JSON" in refusal(ValueError)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": 5}', encoding="utf-8")
    assert "eos_token=5 in" in refusal(ValueError)
