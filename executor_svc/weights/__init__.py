"""Models on disk, opened for loading."""

from __future__ import annotations

from pathlib import Path

from executor_svc.weights.checkpoint import Checkpoint, check_tensors
from executor_svc.weights.errors import ModelLoadError, UnsupportedModelError, WeightsError

__all__ = ["Checkpoint", "ModelLoadError", "UnsupportedModelError", "WeightsError", "check_tensors", "open_checkpoint"]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file or a Hugging Face folder. Raises ModelLoadError where it cannot be read."""
    if path.is_dir():
        from executor_svc.weights.hf_folder import HfFolder

        return HfFolder(path)
    from executor_svc.weights.gguf_checkpoint import GgufCheckpoint

    return GgufCheckpoint(path)
