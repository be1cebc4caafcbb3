"""Requests that may be taken up by another gateway, and what is kept of those that have ended.

A client whose stream is lost takes its request up where it can reach a gateway. While the request lives, all that is
needed is in its sequences; once it has ended, its record is kept for the grace that it asked for, within a bound.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from octavo.rpc.errors import ServiceError
from scheduler_svc.live_requests import LiveRequests
from scheduler_svc.request_record import ChoiceRecord, RequestId, RequestRecord
from scheduler_svc.sequence import LiveRequest

MAX_KEPT_TOKENS = 2_000_000
"""Tokens of all ended requests that are kept, inputs included; past it the oldest go first."""


@dataclass(frozen=True)
class TakenUp:
    """A request as it is handed over; `error` where it has failed. `earlier_id`: of whoever had it, None: nobody."""

    record: RequestRecord
    error: ServiceError | None
    earlier_id: RequestId | None


@dataclass(frozen=True)
class _Ended:
    record: RequestRecord
    error: ServiceError | None
    kept_until: float
    num_tokens: int


class Resumables:
    """By the id that each had first."""

    def __init__(self, requests: LiveRequests) -> None:
        self._requests = requests
        self._live: dict[RequestId, LiveRequest] = {}
        self._ended: OrderedDict[RequestId, _Ended] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)

    def add(self, request: LiveRequest) -> None:
        """Take in a live request, where it may be taken up."""
        if request.record.resume_grace is not None:
            self._live[request.record.resume_id] = request

    def end(self, request: LiveRequest, error: ServiceError | None, now: float, *, is_kept: bool = True) -> None:
        """Keep what is left of a request that has ended, where it may be taken up. `is_kept`: and is to be."""
        record = request.record
        if record.resume_grace is None:
            return
        if self._live.get(record.resume_id) is not request:
            # Two gateways had it when a scheduler died: this one is not that which is taken up.
            return
        del self._live[record.resume_id]
        if not is_kept:
            return
        left = _record_of(request, now)
        num_tokens = len(record.prompt_token_ids) + sum(len(choice.token_ids) for choice in left.choices)
        self._forget(record.resume_id)
        self._ended[record.resume_id] = _Ended(left, error, now + record.resume_grace, num_tokens)
        self._num_tokens += num_tokens
        while self._num_tokens > MAX_KEPT_TOKENS:
            self._forget(next(iter(self._ended)))

    def take_up(self, first_id: RequestId, new_id: RequestId, tenant: str, now: float) -> TakenUp | None:
        """Hand a request over to `new_id`; None where there is none of this tenant's."""
        request = self._live.get(first_id)
        if request is not None:
            if request.record.tenant != tenant:
                return None
            earlier_id = request.record.id
            self._requests.rename(request, replace(request.record, id=new_id, first_id=first_id))
            return TakenUp(_record_of(request, now), None, earlier_id)
        ended = self._ended.get(first_id)
        if ended is None or ended.record.tenant != tenant:
            return None
        return TakenUp(replace(ended.record, id=new_id, first_id=first_id), ended.error, None)

    def expire(self, now: float) -> None:
        """Forget what has been kept for its time. The oldest stand first; those behind a longer grace wait for it."""
        while self._ended:
            first_id, ended = next(iter(self._ended.items()))
            if ended.kept_until > now:
                return
            self._forget(first_id)

    def check_invariants(self) -> None:
        """Raise AssertionError unless what is here as live is live, and what is kept is counted."""
        assert self._num_tokens == sum(ended.num_tokens for ended in self._ended.values())
        for first_id, request in self._live.items():
            assert request.record.resume_id == first_id
            assert self._requests.get(request.record.id) is request, f"{first_id} has ended and can be taken up as live"

    def _forget(self, first_id: RequestId) -> None:
        ended = self._ended.pop(first_id, None)
        if ended is not None:
            self._num_tokens -= ended.num_tokens


def _record_of(request: LiveRequest, now: float) -> RequestRecord:
    """The full record as it stands now."""
    return replace(
        request.record,
        choices=tuple(
            ChoiceRecord(tuple(each.output_token_ids), each.end, tuple(each.logprobs)) for each in request.sequences
        ),
        age=now - request.arrival,
        remaining_deadline=None if request.deadline is None else request.deadline - now,
        was_accepted=True,
        remaining_queue_ttl=None,
        remaining_first_token=None,
    )
