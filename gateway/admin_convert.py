"""From octavo.internal.scheduler.v1 to octavo.v1, for the operator. Pure functions."""

from __future__ import annotations

from gateway.live_request import format_request_id
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.v1 import admin_pb2

_REASONS = {
    scheduler_pb2.WAIT_REASON_BEHIND_OTHERS: admin_pb2.WAIT_REASON_BEHIND_OTHERS,
    scheduler_pb2.WAIT_REASON_NO_FREE_BLOCKS: admin_pb2.WAIT_REASON_NO_FREE_BLOCKS,
    scheduler_pb2.WAIT_REASON_NO_FREE_ROW: admin_pb2.WAIT_REASON_NO_FREE_ROW,
    scheduler_pb2.WAIT_REASON_PREFIX_BEING_COMPUTED: admin_pb2.WAIT_REASON_PREFIX_BEING_COMPUTED,
    scheduler_pb2.WAIT_REASON_KEPT_APART: admin_pb2.WAIT_REASON_KEPT_APART,
    scheduler_pb2.WAIT_REASON_STEPS_IN_FLIGHT: admin_pb2.WAIT_REASON_STEPS_IN_FLIGHT,
    scheduler_pb2.WAIT_REASON_NO_EXECUTOR: admin_pb2.WAIT_REASON_NO_EXECUTOR,
    scheduler_pb2.WAIT_REASON_NEXT_STEP: admin_pb2.WAIT_REASON_NEXT_STEP,
}
_USES = {
    scheduler_pb2.BLOCK_USE_FREE: admin_pb2.BLOCK_USE_FREE,
    scheduler_pb2.BLOCK_USE_CACHED: admin_pb2.BLOCK_USE_CACHED,
    scheduler_pb2.BLOCK_USE_OWNED: admin_pb2.BLOCK_USE_OWNED,
    scheduler_pb2.BLOCK_USE_SHARED: admin_pb2.BLOCK_USE_SHARED,
    scheduler_pb2.BLOCK_USE_PINNED: admin_pb2.BLOCK_USE_PINNED,
}


def requests_to_proto(answer: scheduler_pb2.ListRequestsResponse) -> admin_pb2.ListRequestsResponse:
    """Return a page of live requests."""
    return admin_pb2.ListRequestsResponse(
        requests=[_request(each) for each in answer.requests], next_page_token=answer.next_page_token
    )


def load_to_proto(load: scheduler_pb2.GetLoadResponse) -> admin_pb2.GetLoadResponse:
    """Return the load of the cell."""
    return admin_pb2.GetLoadResponse(
        term=load.term,
        live_requests=load.num_requests,
        waiting_sequences=load.num_waiting,
        running_sequences=load.num_running,
        preemptions=load.num_preemptions,
        gateways=load.num_gateways,
        executors=[_executor(each) for each in load.executors],
    )


def kv_state_to_proto(state: scheduler_pb2.GetKvStateResponse) -> admin_pb2.GetKvStateResponse:
    """Return the accounts of KV blocks."""
    return admin_pb2.GetKvStateResponse(
        term=state.term,
        executors=[_executor_kv(each) for each in state.executors],
        sequences=[_sequence_kv(each) for each in state.sequences],
        num_sequences=state.num_sequences,
        next_page_token=state.next_page_token,
    )


def _request(live: scheduler_pb2.LiveRequest) -> admin_pb2.RequestInfo:
    info = admin_pb2.RequestInfo(
        request_id=format_request_id(live.gateway, live.request),
        label=live.label,
        model=live.model,
        tenant=live.tenant,
        state=admin_pb2.REQUEST_STATE_RUNNING if live.num_running else admin_pb2.REQUEST_STATE_WAITING,
        prompt_tokens=live.num_prompt_tokens,
        completion_tokens=live.num_output_tokens,
        live_choices=live.num_waiting + live.num_running,
        kv_blocks=live.num_blocks,
        executors=live.executors,
        age=live.age,
        wait_reason=_reason(live.wait_reason),
        cached_tokens=live.num_cached_tokens,
        priority=live.priority,
        preemptions=live.num_preemptions,
    )
    if live.HasField("remaining_deadline"):
        info.remaining_deadline.CopyFrom(live.remaining_deadline)
    return info


def _executor(load: scheduler_pb2.ExecutorLoad) -> admin_pb2.ExecutorInfo:
    return admin_pb2.ExecutorInfo(
        address=load.address,
        incarnation=load.incarnation,
        model=load.model,
        running_sequences=load.num_running,
        steps_in_flight=load.num_in_flight,
        steps=load.num_steps,
        total_blocks=load.total_blocks,
        free_blocks=load.free_blocks,
        owned_blocks=load.owned_blocks,
        cached_blocks=load.cached_blocks,
        pinned_blocks=load.pinned_blocks,
        reserved_blocks=load.reserved_blocks,
        waiting_sequences=load.num_waiting,
    )


def _executor_kv(kv: scheduler_pb2.ExecutorKvState) -> admin_pb2.ExecutorKvState:
    message = admin_pb2.ExecutorKvState(
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
        running_sequences=kv.num_running,
        waiting_sequences=kv.num_waiting,
    )
    if kv.HasField("block_map"):
        message.block_map.blocks_per_cell = kv.block_map.blocks_per_cell
        message.block_map.cells.extend(_USES.get(use, admin_pb2.BLOCK_USE_UNSPECIFIED) for use in kv.block_map.cells)
    return message


def _sequence_kv(kv: scheduler_pb2.SequenceKvState) -> admin_pb2.SequenceKvState:
    return admin_pb2.SequenceKvState(
        request_id=format_request_id(kv.gateway, kv.request),
        choice=kv.choice,
        label=kv.label,
        model=kv.model,
        tenant=kv.tenant,
        executor=kv.executor,
        state=admin_pb2.REQUEST_STATE_RUNNING if kv.is_running else admin_pb2.REQUEST_STATE_WAITING,
        wait_reason=_reason(kv.wait_reason),
        prompt_tokens=kv.num_prompt_tokens,
        completion_tokens=kv.num_output_tokens,
        computed_tokens=kv.num_computed_tokens,
        cached_tokens=kv.num_cached_tokens,
        blocks=kv.num_blocks,
        shared_blocks=kv.num_shared_blocks,
        block_ids=kv.block_ids,
        preemptions=kv.num_preemptions,
        age=kv.age,
        priority=kv.priority,
    )


def _reason(reason: scheduler_pb2.WaitReason) -> admin_pb2.WaitReason:
    return _REASONS.get(reason, admin_pb2.WAIT_REASON_UNSPECIFIED)
