"""Between protobuf and the domain's own types, for what operators ask."""

from __future__ import annotations

from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.rpc.errors import FieldViolation, invalid_argument
from scheduler_svc.kv_convert import wait_reason
from scheduler_svc.listing import RequestPlace, RequestsPage, RequestView
from scheduler_svc.page_tokens import MAX_PAGE_SIZE, make_token, read_token
from scheduler_svc.request_record import RequestId

_KIND = "requests"


def list_query(request: scheduler_pb2.ListRequestsRequest, term: int) -> tuple[RequestPlace | None, int]:
    """Return where a page begins and its size. Raises ServiceError naming every bad field; term is this scheduler's."""
    violations = []
    after: RequestPlace | None = None
    if not 1 <= request.page_size <= MAX_PAGE_SIZE:
        violations.append(FieldViolation("page_size", f"must be 1 to {MAX_PAGE_SIZE}, got {request.page_size}"))
    if request.page_token:
        try:
            arrival, request_id, _ = read_token(_KIND, request.page_token, term)
            after = arrival, request_id
        except ValueError as error:
            violations.append(FieldViolation("page_token", str(error)))
    if violations:
        raise invalid_argument(violations)
    return after, request.page_size


def list_response(page: RequestsPage, term: int) -> scheduler_pb2.ListRequestsResponse:
    """Return a page under this scheduler's term."""
    return scheduler_pb2.ListRequestsResponse(
        requests=map(_live_request, page.requests),
        next_page_token="" if page.next is None else make_token(_KIND, term, page.next),
    )


def cancel_target(request: scheduler_pb2.CancelRequestRequest) -> RequestId:
    """Return the request that is named. Raises ServiceError where its gateway is not."""
    if not request.gateway:
        raise invalid_argument([FieldViolation("gateway", "must be the incarnation of the request's gateway")])
    return request.gateway, request.request


def _live_request(view: RequestView) -> scheduler_pb2.LiveRequest:
    incarnation, counter = view.id
    message = scheduler_pb2.LiveRequest(
        gateway=incarnation,
        request=counter,
        label=view.label,
        model=view.model,
        tenant=view.tenant,
        num_prompt_tokens=view.num_prompt_tokens,
        num_output_tokens=view.num_output_tokens,
        num_waiting=view.num_waiting,
        num_running=view.num_running,
        num_blocks=view.num_blocks,
        executors=view.executors,
        wait_reason=wait_reason(view.wait_reason),
        num_cached_tokens=view.num_cached_tokens,
        priority=view.priority,
        num_preemptions=view.num_preemptions,
    )
    message.age.FromNanoseconds(round(view.age * 1e9))
    if view.remaining_deadline is not None:
        message.remaining_deadline.FromNanoseconds(round(view.remaining_deadline * 1e9))
    return message
