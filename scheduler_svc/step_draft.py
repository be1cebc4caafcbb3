"""A step under construction."""

from __future__ import annotations

from scheduler_svc.batch import NewSequence, ScheduledRow
from scheduler_svc.sequence import LiveRequest, Sequence
from scheduler_svc.time_limits import Miss

NO_BLOCKS: tuple[int, ...] = ()


class StepDraft:
    """A step under construction: parallel columns as in InFlightStep."""

    __slots__ = ("budget", "new_sequences", "rows", "samples", "sequences", "shed")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.sequences: list[Sequence] = []
        self.rows: list[ScheduledRow] = []
        self.samples: list[bool] = []
        self.new_sequences: list[NewSequence] = []
        self.shed: list[tuple[LiveRequest, Miss | None]] = []

    def add(self, sequence: Sequence, num_scheduled: int, new_blocks: tuple[int, ...]) -> None:
        """Schedule a sequence's next num_scheduled tokens and count them as done."""
        computed = sequence.num_computed_tokens
        self.rows.append(ScheduledRow(sequence.handle, num_scheduled, computed, new_blocks))
        self.sequences.append(sequence)
        self.budget -= num_scheduled
        sequence.num_computed_tokens = computed + num_scheduled
        sequence.num_in_flight_rows += 1
        samples = computed + num_scheduled == sequence.num_known_tokens
        self.samples.append(samples)
        if samples:
            sequence.num_placeholders += 1

    def drop(self, sequence: Sequence) -> None:
        """Take back the row of a sequence that is being preempted, if it has one."""
        if sequence in self.sequences:
            index = self.sequences.index(sequence)
            self.budget += self.rows[index].num_scheduled_tokens
            del self.sequences[index], self.rows[index], self.samples[index]
            sequence.num_in_flight_rows -= 1
