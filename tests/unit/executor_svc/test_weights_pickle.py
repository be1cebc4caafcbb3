"""PyTorch's files: only when asked for, tensors alone, whatever the pickle asks for."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from factories import make_llama
from paged import PagedLoop, PagedSequence
from safetensors.torch import load_file
from torch import Tensor

from executor_svc.kernels import build_kernels
from executor_svc.models import load_model, load_weights
from executor_svc.weights import UnsupportedModelError, WeightsError, check_tensors, open_checkpoint
from octavo.models import open_prepared
from octavo.models.prepare import prepare

PROMPT = [5, 17, 200, 31, 8]
CPU = torch.device("cpu")


def _pickled(folder: Path, *, shards: int = 1, legacy: bool = False) -> Path:
    """Put a folder's weights into PyTorch's files, of two shards with an index or of one."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    if shards == 1:
        torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"pytorch_model-{shard + 1:05d}-of-{shards:05d}.bin"
        part = {name: weights[name] for name in names[shard::shards]}
        torch.save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _prompt_logits(model: object) -> Tensor:
    return PagedLoop(model).step([(PagedSequence(PROMPT), len(PROMPT))])  # type: ignore[arg-type]


@pytest.mark.parametrize("form", [{}, {"shards": 2}, {"legacy": True}], ids=["one", "shards", "of before 2020"])
def test_they_load_as_safetensors_do_once_prepared_so(tmp_path: Path, form: dict[str, int]) -> None:
    """Asked for at `octavo prepare`, they give bit for bit what the same weights give as safetensors."""
    kernels = build_kernels("cpu")
    expected = _prompt_logits(load_weights(make_llama(tmp_path / "safe"), torch.float32, CPU, kernels))
    folder = _pickled(make_llama(tmp_path / "pickled"), **form)  # type: ignore[arg-type]
    prepare(str(folder), allow_pickle=True)
    prepared = open_prepared(str(folder))
    assert prepared.is_pickled
    assert torch.equal(_prompt_logits(load_model(prepared, torch.float32, CPU, kernels)), expected)


def test_they_are_refused_unless_asked_for(tmp_path: Path) -> None:
    """The error names the file and the flag."""
    folder = _pickled(make_llama(tmp_path))
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin is a pickle.*octavo prepare --allow-pickle"):
        open_checkpoint(folder)


def test_safetensors_go_first(tmp_path: Path) -> None:
    """A folder that has both is read as safetensors, also where pickles are allowed."""
    folder = make_llama(tmp_path)
    (folder / "pytorch_model.bin").write_bytes(b"no pickle at all")
    assert open_checkpoint(folder, allow_pickle=True).shapes == open_checkpoint(folder).shapes


class _Trap:
    """Writes a file where it is unpickled without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.write_text, (self.path, "caught")


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_pickle_is_not_run(tmp_path: Path, legacy: bool) -> None:
    """A pickle that calls something is refused before it is called."""
    folder = make_llama(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    trap = tmp_path / "caught"
    torch.save({"x": _Trap(trap)}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin is no plain pickle of tensors"):
        open_checkpoint(folder, allow_pickle=True)
    assert not trap.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "pytorch_model.bin"),
        (b"\x80\x02garbage", "pytorch_model.bin"),
        (pickle.dumps([1, 2]), "pytorch_model.bin"),
    ],
    ids=["empty", "garbage", "no torch file"],
)
def test_files_that_are_none_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    """Whatever else lies there is an error with its path."""
    folder = make_llama(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(WeightsError, match=message):
        open_checkpoint(folder, allow_pickle=True)


def test_what_is_no_tensor_is_named(tmp_path: Path) -> None:
    """A list in place of the tensors, and a number among them, are errors that say so."""
    folder = make_llama(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save([torch.ones(1)], folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="holds a list, not tensors by name"):
        open_checkpoint(folder, allow_pickle=True)
    torch.save({"step": 3}, folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="'step' is a int, not a tensor"):
        open_checkpoint(folder, allow_pickle=True)


def test_integer_tensors_matter_only_where_needed(tmp_path: Path) -> None:
    """An integer mask beside the weights is nobody's business; an integer weight is refused with its name."""
    folder = make_llama(tmp_path)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights | {"mask": torch.ones(3, dtype=torch.bool)}, folder / "pytorch_model.bin")
    checkpoint = open_checkpoint(folder, allow_pickle=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    check_tensors(checkpoint, shapes, ignored={"mask"})
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin: tensor mask is bool; supported: F32"):
        check_tensors(checkpoint, shapes | {"mask": (3,)})
