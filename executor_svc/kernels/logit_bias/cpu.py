"""Logit bias by the compiled kernel, see logit_bias.cpp."""

from __future__ import annotations

from torch import Tensor

from executor_svc.kernels.logit_bias import AddLogitBias
from executor_svc.kernels.native.library import ADDRESS, INT64, NativeLibrary


def make_add_logit_bias(library: NativeLibrary) -> AddLogitBias:
    """Make the op."""
    add = library.function("octavo_add_logit_bias", ADDRESS, INT64, INT64, *[ADDRESS] * 4)

    def add_logit_bias(logits: Tensor, *, token_ids: Tensor, values: Tensor, begins: Tensor, ends: Tensor) -> None:
        if not logits.is_contiguous():
            raise ValueError("logits are changed in place, and must be contiguous")
        held = [each.contiguous() for each in (token_ids, values, begins, ends)]
        add(logits.data_ptr(), *logits.shape, *[each.data_ptr() for each in held])

    return add_logit_bias
