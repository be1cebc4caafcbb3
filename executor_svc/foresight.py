"""The inputs of a step as they will be once the step before it has gone as steps mostly go.

What it foresees: every row of the running step is sound, and each that samples gets one token that does not end its
stay. Then all of the next step's inputs are known but the ids of those tokens. Nothing is changed in foreseeing; at the
step's turn the table is compared with what was foreseen, row by row. Where they differ, since a stay has met a stop
token, was not finite or was lost with its step, the inputs are built as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from executor_svc.attention import AttentionMetadata
from executor_svc.batch import Limits, NewSequence, RowStatus, StepBatch
from executor_svc.input_batch import InputBatch, known_tokens
from executor_svc.kv_cache import NULL_BLOCK
from executor_svc.record_check import problem_with
from executor_svc.row_layout import RowLayout, lay_out
from executor_svc.sequence_state import UNKNOWN, SequenceTable

Ints = npt.NDArray[np.int64]
Plan = Callable[[AttentionMetadata], Any]


@dataclass(frozen=True)
class ForeseenInputs:
    """The inputs of a batch of R rows, all of which run, and what the table must hold of them at its turn."""

    batch: StepBatch
    slots: Ints
    """int64 [R]; UNKNOWN for the stays that begin with the batch."""
    num_tokens: Ints
    """int64 [R], like the two that follow: without what the batch brings."""
    num_computed_tokens: Ints
    num_blocks: Ints
    new_token_ids: tuple[Ints, ...]
    """Of the stays that begin, in their order."""
    layout: RowLayout
    plan: Any
    seconds: float
    """What it took to build them."""


class Foresight:
    """Foresees steps over one table. `foresee` reads the table and changes nothing; any thread may call it while the
    table does not change. `adopt` is the device thread's.
    """

    def __init__(self, table: SequenceTable, limits: Limits, plan: Plan | None = None) -> None:
        """`plan`: what the model works out for rows before their tokens are known, see PlannedModel."""
        self._table = table
        self._limits = limits
        self._max_blocks = -(-limits.max_model_len // limits.block_size)
        self._plan = plan

    def foresee(self, batch: StepBatch, running: InputBatch) -> ForeseenInputs | None:
        """Return the inputs of the step behind `running`; None where a row is not plainly in order."""
        started = perf_counter()
        table, limits = self._table, self._limits
        new = {sequence.handle: sequence for sequence in batch.new_sequences}
        slots = table.slots(batch.handles)
        if not self._are_distinct(batch, slots, new) or any(problem_with(each, limits) for each in new.values()):
            return None
        num_tokens, computed, num_blocks = self._counters(batch, running, slots, new)
        scheduled = np.array(batch.num_scheduled_tokens, dtype=np.int64)
        counts = np.array(batch.num_new_blocks, dtype=np.int64)
        blocks = np.array(batch.new_blocks, dtype=np.int64)
        context, held = computed + scheduled, num_blocks + counts
        in_order = (scheduled >= 1) & (np.array(batch.num_computed_tokens, dtype=np.int64) == computed)
        in_order &= (context <= num_tokens) & (context <= held * limits.block_size) & (held <= self._max_blocks)
        in_range = (blocks > NULL_BLOCK) & (blocks < limits.num_blocks)
        if not in_order.all() or not in_range.all() or scheduled.sum() > limits.max_num_batched_tokens:
            return None
        width = -(-int(context.max()) // limits.block_size)
        tables = self._block_tables(slots, num_blocks, counts, blocks, width)
        layout = lay_out(scheduled, computed, num_tokens, tables, block_size=limits.block_size)
        return ForeseenInputs(
            batch=batch,
            slots=slots,
            num_tokens=num_tokens,
            num_computed_tokens=computed,
            num_blocks=num_blocks,
            new_token_ids=tuple(np.array(each.token_ids, dtype=np.int64) for each in batch.new_sequences),
            layout=layout,
            plan=None if self._plan is None else self._plan(layout.metadata),
            seconds=perf_counter() - started,
        )

    def adopt(self, foreseen: ForeseenInputs) -> InputBatch | None:
        """Apply the batch's delta and return its inputs, with all token ids. None, and nothing is changed, where the
        table is not as it was foreseen.
        """
        table, batch = self._table, foreseen.batch
        slots = table.slots(batch.handles)
        if not self._is_as_foreseen(foreseen, slots):
            return None
        table.release(batch.released_handles)
        for sequence, token_ids in zip(batch.new_sequences, foreseen.new_token_ids, strict=True):
            table.add(sequence, token_ids)
        if batch.new_sequences:
            slots = table.slots(batch.handles)
        end = 0
        for slot, count in zip(slots.tolist(), batch.num_new_blocks, strict=True):
            if count:
                end += count
                table.append_blocks(slot, np.array(batch.new_blocks[end - count : end], dtype=np.int64))
        return InputBatch(
            statuses=[RowStatus.OK] * len(slots),
            rows=np.arange(len(slots)),
            slots=slots,
            layout=foreseen.layout,
            token_ids=known_tokens(table, slots, foreseen.layout),
            plan=foreseen.plan,
            ahead=foreseen.seconds,
        )

    def _are_distinct(self, batch: StepBatch, slots: Ints, new: dict[int, NewSequence]) -> bool:
        """Whether each row is another stay's, which lives or begins with the batch and is not released by it."""
        handles = set(batch.handles)
        if not 0 < len(batch.handles) == len(handles) <= self._limits.max_num_seqs:
            return False
        if len(new) != len(batch.new_sequences) or not handles.isdisjoint(batch.released_handles):
            return False
        beginning = [handle for handle, slot in zip(batch.handles, slots.tolist(), strict=True) if slot == UNKNOWN]
        return set(beginning) == new.keys() and bool((slots >= UNKNOWN).all())

    def _counters(
        self, batch: StepBatch, running: InputBatch, slots: Ints, new: dict[int, NewSequence]
    ) -> tuple[Ints, Ints, Ints]:
        """Return each row's known tokens, computed ones and blocks behind the running step, int64 [R] each."""
        table = self._table
        num_tokens, computed = table.num_tokens.copy(), table.num_computed_tokens.copy()
        num_tokens[running.slots[running.layout.sampling]] += 1
        computed[running.slots] += running.layout.num_scheduled_tokens
        columns = num_tokens[slots], computed[slots], table.num_blocks[slots]
        for row in np.flatnonzero(slots == UNKNOWN).tolist():
            sequence = new[batch.handles[row]]
            own = len(sequence.token_ids), sequence.num_cached_tokens, 0
            for column, value in zip(columns, own, strict=True):
                column[row] = value
        return columns

    def _block_tables(
        self, slots: Ints, num_blocks: Ints, counts: Ints, blocks: Ints, width: int
    ) -> npt.NDArray[np.int32]:
        """Return the first `width` columns of the rows' tables, int32 [R, width], with the `counts` of new blocks."""
        tables = self._table.block_tables[slots, :width]
        tables[slots == UNKNOWN] = NULL_BLOCK
        ends = np.cumsum(counts)
        for row in np.flatnonzero(counts).tolist():
            begin = int(num_blocks[row])
            part = blocks[ends[row] - counts[row] : ends[row]][: max(0, width - begin)]
            tables[row, begin : begin + len(part)] = part
        return tables

    def _is_as_foreseen(self, foreseen: ForeseenInputs, slots: Ints) -> bool:
        table = self._table
        if not np.array_equal(slots, foreseen.slots):
            return False
        columns = (
            (table.num_tokens, foreseen.num_tokens),
            (table.num_computed_tokens, foreseen.num_computed_tokens),
            (table.num_blocks, foreseen.num_blocks),
        )
        lives = slice(None) if not foreseen.new_token_ids else slots != UNKNOWN
        return all(np.array_equal(column[slots[lives]], told[lives]) for column, told in columns)
