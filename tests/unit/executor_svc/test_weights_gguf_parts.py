"""GGUF models in several files: one model, and every way in which the parts can fail to be one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_families import GGUF_FAMILIES

from executor_svc.inspection.export import export
from executor_svc.inspection.model_report import Question, report_on
from executor_svc.weights import ModelLoadError, open_checkpoint
from octavo.models import ModelError, open_prepared
from octavo.models.prepare import prepare

NAME = "tiny-{:05d}-of-00003.gguf"


@pytest.fixture(scope="module", name="made")
def _made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One model whole and in three parts, the first of which has no tensor."""
    folder = tmp_path_factory.mktemp("parts")
    family = GGUF_FAMILIES["llama"]
    model = family.make(folder / "model")
    whole = family.write(model, folder / "whole.gguf", quantization="Q8_0")
    family.write(
        model, folder / "tiny.gguf", quantization="Q8_0", split={"split_max_tensors": 12, "small_first_shard": True}
    )
    assert sorted(path.name for path in folder.glob("tiny-*")) == [NAME.format(number) for number in (1, 2, 3)]
    return whole, folder / NAME.format(1)


@pytest.fixture(name="first")
def _first(made: tuple[Path, Path], tmp_path: Path) -> Path:
    """The first of three parts that a test may damage."""
    for number in (1, 2, 3):
        shutil.copy(made[1].with_name(NAME.format(number)), tmp_path)
    return tmp_path / NAME.format(1)


def test_parts_are_one_model(made: tuple[Path, Path]) -> None:
    """The same tensors, bit for bit, and the same config as in one file."""
    whole, parts = (open_checkpoint(path) for path in made)
    assert parts.config == whole.config
    assert dict(parts.shapes) == dict(whole.shapes)
    for name, shape in whole.shapes.items():
        expected, found = torch.empty(shape), torch.empty(shape)
        whole.copy_to(name, expected)
        parts.copy_to(name, found)
        assert torch.equal(found, expected), name


def test_parts_are_prepared_inspected_and_exported(first: Path, tmp_path: Path) -> None:
    """All of them belong to the model, its size, what is missing later; its name has no number."""
    prepare(str(first))
    model = open_prepared(str(first))
    assert (model.name, model.weights) == ("tiny", first)
    report = report_on(Question(str(first)))
    assert report["ok"], report["checks"]
    assert report["file_bytes"] == sum(path.stat().st_size for path in tmp_path.glob("tiny-*.gguf"))
    export(first, tmp_path / "exported", "float32")
    assert open_checkpoint(tmp_path / "exported").shapes == open_checkpoint(first).shapes
    first.with_name(NAME.format(3)).unlink()
    with pytest.raises(ModelError, match=r"tiny-00003-of-00003\.gguf is missing"):
        model.check_weights()


def _swap(first: Path) -> None:
    second, third = (first.with_name(NAME.format(number)) for number in (2, 3))
    second.rename(first.with_name("x"))
    third.rename(second)
    first.with_name("x").rename(third)


def _cut(first: Path) -> None:
    third = first.with_name(NAME.format(3))
    third.write_bytes(third.read_bytes()[:-40])


def _twice(first: Path) -> None:
    second, third = (first.with_name(NAME.format(number)) for number in (2, 3))
    data = bytearray(second.read_bytes())
    # Part 2's bytes, but for the two that say so.
    at = data.index(b"split.no") + len(b"split.no") + 4
    data[at : at + 2] = (2).to_bytes(2, "little")
    third.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda first: first.with_name(NAME.format(2)).unlink(), r"tiny-00002-of-00003\.gguf are missing beside it"),
        (_swap, r"tiny-00002-of-00003\.gguf says that it is part 3 of 3, not 2 of 3"),
        (_cut, r"tiny-00003-of-00003\.gguf: tensor .* ends past the file, which is incomplete"),
        (_twice, r"tiny-00003-of-00003\.gguf: tensor .* is there twice|have \d+ tensors, not 21"),
        (lambda first: first.with_name(NAME.format(3)).write_bytes(b"GGUF"), r"tiny-00003-of-00003\.gguf is damaged"),
    ],
    ids=["missing", "in each other's place", "cut", "twice", "no header"],
)
def test_faults_of_parts_are_named(first: Path, damage: Any, message: str) -> None:
    """Each is an error that names the part, before anything is loaded."""
    damage(first)
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(first)


def test_the_first_part_is_asked_for(first: Path) -> None:
    """Another part says which file to give, one of another name how they must be called."""
    with pytest.raises(ModelError, match=r"is part 2 of 3: give the first, tiny-00001-of-00003\.gguf"):
        prepare(str(first.with_name(NAME.format(2))))
    with pytest.raises(ModelError, match=r"is part 1 of 3: the parts must have the names .*NAME-00001-of-00003\.gguf"):
        prepare(str(first.rename(first.with_name("other.gguf"))))
