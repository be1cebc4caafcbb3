"""What the scheduler knows of one executor session: its ledger, its sequences, its steps in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

from scheduler_svc.batch import ExecutorSpec, RowColumns, StageTimings
from scheduler_svc.burst_reserve import BurstReserve, ReserveSettings
from scheduler_svc.drain_rate import DrainRate
from scheduler_svc.kv_cache_manager import KVCacheManager
from scheduler_svc.load import ExecutorLoad
from scheduler_svc.sequence import Sequence, SequenceStatus
from scheduler_svc.step_clock import StepClock
from scheduler_svc.step_rate import StepRate
from scheduler_svc.time_limits import NO_LEAD, Lead
from scheduler_svc.waiting_queue import QueueKey, WaitingQueue

PlainColumns = tuple[list[Sequence], list[int], list[int]]
"""Sequences of one gateway, the counters of their requests, their choices."""


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that is not answered. Parallel columns: whose row, what was asked, 1 where it samples a token, else 0.

    built_at is on the engine's clock; num_tokens is what all rows compute.
    """

    step: int
    sequences: list[Sequence]
    columns: RowColumns
    samples: list[int]
    num_tokens: int
    built_at: float


class ExecutorState:
    """One session. Handles and steps count from 1 and are never reused.

    A sequence placed here is in `waiting` or in `running` (in order of admission), and in no other session.
    """

    def __init__(self, session: int, spec: ExecutorSpec, reserve: ReserveSettings | None = None) -> None:
        self.session = session
        self.spec = spec
        self.kv = KVCacheManager(
            spec.num_blocks, spec.block_size, window=spec.window, step_tokens=spec.max_num_batched_tokens
        )
        self.waiting = WaitingQueue()
        self.drain = DrainRate()
        self.running: dict[Sequence, None] = {}
        self.in_flight: deque[InFlightStep] = deque()
        self.released_handles: list[int] = []
        self.step_clock = StepClock()
        # Who got one token and nothing else in the last step, and the same by gateway: mostly so in the next, too.
        self.plain: list[Sequence] = []
        self.plain_by_gateway: dict[str, PlainColumns] = {}
        self.num_steps_built = 0
        self.num_steps_done = 0
        self._last_handle = 0
        # Blocks that the waiting sequences would take, their tokens, and how many of them the cache was not foreseen to
        # have: each as it was when it was queued.
        self._queued: dict[Sequence, tuple[int, int, int]] = {}
        self._num_queued_new_tokens = 0
        # Of those that run: what the steps built have not computed yet. As of the last step built.
        self.num_unscheduled_tokens = 0
        # When it was chosen last, counted in choices; and whether work is to go elsewhere, where it can.
        self.last_placed = 0
        self.is_draining = False
        self.step_rate = StepRate()
        self._queued_in_pool: dict[ExecutorState, None] = {}
        self.num_queued_blocks = 0
        self.num_queued_tokens = 0
        # Every running sequence then has a row in every step, however small the budget: none can be starved by others.
        self.max_running = min(spec.max_num_seqs, spec.max_num_batched_tokens)
        # The last token of a sequence is never computed, so its KV needs no slot.
        self.max_sequence_len = min(spec.max_model_len, self.kv.longest_sequence)
        self.reserve = BurstReserve(
            reserve or ReserveSettings(), self.kv.num_total_blocks, self.max_running, spec.max_num_batched_tokens
        )

    @property
    def num_backlog_tokens(self) -> int:
        """Tokens that are to be computed before those of whoever is placed here now."""
        return self._num_queued_new_tokens + self.num_unscheduled_tokens

    def join_pool(self, queued: dict[ExecutorState, None], step_rate: StepRate) -> None:
        """Share what executors of a pool share: the set of those with a queue, and the rate of steps."""
        self._queued_in_pool = queued
        self.step_rate = step_rate

    @property
    def load(self) -> tuple[float, int]:
        """How busy it is: the share of its blocks owned or waited for, then the number of sequences placed."""
        owned = self.kv.num_owned_blocks
        return (owned + self.num_queued_blocks) / self.kv.num_total_blocks, len(self.running) + len(self.waiting)

    def load_at(self, now: float) -> ExecutorLoad:
        """How busy it is, told in full."""
        return ExecutorLoad(
            session=self.session,
            address=self.spec.address,
            incarnation=self.spec.incarnation,
            model=self.spec.model,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_in_flight=len(self.in_flight),
            num_steps=self.num_steps_done,
            total_blocks=self.kv.num_total_blocks,
            free_blocks=self.kv.num_free_blocks,
            owned_blocks=self.kv.num_owned_blocks,
            cached_blocks=self.kv.num_cached_blocks,
            reserved_blocks=self.num_reserved_blocks(now),
        )

    def step_answered(self, num_tokens: int, sent_at: float, now: float, timings: StageTimings | None) -> None:
        """Measure a step of num_tokens tokens, 0 where it failed, as StepClock does."""
        seconds = self.step_clock.answered(num_tokens, sent_at, now, timings)
        if num_tokens:
            self.step_rate.answered(num_tokens, seconds)

    def num_reserved_blocks(self, now: float) -> int:
        """Blocks that can be had, but by short newcomers only."""
        return min(self.reserve.num_held_blocks(now), self.kv.num_available_blocks)

    def lead(self, sequence: Sequence, prefix: Sequences[int], now: float) -> Lead:
        """What a waiting sequence needs from now on were it admitted at once, `prefix` shared: by the steps measured.

        What others compute of its prompt counts as shared too. The least output is its minimum and a stop token.
        """
        size = self.kv.block_size
        num_tokens = sequence.num_tokens - len(prefix) * size - self.kv.num_awaited_tokens(sequence, prefix)
        num_running = len(self.running)
        budget = self.spec.max_num_batched_tokens
        first_token = self.step_clock.seconds_to_compute(num_tokens, budget, num_running, now)
        if not first_token:
            return NO_LEAD
        stopping = sequence.stopping
        num_steps = min(stopping.max_tokens, stopping.min_tokens + 1) - 1
        step = self.step_clock.seconds(min(num_running + 1, self.max_running), now) if num_steps else 0.0
        return Lead(first_token, first_token + num_steps * step)

    def enqueue(self, sequence: Sequence, key: QueueKey) -> None:
        """Place a waiting sequence here."""
        sequence.session = self.session
        self.waiting.push(sequence, key)
        self._queued_in_pool[self] = None
        blocks = self.kv.blocks_needed(sequence, sequence.num_tokens)
        num_new_tokens = sequence.num_tokens - self.kv.num_foreseen_tokens(sequence)
        self.kv.expect(sequence)
        self._queued[sequence] = blocks, sequence.num_tokens, num_new_tokens
        self.num_queued_blocks += blocks
        self.num_queued_tokens += sequence.num_tokens
        self._num_queued_new_tokens += num_new_tokens
        self.reserve.enqueue(sequence, blocks, key)

    def dequeue(self, sequence: Sequence) -> None:
        """Take a waiting sequence out of the queue."""
        self.waiting.remove(sequence)
        self.reserve.dequeue(sequence)
        self.kv.stop_expecting(sequence)
        blocks, num_tokens, num_new_tokens = self._queued.pop(sequence)
        self.num_queued_blocks -= blocks
        self.num_queued_tokens -= num_tokens
        self._num_queued_new_tokens -= num_new_tokens
        if not self._queued:
            self._queued_in_pool.pop(self, None)
        if not sequence.num_preemptions:
            # One that came back by preemption has made the queue longer before it makes it shorter.
            self.drain.left(num_tokens)
        sequence.session = 0

    def begin_stay(self, sequence: Sequence, prefix: Sequences[int], num_first_tokens: int) -> tuple[int, ...]:
        """Admit a waiting sequence: a new handle, and blocks for all its tokens, `prefix` first. Returns the blocks.

        With every block in hand, or promised, at admission a prefill never wants one halfway, so prefills cannot
        preempt one another. num_first_tokens: `prefix` and what it computes first.
        """
        self.reserve.begin_stay(sequence)
        self.dequeue(sequence)
        self._last_handle += 1
        sequence.begin_stay(self.session, self._last_handle, len(prefix) * self.spec.block_size)
        self.running[sequence] = None
        return self.kv.allocate(sequence, sequence.num_tokens, prefix, num_first_tokens=num_first_tokens)

    def end_stay(self, sequence: Sequence) -> None:
        """Take a running sequence off: its blocks are free at once, its handle goes out with the next batch.

        Rows in flight may still write to the blocks, but before anything that is scheduled from now on: steps run in
        order.
        """
        del self.running[sequence]
        self.reserve.end_stay(sequence)
        self.kv.release(sequence)
        self.released_handles.append(sequence.handle)
        sequence.end_stay()
        sequence.session = 0

    def remove(self, sequence: Sequence) -> None:
        """Take off a sequence placed here, whether it waits or runs."""
        if sequence.status is SequenceStatus.RUNNING:
            self.end_stay(sequence)
        else:
            self.dequeue(sequence)

    def check_invariants(self, depth: int) -> None:
        """Raise AssertionError where ledger, queue, counters and steps in flight contradict one another."""
        self.kv.check_invariants()
        assert len(self.in_flight) <= depth, f"{len(self.in_flight)} steps in flight"
        assert len(self.running) <= self.max_running
        assert set(self._queued) == set(self.waiting)
        sums = [sum(column) for column in zip(*self._queued.values(), strict=True)] or [0, 0, 0]
        assert [self.num_queued_blocks, self.num_queued_tokens, self._num_queued_new_tokens] == sums
        assert (self in self._queued_in_pool) == bool(self._queued), "the pool does not know who has a queue"
        self.reserve.check_invariants(self.waiting, self.running)
        for sequence in (*self.waiting, *self.running):
            assert sequence.session == self.session
            assert sequence.max_num_tokens <= self.max_sequence_len, f"{sequence!r} can outgrow its executor"
        for sequence in self.waiting:
            assert sequence.status is SequenceStatus.WAITING, f"{sequence!r} is queued"
            assert not sequence.block_table, f"{sequence!r} holds blocks and is queued"
            assert sequence.num_computed_tokens == sequence.num_placeholders == sequence.steady_until == 0
        held = {block for sequence in self.running for block in sequence.block_table[sequence.num_passed_blocks :]}
        assert self.kv.num_owned_blocks == len(held), "blocks are held outside"
        rows_in_flight: dict[Sequence, int] = {}
        samples_in_flight: dict[Sequence, int] = {}
        for step in self.in_flight:
            for sequence, handle, samples in zip(step.sequences, step.columns.handles, step.samples, strict=True):
                assert handle == sequence.handle or sequence.status is SequenceStatus.FINISHED
                rows_in_flight[sequence] = rows_in_flight.get(sequence, 0) + 1
                samples_in_flight[sequence] = samples_in_flight.get(sequence, 0) + samples
        handles = set()
        for sequence in self.running:
            assert sequence.status is SequenceStatus.RUNNING, f"{sequence!r} is running"
            assert 0 < sequence.handle <= self._last_handle
            assert sequence.handle not in self.released_handles
            handles.add(sequence.handle)
            assert sequence.num_known_tokens == sequence.num_tokens + samples_in_flight.get(sequence, 0)
            assert sequence.num_computed_tokens < sequence.num_known_tokens <= sequence.max_num_tokens
            assert sequence.num_computed_tokens <= sequence.num_slots, f"{sequence!r} computed past its blocks"
            assert sequence.steady_until in (0, sequence.max_num_tokens - 1)
        assert len(handles) == len(self.running), "two sequences share a handle"
        for sequence in (*self.waiting, *self.running, *rows_in_flight):
            expected = rows_in_flight.get(sequence, 0)
            is_counted = not sequence.steady_until
            assert (
                not is_counted or sequence.num_in_flight_rows == expected or sequence.status is SequenceStatus.FINISHED
            )
