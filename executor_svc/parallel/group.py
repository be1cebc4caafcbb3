"""The ranks' sums, gathers and broadcasts, by torch.distributed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from executor_svc.parallel.share import Share

PATIENCE = timedelta(days=1)
"""How long a collective waits for the other ranks. A rank that is lost is found otherwise, and at once."""


class _Work(Protocol):
    def wait(self) -> bool: ...


class Collectives(Protocol):
    """What torch's process groups have, whatever carries them; torch's own stubs lack it.

    A device's give None where `asyncOp` is off: then they are launched on the current stream, as any of its work.
    """

    def allreduce(self, tensors: list[Tensor], opts: object) -> _Work | None:
        """See torch.distributed.all_reduce."""

    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: object) -> _Work | None:
        """See torch.distributed.all_gather."""

    def gather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: object) -> _Work | None:
        """See torch.distributed.gather."""

    def broadcast(self, tensors: list[Tensor], opts: object) -> _Work | None:
        """See torch.distributed.broadcast."""


def _reduce(op: object) -> object:
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, False  # type: ignore[assignment]
    return options


def _now(options: Any) -> object:
    options.asyncOp = False
    return options


_SUM, _LEAST, _ALLGATHER = _reduce(dist.ReduceOp.SUM), _reduce(dist.ReduceOp.MIN), _now(AllgatherOptions())
# The root of both is rank 0 unless another is set.
_GATHER, _BROADCAST = _now(dist.GatherOptions()), _now(dist.BroadcastOptions())


class Group:
    """Collectives of tensors where the model is, and of numbers on the host, which gloo carries.

    Every rank calls the same ones in the same order; RuntimeError where one is gone.
    """

    def __init__(self, store: Store, share: Share, *, in_order: bool, collectives: Collectives | None = None) -> None:
        """Connect the ranks; returns when all have. `in_order`: sums must not depend on how much is summed at once.
        `collectives`: of the device that the model is on; without them it is the CPU.
        """
        self.share = share
        self._host = cast(Collectives, dist.ProcessGroupGloo(store, share.rank, share.size, PATIENCE))
        self._collectives = self._host if collectives is None else collectives
        # Of two terms there is one sum. With more, the order of an all-reduce differs from element to element.
        self._in_order = in_order and share.size > 2

    def sum(self, x: Tensor) -> None:
        """Make x, contiguous, the sum over all ranks, IN PLACE: the same bits on each of them."""
        if not self._in_order:
            _end(self._collectives.allreduce([x], _SUM))
            return
        terms = [torch.empty_like(x) for _ in range(self.share.size)]
        _end(self._collectives.allgather([terms], [x], _ALLGATHER))
        total = terms[0].float()
        for term in terms[1:]:
            total += term
        x.copy_(total)

    def gather(self, x: Tensor) -> list[Tensor]:
        """Give rank 0 every rank's x, in the order of ranks; the others get nothing. All are of one shape."""
        parts = [torch.empty_like(x) for _ in range(self.share.size)] if self.share.rank == 0 else []
        _end(self._collectives.gather([parts] if parts else [], [x.contiguous()], _GATHER))
        return parts

    def broadcast(self, x: Tensor) -> None:
        """Make x, contiguous, what it is on rank 0, IN PLACE. All are of one shape."""
        _end(self._collectives.broadcast([x], _BROADCAST))

    def least(self, value: int) -> int:
        """Return the least of all ranks' values."""
        least = torch.tensor([value])
        _end(self._host.allreduce([least], _LEAST))
        return int(least)


def _end(work: _Work | None) -> None:
    if work is not None:
        work.wait()
