"""Whether weights are numbers: one that is not makes every output that it takes part in none."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from executor_svc.weights.errors import WeightsError

_CHUNK = 1 << 18
"""Elements added up at once, which stay in cache."""


def check_finite(file: Path, name: str, tensor: Tensor) -> None:
    """Raise WeightsError, file and tensor named, where an element is NaN or infinite."""
    if not _is_finite(tensor):
        raise WeightsError(
            f"{file}: tensor {name} has elements that are NaN or infinite: the file is damaged, or was saved from a "
            "model that was; fetch it again, or take another copy"
        )


def _is_finite(tensor: Tensor) -> bool:
    flat = tensor.reshape(-1)
    step = _CHUNK if flat.device.type == "cpu" else max(len(flat), 1)
    for start in range(0, len(flat), step):
        part = flat[start : start + step]
        # A sum of numbers is one, but for numbers that no weight is near to.
        if not part.sum().isfinite() and not part.isfinite().all():
            return False
    return True
