"""What decides the exact bits of an executor's output, as one hash."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence

import torch

from executor_svc.cpu_features import cpu_features


def fingerprint(
    *,
    model_revision: str,
    dtype: torch.dtype,
    kernels: str,
    passes: Sequence[str] = (),
    tensor_parallel_size: int = 1,
) -> str:
    """Give a lower-case hex sha256. Executors of equal fingerprint compute the same numbers from the same inputs.

    `kernels` is the set's build; `passes`: of the model's graph, by name: a fused op may round where others do not. The
    features libraries choose their code by, and the version of torch, are this process's own.
    """
    parts = {
        "model_revision": model_revision,
        "dtype": str(dtype).removeprefix("torch."),
        "kernels": kernels,
        "passes": list(passes),
        "tensor_parallel_size": tensor_parallel_size,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpu_features": sorted(cpu_features()),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
