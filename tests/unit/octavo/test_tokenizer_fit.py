"""Tokenizers against the vocabulary of the model: what does not fit is refused before anything is served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from factories import TOKENIZER_SIZE, make_llama
from gguf_samples import CONTROL, byte_level_metadata, write_gguf
from tokenizers import AddedToken, Tokenizer

from octavo.models import ModelError, open_prepared
from octavo.models.prepare import prepare

VOCAB_SIZE = 320


def _with_added(folder: Path, *tokens: str) -> None:
    """Add special tokens behind all that the tokenizer has, the first of them past the vocabulary."""
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    fillers = [f"<filler {index}>" for index in range(TOKENIZER_SIZE, VOCAB_SIZE)]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (*fillers, *tokens)])
    tokenizer.save(str(path))


def _with_config(folder: Path, name: str, **fields: object) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_added_tokens_past_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    """A mark that the model has no row for, and that nothing needs, is no token: its text is cut as any other."""
    folder = make_llama(tmp_path / "tiny", vocab_size=VOCAB_SIZE)
    _with_added(folder, "<image>")
    lines: list[str] = []
    prepare(str(folder), report=lines.append)
    assert any("left out of the tokenizer" in line and "'<image>' (320)" in line for line in lines)
    tokenizer = Tokenizer.from_file(str(open_prepared(str(folder)).tokenizer_file))
    ids = tokenizer.encode("a<image>b<filler 300>").ids
    assert max(ids) < VOCAB_SIZE
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<image>b<filler 300>"


def test_tokens_that_the_template_writes_must_have_rows(tmp_path: Path) -> None:
    """A turn's mark past the vocabulary would be cut to pieces, so it is an error that names it."""
    folder = make_llama(tmp_path / "tiny", vocab_size=VOCAB_SIZE)
    _with_added(folder, "<|turn|>")
    _with_config(folder, "tokenizer_config.json", chat_template="<|turn|>{{ messages[0]['content'] }}")
    with pytest.raises(ModelError, match=r"tiny: the tokenizer does not fit.*320 tokens, and '<\|turn\|>' \(320\)"):
        prepare(str(folder))


def test_ordinary_tokens_past_the_vocabulary_are_refused(tmp_path: Path) -> None:
    """The tokenizer of another model is an error that names the first tokens."""
    folder = make_llama(tmp_path / "tiny", vocab_size=VOCAB_SIZE)
    _with_config(folder, "config.json", vocab_size=200)
    with pytest.raises(ModelError, match=r"has 200 tokens, and '.*' \(200\), .* and 72 more lie past it"):
        prepare(str(folder))


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("generation_config.json", {"eos_token_id": [2, 5000]}, "end token 5000 is outside the vocabulary of 320"),
        ("generation_config.json", {"eos_token_id": "</s>"}, "end token '</s>' is outside the vocabulary"),
        ("generation_config.json", {"eos_token_id": -1}, "end token -1 is outside the vocabulary"),
    ],
)
def test_special_ids_outside_the_vocabulary_are_refused(
    tmp_path: Path, file: str, fields: dict[str, object], message: str
) -> None:
    """An end that no row can be is an error with the id."""
    folder = make_llama(tmp_path / "tiny", vocab_size=VOCAB_SIZE)
    _with_config(folder, file, **fields)
    with pytest.raises(ModelError, match=message):
        prepare(str(folder))


def test_an_end_that_the_tokenizer_does_not_have_is_refused(tmp_path: Path) -> None:
    """Where no end has a token, outputs would never end by themselves as the files say they do."""
    folder = make_llama(tmp_path / "tiny", vocab_size=VOCAB_SIZE)
    _with_config(folder, "generation_config.json", eos_token_id=[310])
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"has none of the tokens that end an output: \[310\]"):
        prepare(str(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.eos_token_id": 9999}, r"tokenizer\.ggml\.eos_token_id is 9999, which is no token"),
        ({"tokenizer.ggml.eot_token_id": 9999}, r"tokenizer\.ggml\.eot_token_id is 9999"),
        ({"tokenizer.ggml.token_type": [1, 2]}, r"tokenizer\.ggml\.token_type is no list of"),
        ({"tokenizer.ggml.merges": ["nopair"]}, r"tokenizer\.ggml\.merges is no list of pairs"),
        ({"tokenizer.ggml.tokens": [1, 2]}, r"lacks tokenizer\.ggml\.tokens"),
        ({"llama.context_length": 0}, r"lacks llama\.context_length"),
    ],
)
def test_faults_of_a_gguf_vocabulary_are_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    """Lists of other lengths or kinds, and special ids that are no token, are errors with file and key."""
    path = write_gguf(tmp_path / "model.gguf", byte_level_metadata() | changes)
    with pytest.raises(ModelError, match=rf"model\.gguf: .*{message}"):
        prepare(str(path))


def test_every_end_of_a_gguf_file_counts(tmp_path: Path) -> None:
    """EOS, end of turn and end of message are ends; so is a mark of a turn's end that an old file does not name."""
    extra = (("<|eot_id|>", CONTROL), ("<other>", CONTROL), ("<|end|>", CONTROL))
    metadata = byte_level_metadata(extra_tokens=extra)
    first = len(metadata["tokenizer.ggml.tokens"]) - 3
    metadata["tokenizer.ggml.eot_token_id"] = first + 1
    prepare(str(write_gguf(tmp_path / "model.gguf", metadata)))
    assert open_prepared(str(tmp_path / "model.gguf")).eos_token_ids == (2, first, first + 1, first + 2)
