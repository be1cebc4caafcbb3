"""Hugging Face folders: config.json with one or many safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from executor_svc.weights.errors import ModelLoadError, UnsupportedModelError, WeightsError

INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_NAME = "model.safetensors"
_FLOAT_TYPES = ("F32", "F16", "BF16")


class HfFolder:
    """An open folder. Tensors are mapped, not read, until they are copied."""

    def __init__(self, path: Path) -> None:
        """Open the config and every weight file's header. Raises ModelLoadError where one is missing or damaged."""
        self.path = path
        self.config: Mapping[str, Any] = _read_json(path / "config.json")
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Any] = {}
        for file in _weight_files(path):
            self._open(file)

    def copy_to(self, name: str, out: Tensor) -> None:
        """See Checkpoint."""
        out.copy_(self._files[name].get_tensor(name))

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="pt")
        except FileNotFoundError:
            raise WeightsError(f"{path} is missing") from None
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path} is damaged or incomplete: {error}") from None
        names: list[str] = file.keys()  # type: ignore[no-untyped-call]
        for name in names:
            if name in self._files:
                raise WeightsError(f"{path}: tensor {name} is in another file too")
            header = file.get_slice(name)  # type: ignore[no-untyped-call]
            if header.get_dtype() not in _FLOAT_TYPES:
                known = ", ".join(_FLOAT_TYPES)
                raise UnsupportedModelError(f"{path}: tensor {name} is {header.get_dtype()}; supported: {known}")
            self._files[name] = file
            self.shapes[name] = tuple(header.get_shape())


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that the index names; without one model.safetensors; without that every safetensors file.

    A folder may hold the same weights under another name and in other words beside these.
    """
    if (folder / INDEX_NAME).is_file():
        weight_map = _read_json(folder / INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict):
            raise WeightsError(f"{folder / INDEX_NAME} has no weight_map")
        return [folder / name for name in sorted(set(weight_map.values()))]
    if (folder / WEIGHTS_NAME).is_file():
        return [folder / WEIGHTS_NAME]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise WeightsError(f"{folder} holds no .safetensors file")
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from None
    if not isinstance(document, dict):
        raise ModelLoadError(f"{path} holds no JSON object")
    return document
