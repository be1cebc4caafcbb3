"""From the tensors of a checkpoint to the parameters of layers, a few tensors at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from math import prod

import torch
from torch import Tensor

from executor_svc.kernels import KernelSet
from executor_svc.kernels.linear import Linear
from executor_svc.models.spec import LinearSpec, NormSpec, Part, PositionsSpec, Range
from executor_svc.weights import Checkpoint, Region
from executor_svc.weights.finite import check_finite
from executor_svc.weights.load_memory import LoadMemory, empty

Progress = Callable[[int, int], None]
"""Takes the elements loaded so far, and those of the whole model. Called from the threads that load, one at a time."""


class Counter:
    """Adds up what the threads have loaded."""

    def __init__(self, shapes: Iterable[tuple[int, ...]], progress: Progress | None) -> None:
        self.total = sum(map(prod, shapes))
        """Elements of the whole model."""
        self._done = 0
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, num_elements: int) -> None:
        """Count what is loaded."""
        with self._lock:
            self._done += num_elements
            if self._progress is not None:
                self._progress(self._done, self.total)


class Parameters:
    """Reads and packs parameters. Several threads may ask for different ones at a time."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, kernels: KernelSet, counter: Counter
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._kernels = kernels
        self._counter = counter
        self._memory = LoadMemory(counter.total * dtype.itemsize)

    def linear(self, spec: LinearSpec) -> Linear:
        """Read a linear layer's parts into one weight, and pack it."""
        with self._memory.packing(spec.out_features * spec.in_features * self._dtype.itemsize):
            return self._linear(spec)

    def _linear(self, spec: LinearSpec) -> Linear:
        weight = self._empty(spec.out_features, spec.in_features)
        bias = self._empty(spec.out_features) if spec.bias else None
        start = 0
        for part in spec.parts:
            rows = slice(start, start + part.rows)
            self._fill_part(part, f"{part.name}.weight", weight[rows], spec.taken)
            if bias is not None:
                self._fill_part(part, f"{part.name}.bias", bias[rows])
            start += part.rows
        return self._kernels.pack_linear(weight, bias)

    def norm(self, spec: NormSpec, *, add_one: bool = False) -> tuple[Tensor, Tensor | None]:
        """Read a norm's weight, plus 1 where asked for, and its bias; without tensors of its own the weight is 1."""
        weight = torch.ones(spec.size, dtype=self._dtype, device=self._device)
        if spec.weight:
            # The sum is rounded once: what is added to 1 is small.
            exact = torch.empty(spec.size, dtype=torch.float32, device=self._device)
            self._fill(f"{spec.name}.weight", exact, spec.taken)
            weight = (exact + 1 if add_one else exact).to(self._dtype)
        bias = None
        if spec.bias:
            bias = self._empty(spec.size)
            self._fill(f"{spec.name}.bias", bias, spec.taken)
        return weight, bias

    def table(self, spec: PositionsSpec) -> Tensor:
        """Read a table of positions, [positions, hidden]."""
        table = self._empty(spec.rows, spec.size)
        self._fill(f"{spec.name}.weight", table)
        return table[spec.offset :]

    def _fill_part(self, part: Part, name: str, out: Tensor, columns: Range | None = None) -> None:
        """Fill the rows of one part: `out` is [rows, in_features] or, for a bias, [rows]."""
        if not part.taken:
            self._fill_rows(part, name, out, None, columns)
        start = 0
        for first, last in part.taken:
            stop = start + last - first
            self._fill_rows(part, name, out[start:stop], (first, last), columns)
            start = stop

    def _fill_rows(self, part: Part, name: str, out: Tensor, rows: Range | None, columns: Range | None) -> None:
        if part.interleaved_head_dim:
            scratch = self._empty(*out.shape)
            self._fill(name, scratch, rows, columns)
            by_head = scratch.view(-1, 3, part.interleaved_head_dim, *out.shape[1:])
            out.view(3, -1, *by_head.shape[2:]).copy_(by_head.transpose(0, 1))
        elif part.pairs is not None:
            size, turning = part.pairs.head_dim, part.pairs.rotary_dim
            scratch = self._empty(*out.shape)
            self._fill(name, scratch, rows, columns)
            heads, wanted = scratch.view(-1, size, *out.shape[1:]), out.view(-1, size, *out.shape[1:])
            wanted[:, : turning // 2] = heads[:, 0:turning:2]
            wanted[:, turning // 2 : turning] = heads[:, 1:turning:2]
            wanted[:, turning:] = heads[:, turning:]
        elif part.transposed and out.dim() == 2:
            # In the file's layout first: a format may not know how to fill a transposed tensor.
            scratch = self._empty(*reversed(out.shape))
            self._fill(name, scratch, columns, rows)
            out.copy_(scratch.T)
        else:
            self._fill(name, out, rows, columns)

    def _fill(self, name: str, out: Tensor, rows: Range | None = None, columns: Range | None = None) -> None:
        if rows is None and columns is None:
            self._checkpoint.copy_to(name, out)
        else:
            self._checkpoint.copy_to(name, out, Region(rows, columns))
        check_finite(self._checkpoint.file_of(name), name, out)
        self._counter.add(out.numel())

    def _empty(self, *shape: int) -> Tensor:
        return empty(shape, self._dtype, self._device)
