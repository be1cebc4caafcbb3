"""What the scheduler tells of its state."""

from __future__ import annotations

from collections.abc import Mapping
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
    """One session. Blocks leave out the null block; num_waiting is the work that is placed there and waits.

    Blocks are free, owned by sequences, cached (kept for those to come, and given up when room is wanted), or pinned
    by a copy under way. reserved_blocks are a part of those that can be had: they are kept for short newcomers.
    """

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
    owned_blocks: int
    cached_blocks: int
    reserved_blocks: int

    @property
    def pinned_blocks(self) -> int:
        """What is left: blocks that a copy under way uses."""
        return self.total_blocks - self.free_blocks - self.owned_blocks - self.cached_blocks


@dataclass(frozen=True)
class LoadSnapshot:
    """How busy the cell is, at one moment. kv_usage is a share, 0 to 1.

    These count since the start: accepted requests (num_requests live ones, and those that finished, failed or were
    cancelled), preemptions, desyncs, committed output tokens, failures of the policy by hook, requests ended by a time
    limit (which, and whether before any work on them, by prediction); and, over all admissions, the tokens admitted and
    those of them whose KV was there already.
    """

    num_requests: int
    num_accepted: int
    num_finished: int
    num_failed: int
    num_cancelled: int
    num_waiting: int
    num_running: int
    num_preemptions: int
    num_desyncs: int
    num_generated_tokens: int
    num_policy_failures: Mapping[str, int]
    num_over_time: Mapping[tuple[str, bool], int]
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    kv_usage: float
    executors: tuple[ExecutorLoad, ...]
