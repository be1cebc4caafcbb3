"""How requests end, once each: what is counted, logged and told to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import grpc

from gateway.requests import CancelReason, FinishReason


class Outcome(Enum):
    """What became of a request."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Ending:
    """One way to end. `reason` is of a small set for each outcome: those of ALL_ENDINGS."""

    outcome: Outcome
    reason: str


FINISHED: dict[FinishReason, Ending] = {
    reason: Ending(Outcome.FINISHED, reason.value) for reason in (FinishReason.STOP, FinishReason.LENGTH)
}
"""Every choice has its end, and the client was told. LENGTH where it is the end of any choice."""
CANCELLED: dict[CancelReason, Ending] = {reason: Ending(Outcome.CANCELLED, reason.value) for reason in CancelReason}
"""Somebody wanted the end."""
FAILED: dict[grpc.StatusCode, Ending] = {
    code: Ending(Outcome.FAILED, code.name.lower()) for code in grpc.StatusCode if code is not grpc.StatusCode.OK
}
"""The client got an error that nobody asked for."""
ALL_ENDINGS: tuple[Ending, ...] = (*FINISHED.values(), *FAILED.values(), *CANCELLED.values())
