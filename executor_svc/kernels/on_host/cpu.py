"""Work on the host in the middle of a recorded step: the program calls back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from executor_svc.kernels.native.library import ADDRESS, INT64, NativeLibrary
from executor_svc.kernels.on_host import HostFunction, OnHost

_DTYPES = (torch.float32, torch.bfloat16)


def make_on_host(library: NativeLibrary) -> OnHost:
    """Make the op."""

    def on_host(function: Callable[[Tensor], None]) -> HostFunction:
        def call(address: int, rows: int, width: int, dtype: int) -> None:
            kind = _DTYPES[dtype]
            memory = (ctypes.c_char * (rows * width * kind.itemsize)).from_address(address)
            function(torch.frombuffer(memory, dtype=kind).view(rows, width))

        compute = library.host_function("on_host", call, ADDRESS, INT64, INT64, INT64)

        def run(x: Tensor) -> Tensor:
            if not x.is_contiguous():
                raise ValueError("what is changed in place must be contiguous")
            compute(x.data_ptr(), *x.shape, _DTYPES.index(x.dtype))
            return x

        return run

    return on_host
