"""What one request is, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from octavo.terminal.errors import CommandError

OK = "ok"
CANCELLED = "cancelled"
"""Status of a request that the generator itself cut short, at Ctrl-C. Neither a success nor the server's error."""


class BenchError(CommandError):
    """A run that cannot be made; the message is for the user and says what to do."""


class RequestFailed(Exception):  # noqa: N818 - an outcome of one request, not a fault of the program
    """The end of one request that did not succeed. `status` is a code to count by: RESOURCE_EXHAUSTED, HTTP_429."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request to send. `arrival` is in seconds after the start of the run; None in a closed loop."""

    prompt: str | Sequence[int]
    max_tokens: int
    arrival: float | None = None


@dataclass(slots=True)
class Record:
    """What became of one request. Times are readings of the run's clock, in seconds.

    The target appends to `stamps` and `delta_tokens` at each delivery of tokens and sets the counts at the end; the
    runner sets the rest.
    """

    index: int
    asked_tokens: int
    scheduled: float
    """When the request was to be sent: its arrival; in a closed loop, when its turn came."""
    sent: float
    """When it was sent. Later than `scheduled` only where the generator fell behind."""
    stamps: list[float] = field(default_factory=list)
    """When each delivery of at least one token came."""
    delta_tokens: list[int] = field(default_factory=list)
    """Tokens in each delivery; 1 where the server does not tell."""
    ended: float = 0.0
    status: str = ""
    """OK, CANCELLED, or the error's code; empty while it is live."""
    message: str = ""
    prompt_tokens: int | None = None
    """As the server counted them; None where it did not say."""
    output_tokens: int = 0
    is_counted_by_server: bool = False
    """Whether `output_tokens` is the server's count. Else it is the number of deliveries."""

    @property
    def lag(self) -> float:
        """Seconds by which the generator was late."""
        return self.sent - self.scheduled

    @property
    def ttft(self) -> float | None:
        """Seconds from the scheduled arrival to the first token; None where none came."""
        return self.stamps[0] - self.scheduled if self.stamps else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive deliveries of tokens."""
        return [later - earlier for earlier, later in pairwise(self.stamps)]

    @property
    def tpot(self) -> float | None:
        """Seconds a token, over the tokens that came after the first delivery; None where none did."""
        if len(self.stamps) < 2:
            return None
        later_tokens = self.output_tokens - self.delta_tokens[0]
        return (self.stamps[-1] - self.stamps[0]) / later_tokens if later_tokens > 0 else None

    @property
    def e2e(self) -> float:
        """Seconds from the scheduled arrival to the end of the stream."""
        return self.ended - self.scheduled
