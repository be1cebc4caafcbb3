"""The ranks' sums and gathers, by torch.distributed."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from executor_svc.parallel.share import Share

PATIENCE = timedelta(days=1)
"""How long a collective waits for the other ranks. A rank that is lost is found otherwise, and at once."""


class _Work(Protocol):
    def wait(self) -> bool: ...


class _Collectives(Protocol):
    """What torch's process groups have, whatever carries them; torch's own stubs lack it."""

    def allreduce(self, tensor: Tensor, op: object) -> _Work: ...

    def allgather(self, output_tensors: list[Tensor], input_tensor: Tensor) -> _Work: ...

    def gather(self, output_tensors: list[Tensor], input_tensor: Tensor, root: int) -> _Work: ...


class Group:
    """Collectives on the CPU. Every rank calls the same ones in the same order; RuntimeError where one is gone."""

    def __init__(self, store: Store, share: Share, *, in_order: bool) -> None:
        """Connect the ranks; returns when all have. `in_order`: sums must not depend on how much is summed at once."""
        self.share = share
        self._process_group = cast(_Collectives, dist.ProcessGroupGloo(store, share.rank, share.size, PATIENCE))
        # Of two terms there is one sum. With more, the order of an all-reduce differs from element to element.
        self._in_order = in_order and share.size > 2

    def sum(self, x: Tensor) -> None:
        """Make x, contiguous, the sum over all ranks, IN PLACE: the same bits on each of them."""
        if not self._in_order:
            self._process_group.allreduce(x, dist.ReduceOp.SUM).wait()
            return
        terms = [torch.empty_like(x) for _ in range(self.share.size)]
        self._process_group.allgather(terms, x).wait()
        total = terms[0].float()
        for term in terms[1:]:
            total += term
        x.copy_(total)

    def gather(self, x: Tensor) -> list[Tensor]:
        """Give rank 0 every rank's x, in the order of ranks; the others get nothing. All are of one shape."""
        parts = [torch.empty_like(x) for _ in range(self.share.size)] if self.share.rank == 0 else []
        self._process_group.gather(parts, x.contiguous(), 0).wait()
        return parts

    def least(self, value: int) -> int:
        """Return the least of all ranks' values."""
        least = torch.tensor([value])
        self._process_group.allreduce(least, dist.ReduceOp.MIN).wait()
        return int(least)
