"""Between protobuf and the domain's own types, for the accounts of KV blocks."""

from __future__ import annotations

from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.rpc.errors import FieldViolation, invalid_argument
from scheduler_svc.kv_views import BlockUse, ExecutorKv, KvQuery, KvState, SequenceKv, SequencePlace, WaitReason
from scheduler_svc.page_tokens import MAX_PAGE_SIZE, make_token, read_token

MAX_MAP_CELLS = 4096
"""Most cells of a block map: more than a screen shows."""

_KIND = "kv"
_REASONS = {
    None: scheduler_pb2.WAIT_REASON_UNSPECIFIED,
    WaitReason.BEHIND_OTHERS: scheduler_pb2.WAIT_REASON_BEHIND_OTHERS,
    WaitReason.NO_FREE_BLOCKS: scheduler_pb2.WAIT_REASON_NO_FREE_BLOCKS,
    WaitReason.NO_FREE_ROW: scheduler_pb2.WAIT_REASON_NO_FREE_ROW,
    WaitReason.PREFIX_BEING_COMPUTED: scheduler_pb2.WAIT_REASON_PREFIX_BEING_COMPUTED,
    WaitReason.KEPT_APART: scheduler_pb2.WAIT_REASON_KEPT_APART,
    WaitReason.STEPS_IN_FLIGHT: scheduler_pb2.WAIT_REASON_STEPS_IN_FLIGHT,
    WaitReason.NO_EXECUTOR: scheduler_pb2.WAIT_REASON_NO_EXECUTOR,
    WaitReason.NEXT_STEP: scheduler_pb2.WAIT_REASON_NEXT_STEP,
}
_USES = {
    BlockUse.FREE: scheduler_pb2.BLOCK_USE_FREE,
    BlockUse.CACHED: scheduler_pb2.BLOCK_USE_CACHED,
    BlockUse.OWNED: scheduler_pb2.BLOCK_USE_OWNED,
    BlockUse.SHARED: scheduler_pb2.BLOCK_USE_SHARED,
    BlockUse.PINNED: scheduler_pb2.BLOCK_USE_PINNED,
}


def wait_reason(reason: WaitReason | None) -> scheduler_pb2.WaitReason:
    """Return why a sequence waits, as the contract has it."""
    return _REASONS[reason]


def kv_query(request: scheduler_pb2.GetKvStateRequest, term: int) -> KvQuery:
    """Return what is asked for. Raises ServiceError naming every bad field; term is that of this scheduler."""
    violations = []
    after: SequencePlace | None = None
    if not 1 <= request.page_size <= MAX_PAGE_SIZE:
        violations.append(FieldViolation("page_size", f"must be 1 to {MAX_PAGE_SIZE}, got {request.page_size}"))
    if request.map_cells > MAX_MAP_CELLS:
        violations.append(FieldViolation("map_cells", f"must be 0 to {MAX_MAP_CELLS}, got {request.map_cells}"))
    if request.page_token:
        try:
            arrival, request_id, (choice,) = read_token(_KIND, request.page_token, term, num_further=1)
            after = arrival, request_id, choice
        except ValueError as error:
            violations.append(FieldViolation("page_token", str(error)))
    if violations:
        raise invalid_argument(violations)
    return KvQuery(request.executor, after, request.page_size, request.block_ids, request.map_cells)


def kv_response(state: KvState, term: int) -> scheduler_pb2.GetKvStateResponse:
    """Return the accounts under this scheduler's term."""
    token = ""
    if state.next is not None:
        arrival, request_id, choice = state.next
        token = make_token(_KIND, term, (arrival, request_id), choice)
    return scheduler_pb2.GetKvStateResponse(
        term=term,
        executors=map(_executor, state.executors),
        sequences=map(_sequence, state.sequences),
        num_sequences=state.num_sequences,
        next_page_token=token,
    )


def _executor(kv: ExecutorKv) -> scheduler_pb2.ExecutorKvState:
    block_map = kv.block_map
    return scheduler_pb2.ExecutorKvState(
        address=kv.address,
        incarnation=kv.incarnation,
        model=kv.model,
        block_size=kv.block_size,
        total_blocks=kv.total_blocks,
        free_blocks=kv.free_blocks,
        owned_blocks=kv.owned_blocks,
        cached_blocks=kv.cached_blocks,
        pinned_blocks=kv.pinned_blocks,
        reserved_blocks=kv.reserved_blocks,
        filled_slots=kv.filled_slots,
        pending_slots=kv.pending_slots,
        internal_fragmentation=kv.internal_fragmentation,
        table_blocks=kv.table_blocks,
        sharing_factor=kv.sharing_factor,
        max_model_len=kv.max_model_len,
        contiguous_blocks=kv.contiguous_blocks,
        contiguous_saving=kv.contiguous_saving,
        num_running=kv.num_running,
        num_waiting=kv.num_waiting,
        block_map=None
        if block_map is None
        else scheduler_pb2.BlockMap(
            blocks_per_cell=block_map.blocks_per_cell, cells=[_USES[use] for use in block_map.cells]
        ),
    )


def _sequence(kv: SequenceKv) -> scheduler_pb2.SequenceKvState:
    incarnation, counter = kv.request
    message = scheduler_pb2.SequenceKvState(
        gateway=incarnation,
        request=counter,
        choice=kv.choice,
        label=kv.label,
        model=kv.model,
        tenant=kv.tenant,
        executor=kv.executor,
        is_running=kv.wait_reason is None,
        wait_reason=_REASONS[kv.wait_reason],
        num_prompt_tokens=kv.num_prompt_tokens,
        num_output_tokens=kv.num_output_tokens,
        num_computed_tokens=kv.num_computed_tokens,
        num_cached_tokens=kv.num_cached_tokens,
        num_blocks=kv.num_blocks,
        num_shared_blocks=kv.num_shared_blocks,
        block_ids=kv.block_ids,
        num_preemptions=kv.num_preemptions,
        priority=kv.priority,
    )
    message.age.FromNanoseconds(round(kv.age * 1e9))
    return message
