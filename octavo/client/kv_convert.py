"""Between messages and values, for the accounts of KV blocks."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.client.admin_types import RequestState, WaitReason
from octavo.client.errors import invalid
from octavo.client.kv_types import BlockMap, BlockUse, ExecutorKvState, KvState, SequenceKvState
from octavo.v1 import admin_pb2

_A_PAGE = 1000
_MOST_CELLS = 4096
_STATES = {
    admin_pb2.REQUEST_STATE_WAITING: RequestState.WAITING,
    admin_pb2.REQUEST_STATE_RUNNING: RequestState.RUNNING,
}
_REASONS = {
    admin_pb2.WAIT_REASON_BEHIND_OTHERS: WaitReason.BEHIND_OTHERS,
    admin_pb2.WAIT_REASON_NO_FREE_BLOCKS: WaitReason.NO_FREE_BLOCKS,
    admin_pb2.WAIT_REASON_NO_FREE_ROW: WaitReason.NO_FREE_ROW,
    admin_pb2.WAIT_REASON_PREFIX_BEING_COMPUTED: WaitReason.PREFIX_BEING_COMPUTED,
    admin_pb2.WAIT_REASON_KEPT_APART: WaitReason.KEPT_APART,
    admin_pb2.WAIT_REASON_STEPS_IN_FLIGHT: WaitReason.STEPS_IN_FLIGHT,
    admin_pb2.WAIT_REASON_NO_EXECUTOR: WaitReason.NO_EXECUTOR,
    admin_pb2.WAIT_REASON_NEXT_STEP: WaitReason.NEXT_STEP,
}
_USES = {
    admin_pb2.BLOCK_USE_FREE: BlockUse.FREE,
    admin_pb2.BLOCK_USE_CACHED: BlockUse.CACHED,
    admin_pb2.BLOCK_USE_OWNED: BlockUse.OWNED,
    admin_pb2.BLOCK_USE_SHARED: BlockUse.SHARED,
    admin_pb2.BLOCK_USE_PINNED: BlockUse.PINNED,
}


def state_from(state: admin_pb2.RequestState) -> RequestState:
    """Return what a request or a sequence is doing."""
    return _STATES.get(state, RequestState.UNKNOWN)


def wait_reason_from(reason: admin_pb2.WaitReason) -> WaitReason | None:
    """Return why something waits; None where it does not."""
    if reason == admin_pb2.WAIT_REASON_UNSPECIFIED:
        return None
    return _REASONS.get(reason, WaitReason.UNKNOWN)


def kv_state_request(
    pages: Sequence[admin_pb2.GetKvStateResponse], executor: str | None, limit: int, block_ids: bool, map_cells: int
) -> admin_pb2.GetKvStateRequest | None:
    """Return the request for what lacks behind these pages; None where nothing does.

    Raises TypeError and InvalidArgumentError for arguments that cannot be sent.
    """
    for name, value, most in (("limit", limit, None), ("map_cells", map_cells, _MOST_CELLS)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} takes a whole number, is {value!r}")
        if value < 0 or (most is not None and value > most):
            raise invalid(name, f"must be {'0 or more' if most is None else f'0 to {most}'}, is {value}")
    num_lacking = limit - sum(len(page.sequences) for page in pages)
    if pages and (num_lacking <= 0 or not pages[-1].next_page_token):
        return None
    return admin_pb2.GetKvStateRequest(
        executor=_executor(executor),
        page_size=min(max(1, num_lacking), _A_PAGE),
        page_token=pages[-1].next_page_token if pages else "",
        block_ids=block_ids,
        map_cells=0 if pages else map_cells,
    )


def flush_prefix_cache_request(executor: str | None) -> admin_pb2.FlushPrefixCacheRequest:
    """Return the request. Raises TypeError, InvalidArgumentError."""
    return admin_pb2.FlushPrefixCacheRequest(executor=_executor(executor))


def kv_state_from(pages: Sequence[admin_pb2.GetKvStateResponse], limit: int) -> KvState:
    """Return the accounts: the ledgers of the first page, and up to `limit` sequences of all."""
    first = pages[0]
    sequences = [_sequence(each) for page in pages for each in page.sequences]
    return KvState(first.term, tuple(map(_executor_kv, first.executors)), tuple(sequences[:limit]), first.num_sequences)


def _executor(executor: str | None) -> str:
    if executor is None:
        return ""
    if not isinstance(executor, str):
        raise TypeError(f"executor must be text, is {type(executor).__name__}")
    if not executor.isprintable():
        raise invalid("executor", "must be host:port, as get_load gives it")
    return executor


def _executor_kv(message: admin_pb2.ExecutorKvState) -> ExecutorKvState:
    return ExecutorKvState(
        address=message.address,
        incarnation=message.incarnation,
        model=message.model,
        block_size=message.block_size,
        total_blocks=message.total_blocks,
        free_blocks=message.free_blocks,
        owned_blocks=message.owned_blocks,
        cached_blocks=message.cached_blocks,
        pinned_blocks=message.pinned_blocks,
        reserved_blocks=message.reserved_blocks,
        filled_slots=message.filled_slots,
        pending_slots=message.pending_slots,
        internal_fragmentation=message.internal_fragmentation,
        table_blocks=message.table_blocks,
        sharing_factor=message.sharing_factor,
        max_model_len=message.max_model_len,
        contiguous_blocks=message.contiguous_blocks,
        contiguous_saving=message.contiguous_saving,
        running_sequences=message.running_sequences,
        waiting_sequences=message.waiting_sequences,
        block_map=_block_map(message.block_map) if message.HasField("block_map") else None,
    )


def _block_map(message: admin_pb2.BlockMap) -> BlockMap:
    return BlockMap(message.blocks_per_cell, tuple(_USES.get(use, BlockUse.UNKNOWN) for use in message.cells))


def _sequence(message: admin_pb2.SequenceKvState) -> SequenceKvState:
    return SequenceKvState(
        request_id=message.request_id,
        choice=message.choice,
        label=message.label,
        model=message.model,
        tenant=message.tenant,
        executor=message.executor,
        state=state_from(message.state),
        wait_reason=wait_reason_from(message.wait_reason),
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        computed_tokens=message.computed_tokens,
        cached_tokens=message.cached_tokens,
        blocks=message.blocks,
        shared_blocks=message.shared_blocks,
        block_ids=tuple(message.block_ids),
        preemptions=message.preemptions,
        age=message.age.ToNanoseconds() / 1e9,
        priority=message.priority,
    )
