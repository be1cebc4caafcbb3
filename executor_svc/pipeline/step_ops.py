"""What a step launches, from its columns to what is fetched. No number of the host's that differs from step to step is
read here but those that come as arguments, so a graph of it can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.attention import AttentionMetadata
from executor_svc.kernels import KernelSet
from executor_svc.kv_cache import KVCache
from executor_svc.model_runner import CausalLM
from executor_svc.pipeline.columns import DeviceColumns, Layout
from executor_svc.pipeline.tables import DeviceTables


@dataclass(frozen=True)
class Computed:
    """What the model gave, on the device."""

    hidden: Tensor
    """[T, hidden]."""
    finite_tokens: Tensor
    """bool [T]: whose hidden states are."""
    logits: Tensor
    """float32 [N, vocab] of the sampling rows."""
    finite_logits: Tensor
    """bool [N]."""

    def first(self, rows: int) -> Computed:
        """Give those of the first rows, where each is one token and samples."""
        return Computed(self.hidden[:rows], self.finite_tokens[:rows], self.logits[:rows], self.finite_logits[:rows])


class StepOps:
    """Launches the parts of a step on the compute stream. The tables are the one thing that it changes."""

    def __init__(self, model: CausalLM, kv_cache: KVCache, kernels: KernelSet, tables: DeviceTables) -> None:
        self.model = model
        self._kv_cache = kv_cache
        self._kernels = kernels
        self._tables = tables

    def compute(
        self, columns: DeviceColumns, query_lens: Sequence[int], context_lens: Sequence[int] | None
    ) -> Computed:
        """Run the model over a step's tokens. context_lens: see AttentionMetadata; without it nothing of the host's is
        read, and whole rows of the block tables.
        """
        tables = self._tables
        tables.flat_block_tables.scatter_(0, columns["patch_at"], columns["patch_block"])
        width = tables.width if context_lens is None else -(-max(context_lens) // self._kv_cache.block_size)
        metadata = AttentionMetadata(
            positions=columns["positions"],
            slot_mapping=columns["slot_mapping"],
            query_start=columns["query_start"],
            context_lens=columns["context_lens"],
            block_tables=tables.block_tables[:, :width].index_select(0, columns["slots"]),
            query_lens=tuple(query_lens),
            context_lens_host=None if context_lens is None else tuple(context_lens),
        )
        token_ids = tables.flat_tokens.index_select(0, columns["token_at"]).long()
        hidden = self.model.forward(token_ids, metadata, self._kv_cache)
        logits = self.model.compute_logits(hidden.index_select(0, columns["last_tokens"]))
        return Computed(hidden, self._kernels.finite_rows(hidden), logits, self._kernels.finite_rows(logits))

    def finish(self, columns: DeviceColumns, drawn: Tensor, computed: Computed) -> Tensor:
        """Let the next step read the drawn tokens, int64 [N], and pack what the host is told; see `packed_size`."""
        self._tables.flat_tokens.scatter_(0, columns["sample_at"], drawn.int())
        return torch.cat([each.view(torch.uint8) for each in (drawn, computed.finite_tokens, computed.finite_logits)])


def packed_size(where: Layout) -> int:
    """Bytes that `finish` packs: a token as int64 and a flag for each sampling row, and a flag for each token."""
    return 9 * where.sampling + where.tokens
