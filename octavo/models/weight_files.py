"""Which files of a Hugging Face folder hold its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from octavo.models.errors import ModelError
from octavo.models.lfs_pointer import check_no_pointer

INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_NAME = "model.safetensors"
TORCH_INDEX_NAME = "pytorch_model.bin.index.json"
TORCH_NAME = "pytorch_model.bin"


@dataclass(frozen=True)
class WeightFiles:
    """The files, in order of their names. `index` says of each tensor in which of them it is; empty without an index.

    `is_pickle`: they are PyTorch's, not safetensors.
    """

    paths: tuple[Path, ...]
    is_pickle: bool = False
    index: Mapping[str, str] = field(default_factory=dict)


def find_weight_files(folder: Path, *, allow_pickle: bool = False) -> WeightFiles:
    """Return the files that the index names; without one model.safetensors; without that every safetensors file.

    A folder may hold the same weights under another name and in other words beside these. PyTorch's files are taken
    only with `allow_pickle`, and where there is no safetensors file. Raises ModelError where there is none, where one
    that the index names is missing, or where there are pointers to them.
    """
    files = _find(folder, allow_pickle=allow_pickle)
    for path in files.paths:
        check_no_pointer(path)
    return files


def _find(folder: Path, *, allow_pickle: bool) -> WeightFiles:
    if (folder / INDEX_NAME).is_file():
        return _indexed(folder / INDEX_NAME, is_pickle=False)
    if (folder / WEIGHTS_NAME).is_file():
        return WeightFiles((folder / WEIGHTS_NAME,))
    if found := sorted(folder.glob("*.safetensors")):
        return WeightFiles(tuple(found))
    pickles = [name for name in (TORCH_INDEX_NAME, TORCH_NAME) if (folder / name).is_file()]
    if not pickles:
        raise ModelError(f"{folder} holds no .safetensors file: Octavo reads safetensors and GGUF weights")
    if not allow_pickle:
        raise ModelError(
            f"{folder} holds no .safetensors file, and its {TORCH_NAME} is a pickle, which is read only when asked "
            "for: run `octavo prepare --allow-pickle` on it (tensors alone are taken and no code is run), or get the "
            "model as safetensors"
        )
    if pickles[0] == TORCH_INDEX_NAME:
        return _indexed(folder / TORCH_INDEX_NAME, is_pickle=True)
    return WeightFiles((folder / TORCH_NAME,), is_pickle=True)


def _indexed(index: Path, *, is_pickle: bool) -> WeightFiles:
    check_no_pointer(index)
    try:
        document = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {index}: {error}") from None
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} is damaged (no weight_map): fetch the model again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or PurePath(name).name != name:
            raise ModelError(f"{index}: tensor {tensor} is said to be in {name!r}, which is no file of this folder")
    paths = tuple(index.parent / name for name in sorted(set(weight_map.values())))
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ModelError(f"{index.parent} lacks {', '.join(missing)}, which {index.name} names: fetch the model again")
    return WeightFiles(paths, is_pickle, weight_map)
