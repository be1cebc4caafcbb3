"""Whether what the model computed can be used."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def finite_rows(values: Tensor) -> npt.NDArray[np.bool_]:
    """Whether every number of each row of [N, M] is finite, bool [N]."""
    # A finite sum proves finite terms at a fraction of the cost. A sum can overflow without them: then each term is
    # looked at.
    finite = torch.isfinite(values.sum(dim=-1, dtype=torch.float32))
    if not bool(finite.all()):
        doubtful = (~finite).nonzero()[:, 0]
        finite[doubtful] = torch.isfinite(values[doubtful]).all(dim=-1)
    return finite.numpy()
