"""Between protobuf and the domain's own types, for what operators ask."""

from __future__ import annotations

import base64
import math
import zlib

from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.rpc.errors import FieldViolation, invalid_argument
from scheduler_svc.listing import RequestPlace, RequestsPage, RequestView
from scheduler_svc.sequence import RequestId

MAX_PAGE_SIZE = 1000
"""Most requests on a page: a page is made in one go, and steps wait for it."""


def list_query(request: scheduler_pb2.ListRequestsRequest, term: int) -> tuple[RequestPlace | None, int]:
    """Return where a page begins and its size. Raises ServiceError naming every bad field.

    term is that of this scheduler: a token counts only where it was given, because places are on the scheduler's clock.
    """
    violations = []
    after: RequestPlace | None = None
    if not 1 <= request.page_size <= MAX_PAGE_SIZE:
        violations.append(FieldViolation("page_size", f"must be 1 to {MAX_PAGE_SIZE}, got {request.page_size}"))
    if request.page_token:
        try:
            token_term, after = _read_token(request.page_token)
        except (ValueError, OverflowError):
            violations.append(FieldViolation("page_token", "must be the next_page_token of the page before"))
        else:
            if token_term != term:
                description = "was given by a scheduler that is gone; start again without one"
                violations.append(FieldViolation("page_token", description))
    if violations:
        raise invalid_argument(violations)
    return after, request.page_size


def list_response(page: RequestsPage, term: int) -> scheduler_pb2.ListRequestsResponse:
    """Return a page under this scheduler's term."""
    return scheduler_pb2.ListRequestsResponse(
        requests=map(_live_request, page.requests),
        next_page_token="" if page.next is None else _make_token(term, page.next),
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
    )
    message.age.FromNanoseconds(round(view.age * 1e9))
    if view.remaining_deadline is not None:
        message.remaining_deadline.FromNanoseconds(round(view.remaining_deadline * 1e9))
    return message


def _make_token(term: int, place: RequestPlace) -> str:
    arrival, (incarnation, counter) = place
    text = f"{term}:{arrival.hex()}:{counter}:{incarnation}".encode()
    # A token that was cut or mistyped would else be a place too, and pages would begin there.
    return base64.urlsafe_b64encode(zlib.crc32(text).to_bytes(4) + text).decode()


def _read_token(token: str) -> tuple[int, RequestPlace]:
    """Return term and place. Raises ValueError or OverflowError where the text is no token."""
    decoded = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True)
    checksum, text = decoded[:4], decoded[4:]
    if zlib.crc32(text).to_bytes(4) != checksum:
        raise ValueError("a damaged token")
    term, arrival, counter, incarnation = text.decode().split(":", 3)
    place = float.fromhex(arrival), (incarnation, int(counter))
    if not math.isfinite(place[0]):
        raise ValueError("a place that is nowhere")
    return int(term), place
