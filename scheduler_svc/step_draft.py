"""A step under construction."""

from __future__ import annotations

from scheduler_svc.batch import NewSequence, RowColumns
from scheduler_svc.sequence import LiveRequest, Sequence
from scheduler_svc.time_limits import Miss


class StepDraft:
    """Parallel columns, as in InFlightStep and RowColumns. samples: 1 where the row samples a token, else 0.

    Decodes come first. They append to three columns alone; in the others such a row always has 1, so `level` fills
    these in for all of them at once.
    """

    __slots__ = (
        "budget",
        "handles",
        "new_blocks",
        "new_sequences",
        "num_computed_tokens",
        "num_scheduled_tokens",
        "samples",
        "sequences",
        "shed",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.sequences: list[Sequence] = []
        self.handles: list[int] = []
        self.num_computed_tokens: list[int] = []
        self.num_scheduled_tokens: list[int] = []
        self.samples: list[int] = []
        self.new_blocks: dict[int, tuple[int, ...]] = {}
        self.new_sequences: list[NewSequence] = []
        self.shed: list[tuple[LiveRequest, Miss | None]] = []

    def level(self) -> None:
        """Complete the rows of decodes, and take their tokens off the budget."""
        ones = [1] * (len(self.handles) - len(self.samples))
        self.num_scheduled_tokens += ones
        self.samples += ones
        self.budget -= len(ones)

    def add(self, sequence: Sequence, num_scheduled: int, new_blocks: tuple[int, ...]) -> None:
        """Schedule a sequence's next num_scheduled tokens and count them as done. All rows before are complete."""
        computed = sequence.num_computed_tokens
        if new_blocks:
            self.new_blocks[len(self.handles)] = new_blocks
        self.sequences.append(sequence)
        self.handles.append(sequence.handle)
        self.num_computed_tokens.append(computed)
        self.num_scheduled_tokens.append(num_scheduled)
        self.budget -= num_scheduled
        sequence.num_computed_tokens = computed + num_scheduled
        sequence.num_in_flight_rows += 1
        samples = computed + num_scheduled == sequence.num_known_tokens
        self.samples.append(int(samples))
        if samples:
            sequence.num_placeholders += 1

    def drop(self, sequence: Sequence) -> None:
        """Take back the row of a sequence that is being preempted, if it has one."""
        if sequence not in self.sequences:
            return
        self.level()
        index = self.sequences.index(sequence)
        self.budget += self.num_scheduled_tokens[index]
        for column in (
            self.sequences,
            self.handles,
            self.num_computed_tokens,
            self.num_scheduled_tokens,
            self.samples,
        ):
            del column[index]
        self.new_blocks = {row - (row > index): blocks for row, blocks in self.new_blocks.items() if row != index}
        sequence.end_steady()
        sequence.num_in_flight_rows -= 1

    def columns(self) -> RowColumns:
        """Return the rows, which are complete."""
        return RowColumns(self.handles, self.num_scheduled_tokens, self.num_computed_tokens, self.new_blocks)
