"""What a gateway that takes a request up needs and the rest of the record does not tell: kept unread by the scheduler.

JSON, so that gateways of two versions understand one another during an upgrade: what is missing has its default.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from gateway.live_request import LiveRequest
from gateway.requests import OutputParams


@dataclass(frozen=True)
class ResumeState:
    """`max_tokens` 0: nothing is generated. `stop`: stop strings. Cached tokens: as the client was told, or will be."""

    output: OutputParams
    max_tokens: int
    stop: tuple[str, ...]
    num_cached_when_accepted: int
    num_cached_tokens: int


def state_from(request: LiveRequest) -> bytes:
    """Return the state of a request."""
    state = {
        "output": dataclasses.asdict(request.output),
        "max_tokens": request.stopping.max_tokens,
        "stop": request.stopping.stop,
        "num_cached_when_accepted": request.num_cached_when_accepted,
        "num_cached_tokens": request.num_cached_tokens,
    }
    return json.dumps(state, separators=(",", ":")).encode()


def state_of(data: bytes, max_tokens: int) -> ResumeState:
    """Return a state; `max_tokens` where it has none. Raises ValueError for what is none."""
    state = json.loads(data or b"{}")
    known = {field.name for field in dataclasses.fields(OutputParams)}
    output = {name: value for name, value in state.get("output", {}).items() if name in known}
    return ResumeState(
        OutputParams(**output),
        state.get("max_tokens", max_tokens),
        tuple(state.get("stop", ())),
        state.get("num_cached_when_accepted", 0),
        state.get("num_cached_tokens", 0),
    )
