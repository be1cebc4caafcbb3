"""What a waiting sequence waits for although there is room for it."""

from __future__ import annotations

from scheduler_svc.executor_state import ExecutorState
from scheduler_svc.sequence import Sequence

ISOLATE_AFTER = 2
"""Failures in a row after which a sequence runs alone on its executor until it commits a token.

A step fails whole, so whoever shared it is suspect. Alone, the innocent are cleared.
"""


def must_wait_for_isolation(executor: ExecutorState, sequence: Sequence) -> bool:
    """Whether a sequence may not join those that run, because it is suspect or the one that runs is."""
    group = sequence.group
    if group is not None and any(each.group is not group for step in executor.in_flight for each in step.sequences):
        # Were the executor to die now, others would be suspect with it.
        return True
    if not executor.running:
        return False
    first = next(iter(executor.running))
    return group is not first.group or any(each.num_failures >= ISOLATE_AFTER for each in (sequence, first))


def may_be_overtaken(executor: ExecutorState, head: Sequence) -> bool:
    """Whether short ones may go past the head of the queue: not where it could then wait for them for ever."""
    blocks = executor.kv.blocks_needed(head, head.num_tokens)
    return head.num_failures < ISOLATE_AFTER and executor.reserve.fits_beside(blocks)


def is_worth_waiting(executor: ExecutorState, sequence: Sequence, prefix: list[int]) -> bool:
    """Whether others compute at least half of what a waiting sequence lacks."""
    num_awaited = executor.kv.num_awaited_tokens(sequence, prefix)
    return num_awaited > 0 and 2 * num_awaited >= sequence.num_tokens - len(prefix) * executor.spec.block_size
