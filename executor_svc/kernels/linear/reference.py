"""Linear, plain."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ReferenceLinear:
    """The weight as the checkpoint has it."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:  # noqa: D102 - the contract is Linear's
        return F.linear(x, self.weight, self.bias)

    def logits(self, x: Tensor) -> Tensor:  # noqa: D102 - the contract is Linear's
        return self(x).float()

    def weight_rows(self, indices: Tensor) -> Tensor:  # noqa: D102 - the contract is Linear's
        return F.embedding(indices, self.weight)


def pack_linear(weight: Tensor, bias: Tensor | None) -> ReferenceLinear:
    """See PackLinear. Nothing to pack: the weight is shared."""
    return ReferenceLinear(weight, bias)
