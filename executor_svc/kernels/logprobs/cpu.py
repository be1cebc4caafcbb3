"""Logprobs by the compiled kernel, see logprobs.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.kernels.logprobs import GatherLogprobs
from executor_svc.kernels.native.library import ADDRESS, INT64, NativeLibrary


def make_gather_logprobs(library: NativeLibrary) -> GatherLogprobs:
    """Make the op."""
    gather = library.function(
        "octavo_gather_logprobs", ADDRESS, INT64, INT64, ADDRESS, INT64, ADDRESS, ADDRESS, ADDRESS
    )

    def gather_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
        logits, token_ids = logits.contiguous(), token_ids.contiguous()
        rows, vocab = logits.shape
        logprobs = torch.empty(rows, dtype=torch.float32)
        top_ids = torch.empty((rows, num_top), dtype=torch.int64)
        tops = torch.empty((rows, num_top), dtype=torch.float32)
        results = (logprobs.data_ptr(), top_ids.data_ptr(), tops.data_ptr())
        gather(logits.data_ptr(), rows, vocab, token_ids.data_ptr(), num_top, *results)
        return logprobs, top_ids, tops

    return gather_logprobs
