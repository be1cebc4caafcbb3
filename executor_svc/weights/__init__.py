"""Models on disk, opened for loading."""

from __future__ import annotations

from pathlib import Path

from executor_svc.weights.checkpoint import Checkpoint, Region, check_tensors
from executor_svc.weights.errors import ModelLoadError, UnsupportedModelError, WeightsError

__all__ = [
    "Checkpoint",
    "ModelLoadError",
    "Region",
    "UnsupportedModelError",
    "WeightsError",
    "check_tensors",
    "open_checkpoint",
]


def open_checkpoint(path: Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Open a GGUF file or a Hugging Face folder. Raises ModelLoadError where it cannot be read.

    `allow_pickle`: take PyTorch's files of a folder that has no safetensors file.
    """
    if path.is_dir():
        from executor_svc.weights.hf_folder import HfFolder

        return HfFolder(path, allow_pickle=allow_pickle)
    from executor_svc.weights.gguf_checkpoint import GgufCheckpoint

    return GgufCheckpoint(path)
