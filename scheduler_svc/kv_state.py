"""Reads the accounts of KV blocks off the engine's state, which stays as it is: who holds what, and why others wait.

An answer costs in proportion to the sequences that run and, for its page, to those that are live; a block map costs in
proportion to the blocks. Between answers nothing is kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping

from scheduler_svc.batch_builder import BatchBuilder, is_worth_waiting, must_wait_for_isolation
from scheduler_svc.executor_state import ExecutorState
from scheduler_svc.kv_views import (
    BlockMap,
    BlockUse,
    ExecutorKv,
    KvQuery,
    KvState,
    SequenceKv,
    SequencePlace,
    WaitReason,
)
from scheduler_svc.sequence import LiveRequest, Sequence, SequenceStatus

MAX_BLOCK_IDS = 65536
"""Most block ids on a page, unless its first sequence alone has more: with 4 bytes each, a small message."""


class KvAccounts:
    """Tells the accounts of these sessions, live: the mapping is the engine's own."""

    def __init__(self, executors: Mapping[int, ExecutorState], builder: BatchBuilder) -> None:
        self._executors = executors
        self._builder = builder

    def state(self, requests: Collection[LiveRequest], query: KvQuery, now: float) -> KvState:
        """Return the accounts at this moment; `requests` are all live ones."""
        executors = [each for each in self._executors.values() if query.address in ("", each.spec.address)]
        if query.address:
            num_sequences = sum(len(each.running) + len(each.waiting) for each in executors)
        else:
            num_sequences = sum(request.num_open for request in requests)
        page, following = self._page(requests, query, now) if query.limit else ((), None)
        return KvState(
            executors=tuple(_executor_kv(executor, query.map_cells) for executor in executors),
            sequences=page,
            num_sequences=num_sequences,
            next=following,
        )

    def why_it_waits(self, sequence: Sequence) -> WaitReason | None:
        """Return why a sequence does not run; None where it does, or has ended."""
        if sequence.status is not SequenceStatus.WAITING:
            return None
        executor = self._executors.get(sequence.session)
        if executor is None:
            return WaitReason.NO_EXECUTOR
        kv = executor.kv
        head = executor.waiting.peek()
        is_head = head is not None and head[1] is sequence
        # The builder has seen no prefix of those whose hashes it has not made yet, and long prompts are not hashed for
        # a look at the queue.
        if not is_head and sequence.block_hashes[0] != kv.block_size:
            return WaitReason.BEHIND_OTHERS
        # From here on in the order in which the builder looks.
        prefix = kv.find_prefix(sequence)
        if is_worth_waiting(executor, sequence, prefix):
            return WaitReason.PREFIX_BEING_COMPUTED
        if not is_head:
            return WaitReason.BEHIND_OTHERS
        if sequence.num_in_flight_rows:
            return WaitReason.STEPS_IN_FLIGHT
        if must_wait_for_isolation(executor, sequence):
            return WaitReason.KEPT_APART
        if len(executor.running) >= executor.max_running:
            return WaitReason.NO_FREE_ROW
        if not self._builder.has_room(executor, sequence, prefix):
            return WaitReason.NO_FREE_BLOCKS
        return WaitReason.NEXT_STEP

    def _page(
        self, requests: Iterable[LiveRequest], query: KvQuery, now: float
    ) -> tuple[tuple[SequenceKv, ...], SequencePlace | None]:
        after = query.after
        # Each live request has a choice that has not ended, so this many requests hold a page and one more. Places
        # differ, so requests are never compared.
        places = (
            (request.arrival, request.record.id, request)
            for request in requests
            if (after is None or (request.arrival, request.record.id) >= after[:2])
            and (not query.address or any(self._is_at(sequence, query.address) for sequence in request.sequences))
        )
        # One request more: of the one where the page before ended nothing may be left.
        first = heapq.nsmallest(query.limit + 2, places)
        views: list[SequenceKv] = []
        last: SequencePlace | None = None
        num_block_ids = 0
        for arrival, request_id, request in first:
            for sequence in request.sequences:
                place = arrival, request_id, sequence.choice
                if after is not None and place <= after:
                    continue
                if sequence.status is SequenceStatus.FINISHED or not self._is_at(sequence, query.address):
                    continue
                num_block_ids += len(sequence.block_table) if query.block_ids else 0
                if len(views) == query.limit or (views and num_block_ids > MAX_BLOCK_IDS):
                    return tuple(views), last
                views.append(self._view(sequence, query.block_ids, now))
                last = place
        return tuple(views), None

    def _is_at(self, sequence: Sequence, address: str) -> bool:
        return not address or self._address(sequence) == address

    def _address(self, sequence: Sequence) -> str:
        executor = self._executors.get(sequence.session)
        return "" if executor is None else executor.spec.address

    def _view(self, sequence: Sequence, with_block_ids: bool, now: float) -> SequenceKv:
        record = sequence.request.record
        is_running = sequence.status is SequenceStatus.RUNNING
        num_blocks = len(sequence.block_table)
        num_alone = self._executors[sequence.session].kv.num_reclaimable_blocks(sequence) if num_blocks else 0
        return SequenceKv(
            request=record.id,
            choice=sequence.choice,
            label=record.label,
            model=record.model,
            tenant=record.tenant,
            priority=record.priority,
            executor=self._address(sequence),
            wait_reason=self.why_it_waits(sequence),
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_output_tokens=len(sequence.output_token_ids),
            num_computed_tokens=sequence.num_computed_tokens if is_running else 0,
            num_cached_tokens=sequence.num_cached_tokens if is_running else 0,
            num_blocks=num_blocks,
            num_shared_blocks=num_blocks - num_alone,
            block_ids=tuple(sequence.block_table) if with_block_ids else (),
            num_preemptions=sequence.num_preemptions,
            age=now - sequence.request.arrival,
        )


def _executor_kv(executor: ExecutorState, map_cells: int) -> ExecutorKv:
    kv = executor.kv
    num_running = len(executor.running)
    table_blocks = num_empty = num_pending = 0
    for sequence in executor.running:
        num_slots, computed = sequence.num_slots, sequence.num_computed_tokens
        table_blocks += len(sequence.block_table)
        num_empty += num_slots - computed
        num_pending += min(sequence.num_known_tokens, num_slots) - computed
    longest = -(-max(1, executor.max_sequence_len - 1) // kv.block_size)
    return ExecutorKv(
        address=executor.spec.address,
        incarnation=executor.spec.incarnation,
        model=executor.spec.model,
        block_size=kv.block_size,
        total_blocks=kv.num_total_blocks,
        free_blocks=kv.num_free_blocks,
        owned_blocks=kv.num_owned_blocks,
        cached_blocks=kv.num_cached_blocks,
        reserved_blocks=0,
        # Only full blocks are shared, so no empty slot is counted twice.
        filled_slots=kv.num_owned_blocks * kv.block_size - num_empty,
        pending_slots=num_pending,
        table_blocks=table_blocks,
        max_model_len=executor.max_sequence_len,
        contiguous_blocks=longest * num_running,
        num_running=num_running,
        num_waiting=len(executor.waiting),
        block_map=_block_map(executor, map_cells) if map_cells else None,
    )


def _block_map(executor: ExecutorState, most_cells: int) -> BlockMap:
    kv = executor.kv
    total = kv.num_total_blocks
    # By block id less one: the null block is nobody's.
    uses = bytearray([BlockUse.FREE]) * total
    for block in kv.cached_blocks():
        uses[block - 1] = BlockUse.CACHED
    for sequence in executor.running:
        for block in sequence.block_table:
            uses[block - 1] = BlockUse.SHARED if uses[block - 1] >= BlockUse.OWNED else BlockUse.OWNED
    size = -(-total // most_cells)
    cells = (uses[start : start + size] for start in range(0, total, size))
    most = (max(BlockUse, key=lambda use: (cell.count(use), use)) for cell in cells)
    return BlockMap(size, tuple(map(BlockUse, uses)) if size == 1 else tuple(most))
