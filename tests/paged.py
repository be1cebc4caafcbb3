"""A model driven through paged memory by hand: ragged rows, scattered blocks, memory full of NaN. No scheduler, no
sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from executor_svc.attention import AttentionMetadata
from executor_svc.kv_cache import KVCache
from executor_svc.models import LoadedModel


@dataclass
class PagedSequence:
    """Tokens, and the blocks that hold the KV of the first num_computed of them."""

    token_ids: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0


def ragged_metadata(
    rows: Sequence[tuple[Sequence[int], int, int]], block_size: int, *, device: str = "cpu"
) -> AttentionMetadata:
    """Build a step's metadata from (block ids, tokens computed before, tokens to compute) of each row."""
    positions, slots = [], []
    for blocks, computed, scheduled in rows:
        for position in range(computed, computed + scheduled):
            positions.append(position)
            slots.append(blocks[position // block_size] * block_size + position % block_size)
    query_lens = tuple(scheduled for _, _, scheduled in rows)
    context_lens = tuple(computed + scheduled for _, computed, scheduled in rows)
    width = max(-(-context // block_size) for context in context_lens)
    tables = torch.zeros(len(rows), width, dtype=torch.int32)
    for row, (blocks, _, _) in enumerate(rows):
        used = -(-context_lens[row] // block_size)
        tables[row, :used] = torch.tensor(list(blocks[:used]), dtype=torch.int32)
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    return AttentionMetadata(
        positions=torch.tensor(positions, device=device),
        slot_mapping=torch.tensor(slots, device=device),
        query_start=starts.to(torch.int32).to(device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        query_lens=query_lens,
        context_lens_host=context_lens,
    )


class PagedLoop:
    """Runs steps of chosen rows. Every slot holds NaN until it is written, the null block for ever."""

    def __init__(
        self, model: LoadedModel, *, num_blocks: int = 256, block_size: int = 16, dtype: torch.dtype = torch.float32
    ) -> None:
        self._model = model
        self._cache = KVCache.allocate(model.config, num_blocks, block_size, dtype, torch.device("cpu"))
        for tensor in (*self._cache.keys, *self._cache.values):
            tensor.fill_(torch.nan)
        self._free = (torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1)) + 1).tolist()

    def step(self, rows: Sequence[tuple[PagedSequence, int]]) -> Tensor:
        """Compute the next n tokens of each sequence; return the logits, float32, of each one's last computed token."""
        block_size = self._cache.block_size
        for sequence, scheduled in rows:
            while len(sequence.blocks) * block_size < sequence.num_computed + scheduled:
                sequence.blocks.append(self._free.pop())
        metadata = ragged_metadata([(s.blocks, s.num_computed, n) for s, n in rows], block_size)
        token_ids = [t for s, n in rows for t in s.token_ids[s.num_computed : s.num_computed + n]]
        with torch.inference_mode():
            hidden = self._model.forward(torch.tensor(token_ids), metadata, self._cache)
            logits = self._model.compute_logits(hidden[metadata.query_start[1:].long() - 1])
        for sequence, scheduled in rows:
            sequence.num_computed += scheduled
        return logits

    def poison(self, sequence: PagedSequence) -> None:
        """Turn the last computed value of a sequence into NaN, in every layer."""
        block = sequence.blocks[(sequence.num_computed - 1) // self._cache.block_size]
        for values in self._cache.values:
            values[block, (sequence.num_computed - 1) % self._cache.block_size] = torch.nan

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int, *, chunk: int) -> list[list[int]]:
        """Decode greedily, all prompts in one ragged batch, each by chunks of another size: chunk, chunk + 1, ..."""
        sequences = [PagedSequence(list(prompt)) for prompt in prompts]
        wanted = [len(prompt) + num_tokens for prompt in prompts]
        while any(len(s.token_ids) < n for s, n in zip(sequences, wanted, strict=True)):
            rows = [
                (s, min(chunk + index, len(s.token_ids) - s.num_computed))
                for index, s in enumerate(sequences)
                if len(s.token_ids) < wanted[index]
            ]
            logits = self.step(rows)
            for (sequence, _), row in zip(rows, logits, strict=True):
                if sequence.num_computed == len(sequence.token_ids):
                    sequence.token_ids.append(int(row.argmax()))
        return [s.token_ids[len(prompt) :] for s, prompt in zip(sequences, prompts, strict=True)]
