"""The example of a custom operator, as a program and as a module that `octavo graph` and an executor take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from example_programs import ROOT
from factories import make_llama
from model_variations import FIRSTS, save_variation

from executor_svc.load import plan_load
from octavo.models.prepare import prepare
from octavo.rpc.settings import SettingsError
from octavo.rpc.stages import Stages
from octavo.settings import ExecutorSettings


def _run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program_measures_the_operator(tmp_path: Path) -> None:
    """It compiles the source beside it and prints both times."""
    out = tmp_path / "out.json"
    words = _run(sys.executable, "-m", "examples.own_op", "--rows", "64", "--pairs", "5", "--json", str(out))
    assert "times as fast on 64 rows of 640" in words
    assert json.loads(out.read_text())["speed_up"] > 0


@pytest.mark.full
def test_octavo_graph_shows_where_it_matches(tmp_path: Path) -> None:
    """Both sublayers of every layer of a Gemma 3 model."""
    one = next(each for each in FIRSTS if each.family == "Gemma 3")
    save_variation(tmp_path, one)
    answer = json.loads(
        _run(sys.executable, "-m", "octavo", "graph", str(tmp_path), "--ops", "examples.own_op", "--json")
    )
    first, *others = answer["passes"]
    assert (first["name"], first["on"]) == ("norm_add_norm", True)
    assert first["matches"] == answer["before"]["ops"]["attention"] * 2
    assert answer["after"]["ops"]["norm_add_norm"] == first["matches"]
    assert others


def test_executors_take_it_and_refuse_what_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--ops adds the operator's pass before the others; a module without operators is an error that names the flag."""
    monkeypatch.syspath_prepend(str(ROOT))
    model = make_llama(tmp_path / "model")
    prepare(str(model))
    settings = ExecutorSettings(model=str(model), dtype="float32", ops="examples.own_op", passes="all,-views")
    load = plan_load(settings, Stages())
    names = [each.name for each in load.passes]
    assert names[:2] == ["norm_add_norm", "merge_qkv"]
    assert "views" not in names
    with pytest.raises(SettingsError, match=r"--ops json: json has no list OPS of CustomOp"):
        plan_load(ExecutorSettings(model=str(model), ops="json"), Stages())
    with pytest.raises(SettingsError, match=r"--passes fuse_it: .*merge_qkv"):
        plan_load(ExecutorSettings(model=str(model), passes="fuse_it"), Stages())
