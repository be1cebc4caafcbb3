"""Block tables that begin with null blocks: a stay behind a cached prefix whose beginning no layer reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fakes_executor import RecallModel, make_limits, make_runner, make_sequence

from executor_svc.attention import AttentionMetadata
from executor_svc.batch import RowStatus, StepBatch
from executor_svc.kv_cache import KVCache


class WindowModel(RecallModel):
    """Reads nothing but its own token, and never writes to the null block."""

    def forward(self, token_ids: torch.Tensor, metadata: AttentionMetadata, kv_cache: KVCache) -> torch.Tensor:
        """See CausalLM."""
        assert (metadata.slot_mapping >= kv_cache.block_size).all(), "written to the null block"
        hidden = super().forward(token_ids, replace(metadata, query_lens=()), kv_cache)
        hidden[:, :-1] = 1.0
        return hidden


@pytest.mark.parametrize(
    ("blocks", "status"),
    [
        ([0, 0, 6, 7], RowStatus.OK),
        ([4, 5, 6, 7], RowStatus.OK),
        ([0, 5, 6, 7], RowStatus.OK),
        ([0, 0, 0, 7], RowStatus.BAD_INPUT),
        ([4, 0, 6, 7], RowStatus.BAD_INPUT),
    ],
    ids=["all that passed", "none", "some", "one too many", "not from the first on"],
)
def test_null_blocks_of_a_cached_prefix(blocks: list[int], status: RowStatus) -> None:
    """With a window of 3 the token at position 12 reads from 10 on, so the blocks of 0 to 3 and 4 to 7 may be null,
    from the first on. With no window none may be.
    """
    sequence = replace(make_sequence(1, list(range(14))), num_cached_tokens=12)
    batch = StepBatch(0, 1, (), (sequence,), (1,), (2,), (12,), (4,), tuple(blocks))
    limits = replace(make_limits(), window=3)
    runner = make_runner(limits, WindowModel(limits.vocab_size))
    assert runner.run(batch).statuses == (status,)
    runner.check_invariants()
    whole = make_runner(make_limits(), WindowModel(limits.vocab_size))
    assert whole.run(batch).statuses == (RowStatus.BAD_INPUT if 0 in blocks else RowStatus.OK,)


def test_a_later_row_brings_no_null_block() -> None:
    """Only a new stay has passed blocks that are not its own."""
    limits = replace(make_limits(), window=3)
    runner = make_runner(limits, WindowModel(limits.vocab_size))
    runner.run(StepBatch(0, 1, (), (make_sequence(1, [9] * 8),), (1,), (8,), (0,), (2,), (1, 2)))
    result = runner.run(StepBatch(0, 2, (), (), (1,), (1,), (8,), (1,), (0,)))
    assert result.statuses == (RowStatus.BAD_INPUT,)
