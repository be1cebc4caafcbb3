"""Reads the accounts of KV blocks off the engine's state, which stays as it is: who holds what, and why others wait.

An answer costs in proportion to the sequences that run and to its page; a block map costs in proportion to the blocks.
Between answers nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_svc.batch_builder import BatchBuilder
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
from scheduler_svc.placement import Placement
from scheduler_svc.sequence import LiveRequest, Sequence, SequenceStatus
from scheduler_svc.waits import is_worth_waiting, must_wait_for_isolation

MAX_BLOCK_IDS = 65536
"""Most block ids on a page, unless its first sequence alone has more: with 4 bytes each, a small message."""

_USES = {int(use): use for use in BlockUse}


class KvAccounts:
    """Tells the accounts of the engine's sessions and of the sequences without one."""

    def __init__(self, placement: Placement, builder: BatchBuilder) -> None:
        self._placement = placement
        self._executors = placement.executors
        self._builder = builder

    def state(self, requests: Iterable[LiveRequest], query: KvQuery, now: float) -> KvState:
        """Return the accounts at this moment; `requests` are the live ones, oldest first, from query.after's on."""
        executors = [each for each in self._executors.values() if query.address in ("", each.spec.address)]
        num_sequences = sum(len(each.running) + len(each.waiting) for each in executors)
        if not query.address:
            num_sequences += len(self._placement.orphans)
        page, following = self._page(requests, query, now) if query.limit else ((), None)
        return KvState(
            executors=tuple(_executor_kv(executor, query.map_cells, now) for executor in executors),
            sequences=page,
            num_sequences=num_sequences,
            next=following,
        )

    def why_it_waits(self, sequence: Sequence, now: float) -> WaitReason | None:
        """Return why a sequence does not run; None where it does, or has ended."""
        if sequence.status is not SequenceStatus.WAITING:
            return None
        executor = self._executors.get(sequence.session)
        if executor is None:
            return WaitReason.NO_EXECUTOR
        kv = executor.kv
        head = executor.waiting.peek()
        is_head = head is not None and head[1] is sequence
        # Who neither takes from the cache nor leaves anything in it has no hashes, and is not hashed for a look at the
        # queue.
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
        _, held_rows = executor.reserve.held_from(sequence, kv.blocks_needed(sequence, sequence.num_tokens), now)
        if len(executor.running) + held_rows >= executor.max_running:
            return WaitReason.NO_FREE_ROW
        if not self._builder.has_room(executor, sequence, now, prefix):
            return WaitReason.NO_FREE_BLOCKS
        return WaitReason.NEXT_STEP

    def _page(
        self, requests: Iterable[LiveRequest], query: KvQuery, now: float
    ) -> tuple[tuple[SequenceKv, ...], SequencePlace | None]:
        after = query.after
        views: list[SequenceKv] = []
        last: SequencePlace | None = None
        num_block_ids = 0
        for request in requests:
            for sequence in request.sequences:
                place = request.arrival, request.record.id, sequence.choice
                if after is not None and place <= after:
                    continue
                if sequence.status is SequenceStatus.FINISHED or not self._is_at(sequence, query.address):
                    continue
                num_block_ids += sequence.num_held_blocks if query.block_ids else 0
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
        num_blocks = sequence.num_held_blocks
        num_alone = self._executors[sequence.session].kv.num_reclaimable_blocks(sequence) if num_blocks else 0
        return SequenceKv(
            request=record.id,
            choice=sequence.choice,
            label=record.label,
            model=record.model,
            tenant=record.tenant,
            priority=record.priority,
            executor=self._address(sequence),
            wait_reason=self.why_it_waits(sequence, now),
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_output_tokens=len(sequence.output_token_ids),
            num_computed_tokens=sequence.num_computed_tokens if is_running else 0,
            num_cached_tokens=sequence.num_cached_tokens if is_running else 0,
            num_blocks=num_blocks,
            num_shared_blocks=num_blocks - num_alone,
            block_ids=tuple(sequence.block_table[sequence.num_passed_blocks :]) if with_block_ids else (),
            num_preemptions=sequence.num_preemptions,
            age=now - sequence.request.arrival,
        )


def _executor_kv(executor: ExecutorState, map_cells: int, now: float) -> ExecutorKv:
    kv = executor.kv
    num_running = len(executor.running)
    table_blocks = num_empty = num_pending = 0
    for sequence in executor.running:
        num_slots, computed = sequence.num_slots, sequence.num_computed_tokens
        table_blocks += sequence.num_held_blocks
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
        reserved_blocks=executor.num_reserved_blocks(now),
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
    # By block id: the null block is nobody's.
    uses = bytearray([BlockUse.FREE]) * (total + 1)
    for block in kv.cached_blocks():
        uses[block] = BlockUse.CACHED
    owned, shared = int(BlockUse.OWNED), int(BlockUse.SHARED)
    for sequence in executor.running:
        for block in sequence.block_table[sequence.num_passed_blocks :]:
            uses[block] = owned if uses[block] < owned else shared
    size = -(-total // most_cells)
    if size == 1:
        return BlockMap(size, tuple(map(_USES.__getitem__, uses[1:])))
    cells = (uses[start : start + size] for start in range(1, total + 1, size))
    return BlockMap(size, tuple(_USES[max((cell.count(use), use) for use in _USES)[1]] for cell in cells))
