"""What the scheduler tells of its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class ModelPoolView(NamedTuple):
    """The ready executors of one model. max_model_len: the longest sequence that any of them can hold, in tokens."""

    model: str
    revision: str
    num_executors: int
    max_model_len: int


@dataclass(frozen=True)
class ExecutorLoad:
    """One session. Blocks leave out the null block; num_waiting is the work that is placed there and waits."""

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
    """How busy the cell is. num_preemptions and num_desyncs count since the start; kv_usage is a share, 0 to 1."""

    num_requests: int
    num_waiting: int
    num_running: int
    num_preemptions: int
    num_desyncs: int
    kv_usage: float
    executors: tuple[ExecutorLoad, ...]
