"""The engine: requests in, batches out, results in, tokens out. Pure: no I/O, no clock, no tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from scheduler_svc.batch import BatchResult, Event, ExecutorSpec, ScheduledBatch
from scheduler_svc.policies.base import BaseScheduler
from scheduler_svc.sequence import RequestId, RequestRecord


class ModelPoolView(NamedTuple):
    """The ready executors of one model. max_model_len: the longest sequence that any of them takes, in tokens."""

    model: str
    revision: str
    num_executors: int
    max_model_len: int


@dataclass(frozen=True)
class ExecutorLoad:
    """The ledger of one session, in blocks; num_waiting is the work placed there that waits."""

    session: int
    address: str
    incarnation: str
    model: str
    num_running: int
    num_waiting: int
    num_in_flight: int
    num_steps: int
    total_blocks: int
    free_blocks: int


@dataclass(frozen=True)
class LoadSnapshot:
    """How busy the cell is. kv_usage is the share of blocks in use over all executors, 0 to 1."""

    num_requests: int
    num_waiting: int
    num_running: int
    num_preemptions: int
    num_desyncs: int
    kv_usage: float
    executors: tuple[ExecutorLoad, ...]


class Engine:
    """Signatures first; see the methods."""

    def __init__(
        self, policy: BaseScheduler, depth: int, *, orphan_timeout: float = 30.0, reserve: int = 1
    ) -> None:
        """depth: most unanswered steps per executor. orphan_timeout: seconds accepted work waits without a fitting executor.

        reserve: free blocks that an admission leaves for each sequence already running.
        """
        raise NotImplementedError

    def submit(self, record: RequestRecord, now: float) -> list[Event]:
        """Accept a request; a known id changes nothing. Raises ServiceError where it is refused: nothing is kept then."""
        raise NotImplementedError

    def cancel(self, request_id: RequestId, choice: int | None = None, kept_tokens: int | None = None) -> list[Event]:
        """End a request or one choice. Unknown or ended already: nothing."""
        raise NotImplementedError

    def expire(self, now: float) -> list[Event]:
        """End what is overdue (deadline, orphan timeout, shed). O(1) when nothing is: call it before every round of schedule."""
        raise NotImplementedError

    def add_executor(self, spec: ExecutorSpec) -> int:
        """Open a session; returns its number, never 0. Raises FAILED_PRECONDITION where the model has another revision."""
        raise NotImplementedError

    def remove_executor(self, session: int) -> list[Event]:
        """Close a session; its sequences are requeued. Unknown: nothing."""
        raise NotImplementedError

    def schedule(self, session: int, now: float) -> ScheduledBatch | None:
        """Build the next step. None: nothing to do, or depth steps are in flight, or the session is unknown."""
        raise NotImplementedError

    def update(self, session: int, result: BatchResult, now: float) -> list[Event]:
        """Apply a result. One that matches no step in flight changes nothing."""
        raise NotImplementedError

    def requests_of(self, incarnation: str) -> set[int]:
        """Counters of the live requests of one gateway."""
        raise NotImplementedError

    def pools(self) -> list[ModelPoolView]:
        """Models that have a ready executor."""
        raise NotImplementedError

    def load(self) -> LoadSnapshot:
        """How busy the cell is."""
        raise NotImplementedError

    def check_invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        raise NotImplementedError
