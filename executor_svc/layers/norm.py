"""A norm's weights, bound to the kernel set's ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from executor_svc.kernels import KernelSet


@dataclass(frozen=True)
class Norm:
    """A norm of [T, hidden], alone and behind a residual add."""

    alone: Callable[[Tensor], Tensor]
    """Takes x and gives a new tensor; x is not changed."""
    add: Callable[[Tensor, Tensor], Tensor]
    """Takes x and the residual, adds x to the residual IN PLACE and gives the norm of the sum."""


def _same(x: Tensor) -> Tensor:
    return x


def no_norm(kernels: KernelSet) -> Norm:
    """Bind what stands where a layer has none: it gives x itself, and the residual itself."""
    return Norm(_same, kernels.add_to)


def rms_norm(kernels: KernelSet, weight: Tensor, eps: float) -> Norm:
    """Bind an RMSNorm."""
    return Norm(
        partial(kernels.rms_norm, weight=weight, eps=eps), partial(kernels.add_rms_norm, weight=weight, eps=eps)
    )


def layer_norm(kernels: KernelSet, weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
    """Bind a LayerNorm."""
    return Norm(
        partial(kernels.layer_norm, weight=weight, bias=bias, eps=eps),
        partial(kernels.add_layer_norm, weight=weight, bias=bias, eps=eps),
    )
