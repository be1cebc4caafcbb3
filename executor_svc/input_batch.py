"""From a step's delta to the tensors of its forward pass, with every row checked before it can do harm."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor_svc.attention import AttentionMetadata
from executor_svc.batch import Limits, RowStatus, StepBatch
from executor_svc.kv_cache import NULL_BLOCK
from executor_svc.record_check import problem_with
from executor_svc.row_layout import RowLayout, lay_out
from executor_svc.sequence_state import ENDED, UNKNOWN, SequenceTable

logger = logging.getLogger(__name__)

_STATUSES = tuple(RowStatus)
_CODES = {status: code for code, status in enumerate(_STATUSES)}
_OK = _CODES[RowStatus.OK]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class InputBatch:
    """One step's inputs: R rows that run, of the batch's rows, and their T tokens."""

    statuses: list[RowStatus]
    """Of every row of the batch; OK for the R that run."""
    rows: Ints
    """int64 [R]: index in the batch."""
    slots: Ints
    """int64 [R]."""
    layout: RowLayout
    token_ids: Tensor
    """int64 [T]."""
    plan: Any = None
    """What the model has worked out for these rows already, see PlannedModel; None: nothing."""
    ahead: float | None = None
    """Seconds that it took to build them while the step before was computing; None: they were built in their turn."""

    @property
    def sampling(self) -> Ints:
        """int64 [N]: which of the R sample."""
        return self.layout.sampling

    @property
    def metadata(self) -> AttentionMetadata:
        """What attention must know of them."""
        return self.layout.metadata


class InputBatchBuilder:
    """Applies a step's delta to the sequence table and lays out its rows.

    A row that breaks a limit, or disagrees with the table, is left out and its stay ended; the other rows are not
    touched.
    """

    def __init__(self, table: SequenceTable, limits: Limits) -> None:
        self._table = table
        self._limits = limits

    def build(self, batch: StepBatch) -> InputBatch:
        """Apply released handles, new sequences and new blocks, in this order. Raises nothing for a bad row."""
        return self._lay_out(*self.check(batch))

    def check(self, batch: StepBatch) -> tuple[list[RowStatus], Ints, Ints, Ints]:
        """Apply the delta as `build` does. Return every row's status, and of the R that run: their places in the batch,
        their slots, and their scheduled tokens, int64 [R] each.
        """
        table = self._table
        table.release(batch.released_handles)
        refused = self._add(batch)
        checks = _RowChecks(table, self._limits, batch)
        checks.run(refused)
        statuses = [_STATUSES[code] for code in checks.codes.tolist()]
        rows = np.flatnonzero(checks.codes == _OK)
        return statuses, rows, checks.slots[rows], checks.scheduled[rows]

    def _add(self, batch: StepBatch) -> dict[int, RowStatus]:
        """Add the new sequences; return those that cannot begin."""
        refused: dict[int, RowStatus] = {}
        for sequence in batch.new_sequences:
            if sequence.handle in self._table:
                refused[sequence.handle] = RowStatus.DESYNC
                self._table.end(sequence.handle)
                continue
            problem = problem_with(sequence, self._limits)
            if problem is None:
                self._table.add(sequence)
            else:
                logger.warning("sequence refused", extra={"fields": {"handle": sequence.handle, "problem": problem}})
                refused[sequence.handle] = RowStatus.BAD_INPUT
                self._table.add_ended(sequence.handle)
        return refused

    def _lay_out(self, statuses: list[RowStatus], rows: Ints, slots: Ints, scheduled: Ints) -> InputBatch:
        table, block_size = self._table, self._limits.block_size
        computed = table.num_computed_tokens[slots]
        width = -(-int((computed + scheduled).max(initial=1)) // block_size)
        layout = lay_out(
            scheduled, computed, table.num_tokens[slots], table.block_tables[slots, :width], block_size=block_size
        )
        return InputBatch(
            statuses=statuses,
            rows=rows,
            slots=slots,
            layout=layout,
            token_ids=known_tokens(table, slots, layout),
        )


def known_tokens(table: SequenceTable, slots: Ints, layout: RowLayout) -> Tensor:
    """Return the ids of a step's T tokens, int64 [T], of which all are known by now. slots is [R]."""
    return torch.from_numpy(table.tokens[slots[layout.row_of], layout.positions].astype(np.int64))


class _RowChecks:
    """The checks of one batch's rows. `codes` holds each row's status as an index into _STATUSES."""

    def __init__(self, table: SequenceTable, limits: Limits, batch: StepBatch) -> None:
        self._table = table
        self._limits = limits
        self._batch = batch
        self.slots = table.slots(batch.handles)
        self.scheduled: Ints = np.array(batch.num_scheduled_tokens, dtype=np.int64)
        self.codes = np.full(len(batch.handles), _OK, dtype=np.int8)

    def run(self, refused: dict[int, RowStatus]) -> None:
        """Judge every row and append the new blocks of the sound ones."""
        batch, table, limits = self._batch, self._table, self._limits
        self.codes[self.slots == ENDED] = _CODES[RowStatus.SKIPPED]
        self.codes[self.slots == UNKNOWN] = _CODES[RowStatus.DESYNC]
        if refused:
            for row, handle in enumerate(batch.handles):
                if handle in refused:
                    self.codes[row] = _CODES[refused[handle]]
        # The columns of rows without a slot are read at slot 0 and not used.
        slots = np.maximum(self.slots, 0)
        computed: Ints = np.array(batch.num_computed_tokens, dtype=np.int64)
        context = computed + self.scheduled
        self._judge(computed != table.num_computed_tokens[slots], RowStatus.DESYNC, "num_computed_tokens differs")
        self._judge(context > table.num_tokens[slots], RowStatus.DESYNC, "tokens that are not known are scheduled")
        self._judge(self.scheduled < 1, RowStatus.BAD_INPUT, "no token is scheduled")
        self._append_blocks()
        short = context > table.num_blocks[slots] * limits.block_size
        self._judge(short, RowStatus.BAD_INPUT, "the block table is too short")
        if len(self.codes) > limits.max_num_seqs:
            over = np.arange(len(self.codes)) >= limits.max_num_seqs
            self._judge(over, RowStatus.BAD_INPUT, f"more than {limits.max_num_seqs} rows")
        running = np.cumsum(np.where(self.codes == _OK, self.scheduled, 0))
        over = running > limits.max_num_batched_tokens
        self._judge(over, RowStatus.BAD_INPUT, f"more than {limits.max_num_batched_tokens} tokens")

    def _append_blocks(self) -> None:
        batch = self._batch
        if not batch.new_blocks:
            return
        blocks: Ints = np.array(batch.new_blocks, dtype=np.int64)
        outside = (blocks < 1) | (blocks >= self._limits.num_blocks)
        counts = np.array(batch.num_new_blocks, dtype=np.int64)
        ends = np.cumsum(counts)
        bad_id = np.zeros(len(counts), dtype=bool)
        too_long = np.zeros(len(counts), dtype=bool)
        for row in np.flatnonzero((counts > 0) & (self.codes == _OK)).tolist():
            part = slice(int(ends[row] - counts[row]), int(ends[row]))
            slot = int(self.slots[row])
            if outside[part][self._num_passed(slot, blocks[part]) :].any():
                bad_id[row] = True
            else:
                too_long[row] = not self._table.append_blocks(slot, blocks[part])
        self._judge(bad_id, RowStatus.BAD_INPUT, f"a block id is not in 1 to {self._limits.num_blocks - 1}")
        self._judge(too_long, RowStatus.BAD_INPUT, "the block table is longer than any sequence needs")

    def _num_passed(self, slot: int, blocks: Ints) -> int:
        """Return how many of a row's blocks, from the first, are rightly null: a new stay's that no layer reads."""
        if self._table.num_blocks[slot] or blocks[0] != NULL_BLOCK:
            return 0
        passed = self._limits.num_passed_blocks(int(self._table.num_computed_tokens[slot]))
        return int((blocks[:passed] == NULL_BLOCK).cumprod().sum())

    def _judge(self, failing: npt.NDArray[np.bool_], status: RowStatus, problem: str) -> None:
        """Give the status to the failing rows that were sound so far, and end their stays."""
        for row in np.flatnonzero(failing & (self.codes == _OK)).tolist():
            handle = self._batch.handles[row]
            fields = {"handle": handle, "step": self._batch.step, "status": status.name, "problem": problem}
            logger.warning("row refused", extra={"fields": fields})
            self.codes[row] = _CODES[status]
            self._table.end(handle)
