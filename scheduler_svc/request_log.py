"""One log line when a request is accepted and one when it ends, with what it got and how long it took."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler_svc.batch import Event, NewSequence, RequestDone, StepTokens, TokensOut
from scheduler_svc.request_record import RequestId, RequestRecord

logger = logging.getLogger(__name__)


def format_request_id(request_id: RequestId) -> str:
    """Return the id as it stands in logs: incarnation-counter."""
    incarnation, counter = request_id
    return f"{incarnation}-{counter}"


@dataclass
class _LiveRequest:
    arrived_at: float
    prompt_tokens: int
    scheduled_at: float | None = None
    first_token_at: float | None = None
    reasons: dict[int, str] = field(default_factory=dict)


class RequestLog:
    """Follows live requests by the events that are published. Times are seconds on the engine loop's clock."""

    def __init__(self) -> None:
        self._live: dict[RequestId, _LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._live)

    def accepted(self, record: RequestRecord, now: float) -> None:
        """Log an accepted request; one that is known already changes nothing."""
        if record.id in self._live:
            return
        live = _LiveRequest(now - record.age, len(record.prompt_token_ids))
        self._live[record.id] = live
        fields = {
            "request_id": format_request_id(record.id),
            "label": record.label,
            "model": record.model,
            "prompt_tokens": live.prompt_tokens,
            "choices": len(record.choices),
            "committed_tokens": sum(len(choice.token_ids) for choice in record.choices),
            "age": round(record.age, 6),
        }
        logger.info("request accepted", extra={"fields": fields})

    def taken_up(self, earlier_id: RequestId, new_id: RequestId) -> None:
        """Log that a request has another gateway's id from now on."""
        live = self._live.pop(earlier_id, None)
        if live is not None:
            self._live[new_id] = live
        fields = {"request_id": format_request_id(new_id), "earlier_id": format_request_id(earlier_id)}
        logger.info("request taken up", extra={"fields": fields})

    def scheduled(self, new_sequences: Iterable[NewSequence], now: float) -> None:
        """Note whose wait in the queue is over."""
        for sequence in new_sequences:
            live = self._live.get(sequence.request)
            if live is not None and live.scheduled_at is None:
                live.scheduled_at = now

    def published(self, events: Iterable[Event], now: float) -> None:
        """Follow the events of one engine call. Each choice's first tokens and its end are TokensOut."""
        for event in events:
            if isinstance(event, StepTokens):
                continue
            live = self._live.get(event.request)
            if live is None:
                continue
            if isinstance(event, TokensOut):
                if event.token_ids:
                    live.first_token_at = now if live.first_token_at is None else live.first_token_at
                if event.end is not None:
                    live.reasons[event.choice] = event.end.reason.value
            else:
                del self._live[event.request]
                _log_end(event, live, now)


def _log_end(done: RequestDone, live: _LiveRequest, now: float) -> None:
    def since_arrival(time: float | None) -> float | None:
        return None if time is None else round(time - live.arrived_at, 6)

    fields: dict[str, object] = {
        "request_id": format_request_id(done.request),
        "reasons": [live.reasons[choice] for choice in sorted(live.reasons)],
        "prompt_tokens": live.prompt_tokens,
        "completion_tokens": done.num_output_tokens,
        "queue_seconds": since_arrival(live.scheduled_at),
        "first_token_seconds": since_arrival(live.first_token_at),
        "seconds": since_arrival(now),
    }
    if done.error is None:
        logger.info("request finished", extra={"fields": fields})
        return
    fields |= {"code": done.error.code.name, "reason": done.error.reason, "error": done.error.message}
    logger.warning("request failed", extra={"fields": fields})
