"""The requests that are accepted and have not ended."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator

from scheduler_svc.request_record import Outcome, RequestId, RequestRecord
from scheduler_svc.sequence import LiveRequest, SequenceStatus
from scheduler_svc.time_limits import TimeLimits


class LiveRequests:
    """By id, by gateway and by time limit. Accepted = live + ended with any outcome, at any time."""

    def __init__(self) -> None:
        self._by_id: dict[RequestId, LiveRequest] = {}
        self._by_incarnation: defaultdict[str, set[int]] = defaultdict(set)
        # By arrival, so that a page of the oldest costs what is on it and not what lives. Newcomers belong at the end.
        self._places: list[tuple[float, RequestId]] = []
        self.time_limits = TimeLimits()
        self.num_accepted = 0
        self.num_ended = dict.fromkeys(Outcome, 0)

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._by_id

    def get(self, request_id: RequestId) -> LiveRequest | None:
        """The request of an id, or None."""
        return self._by_id.get(request_id)

    def values(self) -> list[LiveRequest]:
        """All of them, oldest acceptance first."""
        return list(self._by_id.values())

    def oldest(self, since: tuple[float, RequestId] | None = None) -> Iterator[LiveRequest]:
        """Yield them by arrival and id, from the place `since` on. None may come or go meanwhile."""
        first = 0 if since is None else bisect_left(self._places, since)
        for index in range(first, len(self._places)):
            yield self._by_id[self._places[index][1]]

    def of_incarnation(self, incarnation: str) -> set[int]:
        """Counters of one gateway's requests."""
        return set(self._by_incarnation.get(incarnation, ()))

    def add(self, request: LiveRequest, now: float) -> None:
        """Accept a request whose id is not known."""
        incarnation, counter = request.record.id
        self._by_id[request.record.id] = request
        self._by_incarnation[incarnation].add(counter)
        insort(self._places, (request.arrival, request.record.id))
        self.time_limits.watch(request, now)
        self.num_accepted += 1

    def rename(self, request: LiveRequest, record: RequestRecord) -> None:
        """Give a live request another id, that of `record`, which is the same but for that and is not known."""
        incarnation, counter = request.record.id
        del self._by_id[request.record.id]
        del self._places[bisect_left(self._places, (request.arrival, request.record.id))]
        self._leave(incarnation, counter)
        request.record = record
        for sequence in request.sequences:
            sequence.request_id = record.id
        self._by_id[record.id] = request
        self._by_incarnation[record.id[0]].add(record.id[1])
        insort(self._places, (request.arrival, record.id))

    def remove(self, request: LiveRequest, outcome: Outcome) -> None:
        """End a request."""
        incarnation, counter = request.record.id
        del self._by_id[request.record.id]
        del self._places[bisect_left(self._places, (request.arrival, request.record.id))]
        self._leave(incarnation, counter)
        self.time_limits.forget(request)
        self.num_ended[outcome] += 1

    def _leave(self, incarnation: str, counter: int) -> None:
        counters = self._by_incarnation[incarnation]
        counters.remove(counter)
        if not counters:
            del self._by_incarnation[incarnation]

    def check_invariants(self) -> None:
        """Raise AssertionError unless what was accepted is live or has ended, and what is live has an open choice."""
        assert self.num_accepted == len(self._by_id) + sum(self.num_ended.values())
        assert sum(len(counters) for counters in self._by_incarnation.values()) == len(self._by_id)
        assert self._places == sorted((each.arrival, each.record.id) for each in self._by_id.values())
        self.time_limits.check_invariants(set(self._by_id.values()))
        for request in self._by_id.values():
            num_open = sum(sequence.status is not SequenceStatus.FINISHED for sequence in request.sequences)
            assert num_open == request.num_open > 0, f"{num_open} choices open, counted {request.num_open}"
