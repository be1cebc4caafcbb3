"""One PyTorch file (`.bin`): a pickle, of which only plain tensors are taken, and no code is run."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor_svc.weights.checkpoint import Region
from executor_svc.weights.errors import WeightsError

_FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


class TorchFile:
    """An open file."""

    def __init__(self, path: Path) -> None:
        """Load by torch's weights-only reader, which makes tensors and containers and calls nothing else.

        Raises WeightsError where the file is missing or damaged, asks for more than that, or holds other things.
        """
        loaded = _load(path)
        if not isinstance(loaded, dict):
            raise WeightsError(f"{path} holds a {type(loaded).__name__}, not tensors by name")
        for name, value in loaded.items():
            if not isinstance(name, str) or not isinstance(value, Tensor):
                raise WeightsError(f"{path}: {name!r} is a {type(value).__name__}, not a tensor")
        self._tensors: dict[str, Tensor] = loaded

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Element type of every tensor that cannot be copied, by name."""
        others = {name: tensor.dtype for name, tensor in self._tensors.items() if tensor.dtype not in _FLOAT_TYPES}
        return {name: str(dtype).removeprefix("torch.") for name, dtype in others.items()}

    def copy_to(self, name: str, out: Tensor, region: Region | None = None) -> None:
        """Fill `out`, of any float dtype and device and of the shape of the tensor or of the region of it."""
        out.copy_((region or Region()).of(self._tensors[name]))


def _load(path: Path) -> Any:
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            # Files of before 2020 are no zip archives, and are read whole.
            if "mmap" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise WeightsError(f"{path} is missing") from None
    except pickle.UnpicklingError:
        raise WeightsError(
            f"{path} is no plain pickle of tensors: what else is in it is not run; get the model as safetensors"
        ) from None
    except Exception as error:  # whatever the damaged bytes lead torch, zipfile or pickle to
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise WeightsError(f"{path} is damaged or incomplete: {reason}") from None
