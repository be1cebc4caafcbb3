"""Opening a prepared folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_samples import byte_level_metadata, write_gguf

from octavo.models import ModelError, open_prepared
from octavo.models.prepare import prepare

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}\n…".encode()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A prepared GGUF file."""
    metadata = byte_level_metadata(**{"tokenizer.chat_template": TEMPLATE.decode()})
    path = write_gguf(tmp_path / "m.gguf", metadata)
    prepare(str(path))
    return path


def test_what_is_not_prepared_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was never prepared says `octavo prepare FILE`, a catalog name `octavo pull NAME`."""
    path = write_gguf(tmp_path / "m.gguf", byte_level_metadata())
    with pytest.raises(ModelError, match=f"run `octavo prepare {path}`"):
        open_prepared(str(path))
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    with pytest.raises(ModelError, match="run `octavo pull smollm2-135m-instruct`"):
        open_prepared("smollm2-135m-instruct")


def change(path: Path, old: str, new: str) -> None:
    """Put something else into a file."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def damage_tokenizer(folder: Path) -> None:
    """Lose one character of tokenizer.json."""
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text[:-2] + text[-1:])


def other_format(folder: Path) -> None:
    """Write the format number of an Octavo to come."""
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"format": 1', '"format": 99'))


def no_hash(folder: Path) -> None:
    """Make the revision something that no sha256 is."""
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"revision": "', '"revision": "x'))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (damage_tokenizer, "is not the file that was prepared"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "is not the file that was prepared"),
        (other_format, "has format 99"),
        (no_hash, "a hash is no sha256"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "cannot read"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "no JSON object"),
        (lambda folder: (folder / "manifest.json").write_text('{"format": 1}'), "is damaged"),
        (lambda folder: (folder / "generation_config.json").unlink(), "cannot read"),
        (lambda folder: (folder / "generation_config.json").write_text("{}"), "is damaged"),
        (lambda folder: change(folder / "generation_config.json", '"top_k": 0', '"top_k": 1e999'), "is damaged"),
        (lambda folder: change(folder / "generation_config.json", '"top_k": 0', '"top_k": 1'), "not hold what was"),
        (lambda folder: (folder / "generation_config.json").write_text("[" * 100_000), "cannot read"),
        (lambda folder: change(folder / "manifest.json", '"vocab_size": ', '"vocab_size": 1e999, "v": '), "is damaged"),
        (lambda folder: (folder / "chat_template.jinja").write_bytes(TEMPLATE[:20]), "not hold what was"),
        (lambda folder: (folder / "chat_template.jinja").write_bytes(TEMPLATE[:-1]), "cannot read"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "not hold what was"),
    ],
)
def test_a_damaged_folder_is_refused_with_the_way_out(model: Path, harm: Callable[[Path], None], message: str) -> None:
    """Whatever part is damaged, the error is a ModelError that names `octavo prepare`."""
    harm(model.with_suffix(".octavo"))
    with pytest.raises(ModelError, match=rf"(?s){message}.*octavo prepare"):
        open_prepared(str(model))


def test_weights_that_changed_since_are_refused(model: Path) -> None:
    """The revision would promise weights that are no longer there."""
    with model.open("ab") as file:
        file.write(b"x")
    with pytest.raises(ModelError, match="when it was prepared: run `octavo prepare`"):
        open_prepared(str(model))


def test_a_gateway_needs_no_weights_and_an_executor_is_told(model: Path) -> None:
    """The prepared folder alone opens; `check_weights` says what is missing."""
    model.unlink()
    opened = open_prepared(str(model.with_suffix(".octavo")))
    assert opened.name == "m"
    with pytest.raises(ModelError, match=r"m\.gguf is missing"):
        opened.check_weights()


def test_opening_needs_neither_torch_nor_transformers(model: Path) -> None:
    """The gateway opens models, so this path must not import what it may not."""
    code = (
        "import sys; from octavo.models import open_prepared; "
        f"open_prepared({str(model)!r}); "
        "assert not {'torch', 'transformers', 'numpy', 'gguf'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
