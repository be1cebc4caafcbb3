"""The executors of one model, and what is measured of them together."""

from __future__ import annotations

from scheduler_svc.executor_state import ExecutorState
from scheduler_svc.sequence import Sequence
from scheduler_svc.step_rate import Line, StepRate

FIRST_OUTPUT_TOKENS = 64.0
"""How long an output is taken to be before any has ended."""

_OUTPUT_MEMORY = 1 / 32


class ExecutorPool:
    """Executors of one model and revision, by session. Those of equal fingerprint share what is measured of steps.

    So equal executors with equal work are exactly equal, and none of them is taken for the faster one by chance.
    """

    def __init__(self, model: str, revision: str) -> None:
        self.model = model
        self.revision = revision
        self.executors: dict[int, ExecutorState] = {}
        # Those with a queue: whoever is without work need not look at all others.
        self.queued: dict[ExecutorState, None] = {}
        self._rates: dict[str, StepRate] = {}
        self._mean_output = FIRST_OUTPUT_TOKENS

    @property
    def max_sequence_len(self) -> int:
        """Tokens of the longest sequence that any of them takes; it has one."""
        return max(executor.max_sequence_len for executor in self.executors.values())

    def add(self, executor: ExecutorState) -> None:
        """Take a session in."""
        self.executors[executor.session] = executor
        executor.join_pool(self.queued, self._rates.setdefault(executor.spec.fingerprint, StepRate()))

    def remove(self, executor: ExecutorState) -> None:
        """Take a session out; it has nothing to do any more."""
        del self.executors[executor.session]

    def line_of(self, executor: ExecutorState) -> Line:
        """What a step takes at an executor, see StepRate.line. One that has not run yet is taken for one that has."""
        rate = executor.step_rate
        if not rate.is_measured:
            rate = next((each for each in self._rates.values() if each.is_measured), rate)
        return rate.line()

    def ended(self, sequence: Sequence) -> None:
        """Note how long an output has got that has ended."""
        self._mean_output += (len(sequence.output_token_ids) - self._mean_output) * _OUTPUT_MEMORY

    def expected_output(self, sequence: Sequence) -> float:
        """Tokens that a sequence will still bring, as far as those before tell; at least 1."""
        num_left = sequence.max_num_tokens - sequence.num_tokens
        return max(1.0, min(num_left, self._mean_output - len(sequence.output_token_ids)))
