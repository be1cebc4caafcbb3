"""Models as they lie there after a download that went wrong: told before anything is served, file and tensor named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from factories import make_llama, make_tokenizer
from gguf_models import make_gguf
from model_variations import save_fallback
from safetensors.torch import load_file, save_file

from executor_svc.inspection.model_report import Question, report_on
from executor_svc.kernels import build_kernels
from executor_svc.models import WeightsError, load_weights
from executor_svc.models.transformers_lm import load_transformers_lm
from executor_svc.weights import open_checkpoint
from octavo.models import ModelError
from octavo.models.prepare import prepare

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * 'a'}\nsize 9000000\n"
SHARD = "model-00001-of-00002.safetensors"
CPU = torch.device("cpu")


def _to_pickle(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_text(POINTER, encoding="utf-8")


@pytest.mark.parametrize(
    "name",
    [SHARD, "model.safetensors.index.json", "config.json", "tokenizer.json", "tokenizer.model", "pytorch_model.bin"],
)
def test_a_pointer_in_the_place_of_a_file(tmp_path: Path, name: str) -> None:
    """A model that was cloned without its large files has a few lines of text in their place."""
    folder = make_llama(tmp_path / "model", num_shards=2)
    if name == "tokenizer.model":
        (folder / "tokenizer.json").unlink()
    if name == "pytorch_model.bin":
        _to_pickle(folder)
    (folder / name).write_text(POINTER, encoding="utf-8")
    with pytest.raises(ModelError, match=rf"{name} is a pointer of Git LFS .*: run `git lfs pull`"):
        prepare(str(folder), allow_pickle=True)
    report = report_on(Question(str(folder), allow_pickle=True))
    assert any(not check["ok"] and "pointer of Git LFS" in check["text"] for check in report["checks"])


def test_a_pointer_in_the_place_of_a_gguf_file(tmp_path: Path) -> None:
    """It is no GGUF file, but there is more to say."""
    path = tmp_path / "model.gguf"
    path.write_text(POINTER, encoding="utf-8")
    with pytest.raises(ModelError, match=r"model\.gguf is a pointer of Git LFS"):
        prepare(str(path))


def test_an_index_that_names_another_shard(tmp_path: Path) -> None:
    """The tensor's true file is named too."""
    folder = make_llama(tmp_path, num_shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    true = index["weight_map"]["lm_head.weight"]
    said = SHARD if true != SHARD else "model-00002-of-00002.safetensors"
    index["weight_map"]["lm_head.weight"] = said
    path.write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(WeightsError, match=rf"{said} lacks tensor lm_head\.weight.*: it is in {true}"):
        open_checkpoint(folder)


def _of_folder(path: Path, spoil: Callable[[str], None]) -> None:
    folder = make_llama(path, num_shards=2)
    spoil(SHARD)
    load_weights(folder, torch.float32, CPU, build_kernels("reference"))


def _of_gguf(path: Path, spoil: Callable[[str], None]) -> None:
    folder = make_llama(path)
    spoil("model.safetensors")
    load_weights(make_gguf(folder, path / "model.gguf"), torch.float32, CPU, build_kernels("reference"))


def _of_no_family(path: Path, spoil: Callable[[str], None]) -> None:
    save_fallback(path, "PhiConfig")
    make_tokenizer(path)
    spoil("model.safetensors")
    load_transformers_lm(path, torch.float32, CPU, build_kernels("reference"))


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("load", "file"), [(_of_folder, SHARD), (_of_gguf, "model.gguf"), (_of_no_family, "")])
def test_weights_that_are_no_numbers(
    tmp_path: Path, load: Callable[[Path, Callable[[str], None]], None], file: str, number: float
) -> None:
    """One element among all of them is enough: every output that it takes part in would be none."""
    spoilt = ""

    def spoil(shard: str) -> None:
        nonlocal spoilt
        weights = load_file(tmp_path / shard)
        spoilt = next(name for name in sorted(weights) if weights[name].dim() == 2)
        weights[spoilt][-1, -1] = number
        save_file(weights, tmp_path / shard, metadata={"format": "pt"})

    with pytest.raises(WeightsError) as raised:
        load(tmp_path, spoil)
    assert f"tensor {spoilt} has elements that are NaN or infinite" in str(raised.value)
    assert file in str(raised.value)


def test_the_largest_numbers_are_numbers(tmp_path: Path) -> None:
    """Though their sum is none."""
    folder = make_llama(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"].fill_(torch.finfo(torch.float32).max)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load_weights(folder, torch.float32, CPU, build_kernels("reference"))
