"""`octavo models`, `inspect`, `graph` and `export`, by way of the executor's package as a process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from factories import make_llama
from gguf_models import make_gguf

from octavo.cli import main


def test_models_lists_families_and_formats(capsys: pytest.CaptureFixture[str]) -> None:
    """For people and as JSON."""
    assert main(["models"]) == 0
    words = capsys.readouterr().out
    assert "MixtralForCausalLM" in words
    assert "Q6_K" in words
    assert main(["models", "--json"]) == 0
    assert {each["format"] for each in json.loads(capsys.readouterr().out)["formats"]} >= {"safetensors", "GGUF"}


@pytest.mark.full
def test_inspect_tells_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 for a sound model that fits, 1 for one that asks for too much or is damaged, each with the reason."""
    path = make_gguf(make_llama(tmp_path / "tiny"), tmp_path / "model.gguf")
    assert main(["inspect", str(path), "--dtype", "float32", "--context", "1024", "--batch", "2"]) == 0
    words = capsys.readouterr().out
    assert "LlamaForCausalLM" in words
    assert "fits: 2 x 1024 tokens" in words
    assert main(["inspect", str(path), "--kv-memory", "1MiB", "--context", "2048", "--batch", "9"]) == 1
    assert "does not fit" in capsys.readouterr().out
    path.write_bytes(path.read_bytes()[:-64])
    assert main(["inspect", str(path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert "model.gguf" in report["checks"][0]["text"]


@pytest.mark.full
def test_graph_shows_what_passes_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes, matches and buffers for people and as JSON, and a drawing; a pass that is none is named with those that
    are.
    """
    folder, drawing = str(make_llama(tmp_path / "tiny")), tmp_path / "graph.svg"
    assert main(["graph", folder, "--dtype", "float32", "--svg", str(drawing)]) == 0
    words = capsys.readouterr().out
    assert "merge_qkv" in words
    assert "intermediates of 512 tokens" in words
    assert drawing.read_text().startswith("<svg")
    assert main(["graph", folder, "--passes", "all,-merge_qkv", "--json"]) == 0
    passes = {each["name"]: each for each in json.loads(capsys.readouterr().out)["passes"]}
    assert not passes["merge_qkv"]["on"]
    assert passes["merge_gate_up"]["matches"] > 0
    assert main(["graph", folder, "--passes", "fuse_it"]) == 1
    assert "add_rms_norm" in capsys.readouterr().err


@pytest.mark.full
def test_export_writes_a_folder_that_is_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder passes the inspection; what exists already is not touched."""
    path = make_gguf(make_llama(tmp_path / "tiny"), tmp_path / "model.gguf")
    assert main(["export", str(path), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert main(["export", str(path), str(tmp_path / "out")]) == 1
    assert "give a new folder" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--context", "0"], ["--batch", "x"], ["--kv-memory", "much"], ["--dtype", "int4"]])
def test_values_that_are_none_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A flag with a wrong value stops the command with its name."""
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", "somewhere", *flags])
    assert stopped.value.code == 2
    assert flags[0] in capsys.readouterr().err
