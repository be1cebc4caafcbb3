"""Penalties by the compiled kernel, see penalties.cpp."""

from __future__ import annotations

from torch import Tensor

from executor_svc.kernels.native.library import ADDRESS, INT64, NativeLibrary
from executor_svc.kernels.penalties import ApplyPenalties


def make_apply_penalties(library: NativeLibrary) -> ApplyPenalties:
    """Make the op."""
    apply = library.function("octavo_apply_penalties", ADDRESS, INT64, INT64, ADDRESS, INT64, *[ADDRESS] * 6)

    def apply_penalties(
        logits: Tensor,
        *,
        tokens: Tensor,
        slots: Tensor,
        num_prompt_tokens: Tensor,
        num_tokens: Tensor,
        repetition: Tensor,
        presence: Tensor,
        frequency: Tensor,
    ) -> None:
        if not (logits.is_contiguous() and tokens.is_contiguous()):
            raise ValueError("logits are changed in place, and must be contiguous, as must be the tokens")
        columns = (slots, num_prompt_tokens, num_tokens, repetition, presence, frequency)
        held = [each.contiguous() for each in columns]
        addresses = [each.data_ptr() for each in held]
        apply(logits.data_ptr(), *logits.shape, tokens.data_ptr(), tokens.shape[1], *addresses)

    return apply_penalties
