"""Counting what tensors take: each storage that is made in a call, from when it is there until its last tensor goes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Counter(TorchFunctionMode):
    """Counts storages by the tensors of Python that hold them: the ops here make theirs by torch.empty."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._tensors: dict[int, int] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor):
                self._add(each, is_new=func.__name__ in ("empty", "empty_like", "new_empty"))
        return result

    def _add(self, tensor: Tensor, *, is_new: bool) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self._tensors:
            if not is_new or not size:
                return
            self._tensors[address] = 0
            self.held += size
            self.peak = max(self.peak, self.held)
        self._tensors[address] += 1
        weakref.finalize(tensor, self._remove, address, size)

    def _remove(self, address: int, size: int) -> None:
        self._tensors[address] -= 1
        if not self._tensors[address]:
            del self._tensors[address]
            self.held -= size


def peak_of(run: Callable[[], Tensor]) -> int:
    """Return the most bytes that a call held at once in tensors that it made."""
    with _Counter() as counter:
        result = run()
    del result
    return counter.peak
