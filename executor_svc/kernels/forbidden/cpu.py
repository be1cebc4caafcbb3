"""Forbidden tokens by the compiled kernel, see forbidden.cpp."""

from __future__ import annotations

from torch import Tensor

from executor_svc.kernels.forbidden import ForbidTokens
from executor_svc.kernels.native.library import ADDRESS, INT64, NativeLibrary


def make_forbid_tokens(library: NativeLibrary) -> ForbidTokens:
    """Make the op."""
    forbid = library.function("octavo_forbid_tokens", ADDRESS, INT64, INT64, *[ADDRESS] * 3)

    def forbid_tokens(logits: Tensor, *, token_ids: Tensor, begins: Tensor, ends: Tensor) -> None:
        if not logits.is_contiguous():
            raise ValueError("logits are changed in place, and must be contiguous")
        held = [each.contiguous() for each in (token_ids, begins, ends)]
        forbid(logits.data_ptr(), *logits.shape, *[each.data_ptr() for each in held])

    return forbid_tokens
