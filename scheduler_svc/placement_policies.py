"""Which executor of its pool a sequence goes to.

A policy answers for executors that the sequence fits, at least one. It changes nothing: the same question has the same
answer until `Placement` has placed something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from scheduler_svc.executor_pool import ExecutorPool
from scheduler_svc.executor_state import ExecutorState
from scheduler_svc.sequence import Sequence
from scheduler_svc.step_rate import Line, StepRate

Choose = Callable[[Iterable[ExecutorState], ExecutorPool, Sequence], ExecutorState]


def least_loaded(executors: Iterable[ExecutorState], _pool: ExecutorPool, _sequence: Sequence) -> ExecutorState:
    """The executor with the smallest share of its blocks owned or waited for.

    Ties go to the one with fewer sequences, then to the one that was chosen longest ago.
    """
    return min(executors, key=lambda executor: (executor.load, executor.last_placed))


def round_robin(executors: Iterable[ExecutorState], _pool: ExecutorPool, _sequence: Sequence) -> ExecutorState:
    """The executor that was chosen longest ago."""
    return min(executors, key=lambda executor: executor.last_placed)


def cache_aware(executors: Iterable[ExecutorState], pool: ExecutorPool, sequence: Sequence) -> ExecutorState:
    """The executor where the sequence is expected to end first; of equal ones the one that was chosen longest ago."""
    num_output = pool.expected_output(sequence)
    lines: dict[StepRate, Line] = {}

    def key(executor: ExecutorState) -> tuple[float, int]:
        # Mostly all have one rate, and a line takes as long as all the rest.
        line = lines.get(executor.step_rate)
        if line is None:
            line = lines[executor.step_rate] = pool.line_of(executor)
        return expected_seconds(executor, line, sequence, num_output), executor.last_placed

    return min(executors, key=key)


def expected_seconds(executor: ExecutorState, line: Line, sequence: Sequence, num_output: float) -> float:
    """Seconds until a sequence placed here ends, by the steps measured; without any, a number that orders alike.

    Three parts: the wait for a row and for blocks, where these are short; the steps that compute what waits before it
    and what of its own tokens the prefix cache has not got, nor will have got by then; and its output, in steps with
    all that are placed here. Its own tokens count twice, for whoever comes behind waits for them too: a burst of equal
    beginnings is not computed everywhere at once, though that would not take longer. So a cached prefix draws a
    sequence as strongly as computing it would take long, and no more.
    """
    start, by_token = line
    kv, max_running = executor.kv, executor.max_running
    num_others = len(executor.running) + len(executor.waiting)
    num_known = kv.num_foreseen_tokens(sequence)
    num_own_tokens = sequence.num_tokens - num_known
    num_tokens = executor.num_backlog_tokens + num_own_tokens
    num_rows = num_others if num_others < max_running else max_running
    num_steps = -(-num_tokens // max(1, executor.spec.max_num_batched_tokens - num_rows))
    prefill = num_steps * (start + by_token * num_rows) + by_token * (num_tokens + num_own_tokens)
    decode = start + by_token * (num_rows + (num_others < max_running))
    # As rows and blocks come free in step with outputs, a share of all of them takes that share of an output's time.
    lack = (num_others + 1 - max_running) / max_running
    num_blocks = executor.num_queued_blocks + kv.blocks_needed(sequence, num_own_tokens)
    lack = max(0.0, lack, (num_blocks - kv.num_available_blocks) / kv.num_total_blocks)
    return prefill + num_output * decode * (1.0 + lack)


POLICIES: dict[str, Choose] = {"cache-aware": cache_aware, "least-loaded": least_loaded, "round-robin": round_robin}
"""By the names that `--placement` takes."""
