"""Sampling by the compiled kernel, see sampling.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.kernels.native.library import ADDRESS, INT64, NativeLibrary
from executor_svc.kernels.sampling import MAX_VOCAB, SampleTokens


def make_sample_tokens(library: NativeLibrary) -> SampleTokens:
    """Make the op."""
    sample = library.function("octavo_sample_tokens", ADDRESS, INT64, INT64, *[ADDRESS] * 7)

    def sample_tokens(
        logits: Tensor,
        *,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        typical_p: Tensor,
        uniform: Tensor,
    ) -> Tensor:
        if logits.shape[1] >= MAX_VOCAB:
            raise ValueError(f"a vocabulary of {logits.shape[1]} tokens; sampling takes fewer than {MAX_VOCAB}")
        logits = logits.contiguous()
        columns = [each.contiguous() for each in (temperature, top_k, top_p, min_p, typical_p, uniform)]
        tokens = torch.empty(len(logits), dtype=torch.int64)
        sample(logits.data_ptr(), *logits.shape, *(each.data_ptr() for each in columns), tokens.data_ptr())
        return tokens

    return sample_tokens
