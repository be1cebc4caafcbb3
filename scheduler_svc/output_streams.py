"""What the scheduler owes each gateway: numbered frames, kept until the gateway acknowledges them.

The step loop only ever adds to these lists; it never waits for a gateway. What a gateway has not acknowledged is
bounded in bytes: past the bound its frames are thrown away and its stream is closed. Nothing is lost by that, since
the gateway holds the full record of every live request: after its next Hello it is told that they are unknown and
submits them again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import grpc

from octavo.rpc.errors import FieldViolation, ServiceError, invalid_argument
from scheduler_svc.batch import Event, RequestDone, StepTokens, TokensOut
from scheduler_svc.convert import Frame, finished_frame, step_outputs_frame

MAX_UNACKNOWLEDGED_BYTES = 16 * 1024 * 1024
"""Bound on one gateway's unacknowledged frames: half a minute of 64 streams with 20 logprobs each at 50 tokens/s."""

MAX_REMEMBERED_GATEWAYS = 1024
"""Departed gateways whose last sequence number is remembered, in case they come back."""


def lapsed_error() -> ServiceError:
    """Return the status of a stream whose gateway does not keep up."""
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "GATEWAY_TOO_SLOW",
        "too many outputs without an acknowledgement; attach again and submit the live requests",
        retry_delay=0.0,
    )


class _Kept(NamedTuple):
    sequence: int
    frame: Frame
    num_bytes: int
    finished: int | None


def _nobody() -> None:
    """Notify no one: no stream is attached."""


def _choices(tokens: StepTokens) -> Iterable[tuple[int, int]]:
    return zip(tokens.requests, tokens.choices, strict=True)


class OutputStream:
    """The outputs of one gateway incarnation, in order: sent ones, unsent ones, then those that have no frame yet.

    A frame takes the outputs of one step. Where several executors answer before the gateway's stream is written to,
    their outputs share one; a second output of the same choice starts the next. `notify` is called when there is
    something to write and when the stream has lapsed.
    """

    def __init__(self, first_sequence: int, limit_bytes: int) -> None:
        self.notify: Callable[[], None] = _nobody
        self.lapsed = False
        self.num_bytes = 0
        self.next_sequence = first_sequence
        self._limit_bytes = limit_bytes
        self._sent: deque[_Kept] = deque()
        self._unsent: deque[_Kept] = deque()
        self._highest_sent = first_sequence - 1
        self._tokens: dict[tuple[int, int], TokensOut] = {}
        self._plain: list[StepTokens] = []
        # Whom `_plain` tells of, but for the last `_num_unlisted` of it: mostly nobody asks.
        self._plain_choices: set[tuple[int, int]] = set()
        self._num_unlisted = 0
        self._done: list[RequestDone] = []
        self._finished: set[int] = set()

    @property
    def finished_requests(self) -> frozenset[int]:
        """Requests that have ended and whose Finished is not acknowledged yet."""
        return frozenset(self._finished)

    def owes_finish_of(self, counter: int) -> bool:
        """Whether the request has ended and its Finished is not acknowledged yet."""
        return counter in self._finished

    def add(self, event: Event) -> None:
        """Add one event of a step. Call `flush` after the step's last."""
        if self.lapsed:
            return
        if isinstance(event, StepTokens):
            self._add_plain(event)
            return
        counter = event.request[1]
        if isinstance(event, RequestDone):
            self._finished.add(counter)
            self._done.append(event)
            return
        choice = (counter, event.choice)
        if choice in self._tokens or choice in self._listed_choices():
            self._make_frames()
        self._tokens[choice] = event

    def flush(self) -> None:
        """End a step: check the bound and wake whoever writes."""
        if self.num_bytes > self._limit_bytes:
            self.lapsed = True
            self._sent.clear()
            self._unsent.clear()
            self._tokens.clear()
            self._clear_plain()
            self._done.clear()
            self._finished.clear()
            self.num_bytes = 0
        self.notify()

    def next_frame(self) -> Frame | None:
        """Return the next frame to send, kept until acknowledged, or None."""
        if not self._unsent:
            self._make_frames()
            if not self._unsent:
                return None
        kept = self._unsent.popleft()
        self._sent.append(kept)
        self._highest_sent = max(self._highest_sent, kept.sequence)
        return kept.frame

    def rewind(self) -> None:
        """Begin again with the first frame that is not acknowledged: a new stream has taken the place of the old."""
        self._unsent.extendleft(reversed(self._sent))
        self._sent.clear()

    def acknowledge(self, sequence: int) -> None:
        """Forget the frames up to `sequence`. Raises ServiceError where that one was never sent."""
        if sequence > self._highest_sent:
            description = f"must be at most {self._highest_sent}, the last that was sent"
            raise invalid_argument([FieldViolation("ack.sequence", description)])
        # A frame that is to be sent again can be acknowledged too: the gateway had it from the stream before.
        for frames in (self._sent, self._unsent):
            while frames and frames[0].sequence <= sequence:
                kept = frames.popleft()
                self.num_bytes -= kept.num_bytes
                if kept.finished is not None:
                    self._finished.discard(kept.finished)

    def _add_plain(self, tokens: StepTokens) -> None:
        # Mostly nothing is left of steps before, and what the step itself has told already is of few choices.
        if (self._tokens or self._plain) and self._has_any(_choices(tokens)):
            self._make_frames()
        self._plain.append(tokens)
        self._num_unlisted += 1

    def _has_any(self, choices: Iterable[tuple[int, int]]) -> bool:
        listed = self._listed_choices()
        return any(choice in listed or choice in self._tokens for choice in choices)

    def _listed_choices(self) -> set[tuple[int, int]]:
        for tokens in self._plain[len(self._plain) - self._num_unlisted :]:
            self._plain_choices.update(_choices(tokens))
        self._num_unlisted = 0
        return self._plain_choices

    def _clear_plain(self) -> None:
        self._plain.clear()
        self._plain_choices.clear()
        self._num_unlisted = 0

    def _make_frames(self) -> None:
        if self._tokens or self._plain:
            self._keep(step_outputs_frame(self.next_sequence, self._tokens.values(), self._plain), None)
            self._tokens.clear()
            self._clear_plain()
        for done in self._done:
            self._keep(finished_frame(self.next_sequence, done), done.request[1])
        self._done.clear()

    def _keep(self, frame: Frame, finished: int | None) -> None:
        num_bytes = frame.ByteSize()
        self._unsent.append(_Kept(self.next_sequence, frame, num_bytes, finished))
        self.num_bytes += num_bytes
        self.next_sequence += 1


class OutputStreams:
    """The output streams of all gateways, by incarnation."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._streams: dict[str, OutputStream] = {}
        self._next_sequences: OrderedDict[str, int] = OrderedDict()

    def open(self, incarnation: str) -> OutputStream:
        """Return a gateway's stream, a new one where it has none."""
        stream = self._streams.get(incarnation)
        if stream is None:
            # Numbers go on where a discarded stream left off: the gateway may have seen those before.
            stream = OutputStream(self._next_sequences.pop(incarnation, 1), self._limit_bytes)
            self._streams[incarnation] = stream
        return stream

    def has(self, incarnation: str) -> bool:
        """Whether a gateway has a stream, so that nothing of what its requests have got since is lost."""
        return incarnation in self._streams

    def discard(self, incarnation: str) -> None:
        """Drop a gateway's stream and all it kept; events for it are dropped from now on."""
        stream = self._streams.pop(incarnation, None)
        if stream is None:
            return
        self._next_sequences[incarnation] = stream.next_sequence
        if len(self._next_sequences) > MAX_REMEMBERED_GATEWAYS:
            self._next_sequences.popitem(last=False)

    def publish(self, events: Iterable[Event]) -> None:
        """Take in the events of one engine call, in order."""
        touched: dict[str, OutputStream] = {}
        for event in events:
            incarnation = event.gateway if isinstance(event, StepTokens) else event.request[0]
            stream = self._streams.get(incarnation)
            if stream is not None:
                stream.add(event)
                touched[incarnation] = stream
        for stream in touched.values():
            stream.flush()
