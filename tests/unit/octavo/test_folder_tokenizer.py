"""Tokenizers of Hugging Face folders, whatever files they lie in."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from factories import CHAT_TEMPLATE, SPECIAL_TOKENS, TOKENIZER_SIZE, make_tokenizer
from google.protobuf.message import Message
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import SpmConverter
from transformers.utils import sentencepiece_model_pb2_new as sentencepiece

from octavo.models import ModelError
from octavo.models.folder_tokenizer import FolderTokenizer, read_tokenizer

TEXTS = ("the 1234 end", " two  spaces", "naïve 日本 🎉\n", "", "x\ty", "  ", "<|im_start|>the<|im_end|> the")


def _edit(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file, which need not be there; None takes one away."""
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept = {key: value for key, value in (document | changes).items() if value is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")


def _ids(tokenizer: FolderTokenizer, text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_str(tokenizer.text).encode(text).ids
    return ids


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a byte-level tokenizer and no model."""
    make_tokenizer(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "LlamaTokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
def test_text_is_cut_as_the_file_says_whatever_the_class_is_called(folder: Path, name: str) -> None:
    """SmolLM 2's file cuts digits one by one and names a class whose code does not: the file holds."""
    digits = {"type": "Digits", "individual_digits": True}
    document = json.loads((folder / "tokenizer.json").read_text())
    steps = {"type": "Sequence", "pretokenizers": [digits, document["pre_tokenizer"]]}
    vocabulary = document["model"]["vocab"] | {"12": TOKENIZER_SIZE}
    model = document["model"] | {"vocab": vocabulary, "merges": [["1", "2"], *document["model"]["merges"]]}
    _edit(folder / "tokenizer.json", pre_tokenizer=steps, model=model)
    _edit(folder / "tokenizer_config.json", tokenizer_class=name)
    _edit(folder / "config.json", model_type="llama")
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = read_tokenizer(folder)
    assert [_ids(found, text) for text in TEXTS] == [own.encode(text).ids for text in TEXTS]
    assert TOKENIZER_SIZE not in _ids(found, "1212")


def test_the_special_tokens_of_the_settings(folder: Path) -> None:
    """Their ids are found, written alone or with flags, in either of two files; one that is no token has none."""
    assert read_tokenizer(folder).bos_token_id == 1
    assert read_tokenizer(folder).eos_token_id == 2
    flagged = {"content": SPECIAL_TOKENS[0], "lstrip": False, "normalized": False, "rstrip": False}
    _edit(folder / "tokenizer_config.json", bos_token=flagged, eos_token=None)
    assert read_tokenizer(folder).bos_token_id == 0
    assert read_tokenizer(folder).eos_token_id is None
    _edit(folder / "special_tokens_map.json", eos_token=flagged, bos_token="<|im_end|>")
    assert read_tokenizer(folder).eos_token_id == 0
    assert read_tokenizer(folder).bos_token_id == 0
    _edit(folder / "tokenizer_config.json", bos_token="no such token")
    assert read_tokenizer(folder).bos_token_id is None


def test_templates_wherever_they_lie(folder: Path) -> None:
    """Alone in the settings, one of several, in a file of its own, which goes first, or in that of a processor."""
    assert read_tokenizer(folder).chat_template == CHAT_TEMPLATE
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    _edit(folder / "tokenizer_config.json", chat_template=named)
    assert read_tokenizer(folder).chat_template == "plain"
    _edit(folder / "tokenizer_config.json", chat_template=named[:1])
    assert read_tokenizer(folder).chat_template is None
    _edit(folder / "tokenizer_config.json", chat_template=None)
    assert read_tokenizer(folder).chat_template is None
    _edit(folder / "chat_template.json", chat_template="of the processor")
    assert read_tokenizer(folder).chat_template == "of the processor"
    (folder / "chat_template.jinja").write_text("{{ 'own' }}\n")
    assert read_tokenizer(folder).chat_template == "{{ 'own' }}\n"


def _added(content: str, **flags: bool) -> dict[str, Any]:
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": False}
    return {"content": content, **plain, **flags}


def test_tokens_that_the_settings_add(folder: Path) -> None:
    """Fine-tuned models have some there alone: they get their ids and flags, but for those past a gap."""
    decoder = {
        "2": _added("<|im_end|>", special=True, rstrip=True),
        str(TOKENIZER_SIZE): _added("<tool>"),
        str(TOKENIZER_SIZE + 1): _added("<|end|>", special=True),
        str(TOKENIZER_SIZE + 3): _added("<far>"),
    }
    _edit(folder / "tokenizer_config.json", added_tokens_decoder=decoder, eos_token="<|end|>")
    found = read_tokenizer(folder)
    assert found.eos_token_id == TOKENIZER_SIZE + 1
    assert _ids(found, "<tool><|end|>") == [TOKENIZER_SIZE, TOKENIZER_SIZE + 1]
    assert _ids(found, "<|im_end|>\n") == [2], "what follows is stripped"
    tokenizer = Tokenizer.from_str(found.text)
    assert tokenizer.decode([TOKENIZER_SIZE, TOKENIZER_SIZE + 1]) == "<tool>"
    assert tokenizer.token_to_id("<far>") is None


def test_tokens_that_an_older_file_adds(folder: Path) -> None:
    """added_tokens.json has names and ids; one with a part is special."""
    _edit(folder / "added_tokens.json", **{"<|end|>": TOKENIZER_SIZE + 1, "<tool>": TOKENIZER_SIZE})
    _edit(folder / "tokenizer_config.json", eos_token="<|end|>")
    tokenizer = Tokenizer.from_str(read_tokenizer(folder).text)
    assert tokenizer.encode("<tool><|end|>").ids == [TOKENIZER_SIZE, TOKENIZER_SIZE + 1]
    assert tokenizer.decode([TOKENIZER_SIZE, TOKENIZER_SIZE + 1]) == "<tool>"


def test_a_begin_token_that_the_settings_ask_for(folder: Path) -> None:
    """DeepSeek's distilled models leave it to the class: it is put before a text once, also where the file does so."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    for own in (None, byte_level):
        _edit(folder / "tokenizer.json", post_processor=own)
        _edit(folder / "tokenizer_config.json", add_bos_token=None)
        plain = _ids(read_tokenizer(folder), "the end")
        _edit(folder / "tokenizer_config.json", add_bos_token=True)
        assert _ids(read_tokenizer(folder), "the end") == [1, *plain]
    make_tokenizer(folder, add_bos=True)
    _edit(folder / "tokenizer_config.json", add_bos_token=True)
    assert _ids(read_tokenizer(folder), "the end") == [1, *plain]


def test_lengths_are_nobody_s_business_here(folder: Path) -> None:
    """A file that cuts and pads is read without that."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert len(_ids(read_tokenizer(folder), "abcdef")) == 6


def test_vocab_and_merges_alone(folder: Path) -> None:
    """OPT's folders have no tokenizer.json: transformers' class reads them, and its BOS is put before a text."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(merge) for merge in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "unk_token": "<|endoftext|>"}
    _edit(folder / "tokenizer_config.json", **settings, bos_token="<|im_end|>", eos_token="<|im_end|>")
    _edit(folder / "config.json", model_type="opt")
    found = read_tokenizer(folder)
    assert (found.bos_token_id, found.eos_token_id) == (2, 2)
    own = Tokenizer.from_str(found.text)
    assert own.encode("the").ids[0] == 2
    assert own.decode(own.encode("the 12 naïve").ids) == "the 12 naïve"


def test_code_of_the_model_s_own_is_neither_run_nor_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is asked on the terminal, and the error says what is missing."""
    (folder / "tokenizer.json").unlink()
    (folder / "own.py").write_text("raise SystemExit('run')")
    (folder / "own.tiktoken").write_text("")
    _edit(folder / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})
    _edit(folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.Config"})
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(ModelError, match="cannot load the tokenizer in"):
        read_tokenizer(folder)
    assert sys.stdin.read() == "y\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "{", r"cannot read .*tokenizer\.json"),
        ("tokenizer.json", "[]", r"tokenizer\.json holds no JSON object"),
        ("tokenizer.json", "{}", r"tokenizer\.json .*is no tokenizer"),
        ("tokenizer.json", '{"model": {"vocab": {}, "type": "Own"}}', r"tokenizer\.json is no tokenizer that loads"),
        ("tokenizer.json", '{"model": {"vocab": {}}, "added_tokens": [3]}', r"tokenizer\.json .*is no tokenizer"),
        ("tokenizer_config.json", "nonsense", r"cannot read .*tokenizer_config\.json"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', r"tokenizer_config\.json beside it is no"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [3]}', r"tokenizer_config\.json beside it is no"),
        ("added_tokens.json", '{"<x>": "y"}', "beside it is no tokenizer"),
    ],
)
def test_damaged_files_are_named(folder: Path, name: str, text: str, message: str) -> None:
    """Each is an error that names the file."""
    (folder / name).write_text(text)
    with pytest.raises(ModelError, match=message):
        read_tokenizer(folder)


def _sentencepiece(**changes: Any) -> Any:
    """A BPE model of spaces, letters, a few words, bytes and user-defined pieces, as SentencePiece trains one."""
    model = sentencepiece.ModelProto()
    for text, kind in (("<unk>", 2), ("<s>", 3), ("</s>", 3), ("<user>", 4), ("\n\n", 4)):
        model.pieces.add(piece=text, score=0.0, type=kind)
    for byte in range(256):
        model.pieces.add(piece=f"<0x{byte:02X}>", score=0.0, type=6)
    words = ["▁t", "he", "▁the", "in", "▁▁", "▁▁▁▁", "12"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz0123456789.é"]
    for rank, text in enumerate([*words, *letters]):
        model.pieces.add(piece=text, score=-float(rank))
    trainer = {"model_type": 2, "byte_fallback": True, "unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}
    normalizer = {"name": "identity", "add_dummy_prefix": True, "remove_extra_whitespaces": False}
    for fields, message in ((trainer, model.trainer_spec), (normalizer, model.normalizer_spec)):
        for name, value in fields.items():
            setattr(message, name, changes.get(name, value))
    return model


def _save(folder: Path, model: Message, **settings: Any) -> Path:
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    _edit(folder / "tokenizer_config.json", bos_token="<s>", eos_token="</s>", **settings)
    return folder


@pytest.mark.parametrize("prefix", [True, False], ids=["space in front", "as it stands"])
def test_sentencepiece_alone(tmp_path: Path, prefix: bool) -> None:
    """tokenizer.model gives the ids that transformers' own reading of the same message gives, with a BOS."""
    model = _sentencepiece(add_dummy_prefix=prefix)
    found = read_tokenizer(_save(tmp_path, model))
    vocabulary = {piece.piece: index for index, piece in enumerate(model.pieces)}
    theirs = SpmConverter.build_tokenizer_from_spm_proto(proto=model, vocab=vocabulary)
    for text in ("the 12 end", "the  in", "  the", "naïve 日本", "x\ty", "in\n\nthe", "tom."):
        assert _ids(found, text) == [1, *theirs.encode(text).ids], text
        assert Tokenizer.from_str(found.text).decode(_ids(found, text)) == text
    assert (found.bos_token_id, found.eos_token_id) == (1, 2)


def test_sentencepiece_with_added_tokens(tmp_path: Path) -> None:
    """Tokens that fine-tuning added lie in the settings; add_bos_token and add_eos_token are honoured."""
    model = _sentencepiece()
    size = len(model.pieces)
    decoder = {"1": _added("<s>", special=True), str(size): _added("<|im_end|>", special=True)}
    found = read_tokenizer(
        _save(tmp_path, model, added_tokens_decoder=decoder, add_bos_token=False, add_eos_token=True)
    )
    assert _ids(found, "<|im_end|>") == [size, 2]
    assert _ids(found, "<s>") == [1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": 1}, "of the kind 'unigram'"),
        ({"remove_extra_whitespaces": True}, "takes spaces away"),
        ({"precompiled_charsmap": b"map"}, "changes characters"),
        ({"escape_whitespaces": False}, "leaves spaces as they are"),
    ],
)
def test_other_kinds_of_sentencepiece_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """What would cut text otherwise is not guessed at: the way out is named."""
    model = _sentencepiece(**changes)
    for name in ("precompiled_charsmap", "escape_whitespaces"):
        if name in changes:
            setattr(model.normalizer_spec, name, changes[name])
    with pytest.raises(ModelError, match=rf"tokenizer\.model is not read \(.*{message}.*save the tokenizer as"):
        read_tokenizer(_save(tmp_path, model))


def test_a_damaged_sentencepiece_file_is_refused_or_read(tmp_path: Path) -> None:
    """Cut anywhere, or with any byte changed, it is an error that names the file, or a tokenizer."""
    whole = _save(tmp_path, _sentencepiece()) / "tokenizer.model"
    data = whole.read_bytes()
    # Pieces are alike: some of them, and all that lies behind.
    places = [*range(0, len(data) - 200, 97), *range(len(data) - 200, len(data))]
    damaged = [data[:at] for at in places] + [data[:at] + b"\xff" + data[at + 1 :] for at in places]
    refused = 0
    for each in (*damaged, b"", b"\0" * 64, b"{}"):
        whole.write_bytes(each)
        refusal = _refusal(tmp_path)
        assert refusal is None or "tokenizer.model" in refusal
        refused += refusal is not None
    assert refused > 50


def _refusal(folder: Path) -> str | None:
    """Return what a tokenizer is refused with; None where it is read."""
    try:
        read_tokenizer(folder)
    except ModelError as error:
        return str(error)
    return None
