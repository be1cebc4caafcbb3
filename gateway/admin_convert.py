"""From octavo.internal.scheduler.v1 to octavo.v1, for the operator. Pure functions."""

from __future__ import annotations

from gateway.live_request import format_request_id
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.v1 import admin_pb2


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
    )
