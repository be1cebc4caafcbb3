"""Collectives among GPUs, by NCCL through torch.distributed, each rank on a GPU of its own."""

from __future__ import annotations

from typing import cast

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from executor_svc.parallel.group import PATIENCE, Collectives
from executor_svc.parallel.share import Share


def open_nccl(store: Store, share: Share) -> Collectives:
    """Give the collectives; the ranks find one another by the store at the first of them, which waits for all.

    That one must not be captured: it sets up what a graph then finds there. torch has been built with NCCL.
    """
    options = dist.ProcessGroupNCCL.Options()
    # A lost rank is found by its connection. What the device cannot end, the stall watch of rank 0 does.
    options._timeout = PATIENCE
    return cast(Collectives, dist.ProcessGroupNCCL(store, share.rank, share.size, options))
