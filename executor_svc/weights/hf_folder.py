"""Hugging Face folders: config.json with one or many files of weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any, Protocol

from torch import Tensor

from executor_svc.weights.errors import ModelLoadError, WeightsError
from executor_svc.weights.safetensors_file import SafetensorsFile
from executor_svc.weights.torch_file import TorchFile

INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_NAME = "model.safetensors"
TORCH_INDEX_NAME = "pytorch_model.bin.index.json"
TORCH_NAME = "pytorch_model.bin"


class WeightFile(Protocol):
    """An open file of tensors."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name."""

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Element type of every tensor that cannot be copied, by name."""

    def copy_to(self, name: str, out: Tensor) -> None:
        """Fill `out`, of the tensor's shape and any float dtype and device."""


class HfFolder:
    """An open folder. Tensors are mapped, not read, until they are copied."""

    def __init__(self, path: Path, *, allow_pickle: bool = False) -> None:
        """Open the config and every weight file's header. Raises ModelLoadError where one is missing or damaged.

        `allow_pickle`: take PyTorch's files where there is no safetensors file.
        """
        self.path = path
        self.config: Mapping[str, Any] = _read_json(path / "config.json")
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.unreadable: dict[str, str] = {}
        self._files: dict[str, WeightFile] = {}
        paths, weight_map, open_file = _find_weights(path, allow_pickle)
        for file in paths:
            self._add(file, open_file(file))
        for name, file_name in weight_map.items():
            if name not in self.shapes:
                raise WeightsError(f"{path / file_name} lacks tensor {name}, which the index says is there")

    def copy_to(self, name: str, out: Tensor) -> None:
        """See Checkpoint."""
        self._files[name].copy_to(name, out)

    def _add(self, path: Path, file: WeightFile) -> None:
        for name, shape in file.shapes.items():
            if name in self._files:
                raise WeightsError(f"{path}: tensor {name} is in another file too")
            self._files[name] = file
            self.shapes[name] = shape
        for name, kind in file.unreadable.items():
            self.unreadable[name] = f"{path}: tensor {name} is {kind}; supported: F32, F16, BF16"


def _find_weights(
    folder: Path, allow_pickle: bool
) -> tuple[list[Path], Mapping[str, str], Callable[[Path], WeightFile]]:
    """Return the files that the index names; without one model.safetensors; without that every safetensors file.

    A folder may hold the same weights under another name and in other words beside these. Beside the files: what the
    index says of each tensor, and what opens a file.
    """
    for index, single, open_file in (
        (INDEX_NAME, WEIGHTS_NAME, SafetensorsFile),
        (TORCH_INDEX_NAME, TORCH_NAME, TorchFile),
    ):
        is_pickle = open_file is TorchFile
        if not is_pickle or allow_pickle:
            if (folder / index).is_file():
                weight_map = _read_weight_map(folder / index)
                return [folder / name for name in sorted(set(weight_map.values()))], weight_map, open_file
            if (folder / single).is_file():
                return [folder / single], {}, open_file
        if not is_pickle and (found := sorted(folder.glob("*.safetensors"))):
            return found, {}, open_file
    if not allow_pickle and ((folder / TORCH_INDEX_NAME).is_file() or (folder / TORCH_NAME).is_file()):
        raise WeightsError(
            f"{folder} holds no .safetensors file, and its {TORCH_NAME} is a pickle, which is read only when asked for: "
            "prepare the model with `octavo prepare --allow-pickle`, or get it as safetensors"
        )
    raise WeightsError(f"{folder} holds no .safetensors file")


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{index} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or PurePath(file).name != file:
            raise WeightsError(f"{index}: tensor {name} is said to be in {file!r}, which is no file of this folder")
    return weight_map


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from None
    if not isinstance(document, dict):
        raise ModelLoadError(f"{path} holds no JSON object")
    return document
