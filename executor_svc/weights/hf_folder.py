"""Hugging Face folders: config.json with one or many files of weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from executor_svc.weights.checkpoint import Region
from executor_svc.weights.errors import ModelLoadError, WeightsError
from executor_svc.weights.safetensors_file import SafetensorsFile
from executor_svc.weights.torch_file import TorchFile
from octavo.models.errors import ModelError
from octavo.models.folder_source import read_config
from octavo.models.weight_files import find_weight_files


class WeightFile(Protocol):
    """An open file of tensors."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name."""

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Element type of every tensor that cannot be copied, by name."""

    def copy_to(self, name: str, out: Tensor, region: Region | None = None) -> None:
        """Fill `out`, of any float dtype and device and of the shape of the tensor or of the region of it."""


class HfFolder:
    """An open folder. Tensors are mapped, not read, until they are copied."""

    def __init__(self, path: Path, *, allow_pickle: bool = False) -> None:
        """Open the config and every weight file's header. Raises ModelLoadError where one is missing or damaged.

        `allow_pickle`: take PyTorch's files where there is no safetensors file.
        """
        self.path = path
        try:
            self.config: Mapping[str, Any] = read_config(path)
        except ModelError as error:
            raise ModelLoadError(str(error)) from None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.unreadable: dict[str, str] = {}
        self._files: dict[str, WeightFile] = {}
        self._paths: dict[str, Path] = {}
        try:
            files = find_weight_files(path, allow_pickle=allow_pickle)
        except ModelError as error:
            raise WeightsError(str(error)) from None
        for file in files.paths:
            self._add(file, TorchFile(file) if files.is_pickle else SafetensorsFile(file))
        for name, file_name in files.index.items():
            found = self._paths.get(name)
            if found != path / file_name:
                where = f": it is in {found.name}" if found is not None else ""
                raise WeightsError(f"{path / file_name} lacks tensor {name}, which the index says is there{where}")

    def file_of(self, name: str) -> Path:
        """See Checkpoint."""
        return self._paths[name]

    def copy_to(self, name: str, out: Tensor, region: Region | None = None) -> None:
        """See Checkpoint."""
        self._files[name].copy_to(name, out, region)

    def _add(self, path: Path, file: WeightFile) -> None:
        for name, shape in file.shapes.items():
            if name in self._files:
                raise WeightsError(f"{path}: tensor {name} is in another file too")
            self._files[name], self._paths[name] = file, path
            self.shapes[name] = shape
        for name, kind in file.unreadable.items():
            self.unreadable[name] = f"{path}: tensor {name} is {kind}; supported: F32, F16, BF16"
