"""Weights that are there already, as parameters of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executor_svc.graph.weights import LinearWeight
from executor_svc.kernels import KernelSet


@dataclass(frozen=True, eq=False)
class TensorLinear:
    """A linear layer's tensors: weight [out_features, in_features], or a view that is so, and bias [out_features]."""

    weight: Tensor
    bias: Tensor | None

    @property
    def out_features(self) -> int:
        """See LinearWeight."""
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        """See LinearWeight."""
        return self.weight.shape[1]

    def merged(self, others: Sequence[LinearWeight]) -> TensorLinear | None:
        """See LinearWeight. The tensors are copied: a layer has little of a model's memory."""
        layers = [self, *(other for other in others if isinstance(other, TensorLinear))]
        alike = {(each.in_features, each.bias is None, each.weight.dtype) for each in layers}
        if len(layers) <= len(others) or len(alike) > 1:
            return None
        biases = [each.bias for each in layers if each.bias is not None]
        return TensorLinear(torch.cat([each.weight for each in layers]), torch.cat(biases) if biases else None)


def pack(parameters: dict[str, Any], kernels: KernelSet) -> dict[str, Any]:
    """Pack the linear layers among a graph's parameters; the others are as they are."""
    return {
        name: kernels.pack_linear(value.weight.detach(), None if value.bias is None else value.bias.detach())
        if isinstance(value, TensorLinear)
        else value.detach()
        for name, value in parameters.items()
    }
