"""The GPUs that kernels are compiled for ahead of time, without one."""

from __future__ import annotations

from dataclasses import dataclass

from triton.backends.compiler import GPUTarget

from executor_svc.kernels.gpu import Gpu


@dataclass(frozen=True)
class Target:
    """An architecture, and a card of it."""

    target: GPUTarget
    gpu: Gpu


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), Gpu("A100", processors=108, shared_bytes=166_912)),
    "sm_90": Target(GPUTarget("cuda", 90, 32), Gpu("H100", processors=132, shared_bytes=232_448)),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), Gpu("MI300X", processors=304, shared_bytes=65_536)),
}
