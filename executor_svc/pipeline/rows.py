"""The host's side of a step's inputs: which rows run, where their tokens lie, and their columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from executor_svc.pipeline.columns import PARAMETERS, HostColumns
from executor_svc.pipeline.tables import DeviceTables
from executor_svc.row_layout import token_places
from executor_svc.sequence_state import SequenceTable

Ints = npt.NDArray[np.int64]


class StepRows:
    """The R rows of a step that run, T tokens in all, N rows at their sequence's end. Made before the step counts."""

    def __init__(
        self,
        table: SequenceTable,
        block_size: int,
        rows: Ints,
        slots: Ints,
        scheduled: Ints,
        num_new_blocks: Sequence[int],
    ) -> None:
        """`rows`, slots, scheduled: see InputBatchBuilder.check; num_new_blocks: of every row of the batch."""
        self.rows, self.slots, self.scheduled = rows, slots, scheduled
        self.query_start, self.context_lens, row_of, self._positions, self._slot_mapping = token_places(
            table.block_tables, slots, table.num_computed_tokens[slots], scheduled, block_size
        )
        self._token_slots = slots[row_of]
        self.sampling: Ints = np.flatnonzero(self.context_lens == table.num_tokens[slots])
        """int64 [N]: which of the R sample."""
        self.sample_slots = slots[self.sampling]
        """int64 [N]."""
        self.places = table.num_tokens[self.sample_slots]
        """int64 [N]: indices in their sequences that the drawn tokens will have."""
        self.patch_at, self.patch_block = self._patches(table, num_new_blocks)
        """int64 [P] and int32 [P]: places in the device's block tables, and the blocks that go there."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self._positions)

    @property
    def is_decode(self) -> bool:
        """Whether each row is one token and samples."""
        return len(self.sampling) == len(self.rows) == self.num_tokens

    def write(self, host: HostColumns, parameters: npt.NDArray[np.void], tables: DeviceTables) -> None:
        """Write the columns, and where these have room for more rows those of nobody. parameters: see SamplerState."""
        num_rows, num_sampling, num_tokens = len(self.rows), len(self.sampling), self.num_tokens
        length = tables.max_model_len
        host["slots"][:num_rows] = self.slots
        host["context_lens"][:num_rows] = self.context_lens
        host["query_start"][: num_rows + 1] = self.query_start
        host["positions"][:num_tokens] = self._positions
        host["slot_mapping"][:num_tokens] = self._slot_mapping
        host["token_at"][:num_tokens] = self._token_slots * length + self._positions
        host["last_tokens"][:num_sampling] = self.query_start[1:][self.sampling] - 1
        host["sample_slots"][:num_sampling] = self.sample_slots
        host["sample_at"][:num_sampling] = self.sample_slots * length + self.places
        host["sample_positions"][:num_sampling] = self.places
        own = parameters[self.sample_slots]
        for name in PARAMETERS:
            host[name][:num_sampling] = own[name]
        num_patches = len(self.patch_at)
        host["patch_at"][:num_patches] = self.patch_at
        host["patch_block"][:num_patches] = self.patch_block
        write_nobody(host, tables, num_rows, num_patches)

    def _patches(self, table: SequenceTable, num_new_blocks: Sequence[int]) -> tuple[Ints, npt.NDArray[np.int32]]:
        counts = np.array(num_new_blocks, dtype=np.int64)[self.rows]
        width = table.block_tables.shape[1]
        places, blocks = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int32)]
        for index in np.flatnonzero(counts).tolist():
            slot = self.slots[index]
            end = table.num_blocks[slot]
            part = np.arange(end - counts[index], end)
            places.append(slot * width + part)
            blocks.append(table.block_tables[slot, part])
        return np.concatenate(places), np.concatenate(blocks)


def write_nobody(host: HostColumns, tables: DeviceTables, num_rows: int, num_patches: int) -> None:
    """Write what stands behind the rows of a step: patches of nobody's blocks, and rows of nobody.

    Such a row is one token at position 0, which writes to the null block, reads what it wrote, and is drawn greedily.
    Where there are any, each row of the step is one token and samples.
    """
    host["patch_at"][num_patches:] = tables.nobody * tables.width
    host["patch_block"][num_patches:] = 0
    all_rows = len(host["slots"])
    if num_rows == all_rows:
        return
    nobody_token = tables.nobody * tables.max_model_len
    host["query_start"][num_rows:] = np.arange(num_rows, all_rows + 1)
    host["last_tokens"][num_rows:] = np.arange(num_rows, all_rows)
    values = {"slots": tables.nobody, "context_lens": 1, "token_at": nobody_token}
    values |= {"sample_slots": tables.nobody, "sample_at": nobody_token}
    zeros = dict.fromkeys(("positions", "slot_mapping", "sample_positions", *PARAMETERS), 0)
    for name, value in (values | zeros).items():
        host[name][num_rows:] = value
