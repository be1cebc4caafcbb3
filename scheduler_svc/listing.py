"""The live requests as an operator sees them: oldest first, page by page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from scheduler_svc.kv_views import WaitReason
from scheduler_svc.request_record import RequestId
from scheduler_svc.sequence import LiveRequest, Sequence, SequenceStatus

RequestPlace = tuple[float, RequestId]
"""The place of a request in the list: its arrival on the engine's clock, then its id, which is unique for ever.

A place stays what it is while others come and go, so a page can begin after one whose request has ended.
"""


@dataclass(frozen=True)
class RequestView:
    """A live request at one moment.

    num_output_tokens counts committed tokens of all choices; num_waiting and num_running count choices that have not
    ended; executors are the addresses where these are placed, each once. age and remaining_deadline are seconds, None
    is no deadline. wait_reason is that of the first choice that waits, None where none does.
    """

    id: RequestId
    label: str
    model: str
    tenant: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_waiting: int
    num_running: int
    num_blocks: int
    executors: tuple[str, ...]
    age: float
    remaining_deadline: float | None
    wait_reason: WaitReason | None
    num_cached_tokens: int
    priority: int
    num_preemptions: int


@dataclass(frozen=True)
class RequestsPage:
    """A page of the list. next is the place after which the next page begins; None: this is the last."""

    requests: tuple[RequestView, ...]
    next: RequestPlace | None


def list_page(
    requests: Iterable[LiveRequest],
    addresses: Mapping[int, str],
    why_it_waits: Callable[[Sequence], WaitReason | None],
    after: RequestPlace | None,
    limit: int,
    now: float,
) -> RequestsPage:
    """Return the first `limit` of `requests`, which are in the order of their places, past the place `after`.

    addresses: those of the executors, by session. why_it_waits answers None of what does not wait.
    """
    past = (request for request in requests if after is None or _place(request) > after)
    first = list(islice(past, limit + 1))
    views = tuple(_view(request, addresses, why_it_waits, now) for request in first[:limit])
    return RequestsPage(views, _place(first[limit - 1]) if len(first) > limit else None)


def _place(request: LiveRequest) -> RequestPlace:
    return request.arrival, request.record.id


def _view(
    request: LiveRequest,
    addresses: Mapping[int, str],
    why_it_waits: Callable[[Sequence], WaitReason | None],
    now: float,
) -> RequestView:
    record = request.record
    sequences = request.sequences
    placed = (addresses[sequence.session] for sequence in sequences if sequence.session)
    return RequestView(
        id=record.id,
        label=record.label,
        model=record.model,
        tenant=record.tenant,
        num_prompt_tokens=len(record.prompt_token_ids),
        num_output_tokens=sum(len(sequence.output_token_ids) for sequence in sequences),
        num_waiting=sum(sequence.status is SequenceStatus.WAITING for sequence in sequences),
        num_running=sum(sequence.status is SequenceStatus.RUNNING for sequence in sequences),
        num_blocks=sum(sequence.num_held_blocks for sequence in sequences),
        executors=tuple(dict.fromkeys(placed)),
        age=now - request.arrival,
        remaining_deadline=None if request.deadline is None else max(0.0, request.deadline - now),
        wait_reason=next(filter(None, map(why_it_waits, sequences)), None),
        num_cached_tokens=request.num_cached_tokens,
        priority=record.priority,
        num_preemptions=sum(sequence.num_preemptions for sequence in sequences),
    )
