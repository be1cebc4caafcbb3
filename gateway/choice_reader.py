"""One choice as its client sees it: deltas, read from the record."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from gateway.live_request import ChoiceRecord
from gateway.output_text import OutputText
from gateway.requests import ChoiceFinished, Delta, Event, FinishReason, ResumePosition
from octavo.rpc.errors import ServiceError

MAX_DELTA_TOKENS = 256
"""A client that fell behind by an hour catches up in messages of a bounded size, each made in a few milliseconds."""

OnStop = Callable[[int, int, str], None]
"""Ends a choice in its record: takes its index, how many of its tokens count, and the stop string."""


class ChoiceReader:
    """Reads a choice's record from a cursor of its own."""

    def __init__(
        self, index: int, record: ChoiceRecord, text: OutputText, on_stop: OnStop, *, has_logprobs: bool
    ) -> None:
        """`has_logprobs`: the client has asked for those that the record has."""
        self._index = index
        self._record = record
        self._text = text
        self._on_stop = on_stop
        self._has_logprobs = has_logprobs
        self._num_read = 0
        self._position: ResumePosition | None = None

    def resume_at(self, position: ResumePosition) -> None:
        """Begin where the reader of another stream was, and not at the first token."""
        self._position = position

    @property
    def has_unread_tokens(self) -> bool:
        """The record has tokens that were not read yet."""
        return self._num_read < len(self._record.token_ids)

    def take_events(self) -> list[Event]:
        """Return what the record has that was not read yet: at most one Delta, and with its last tokens the end.

        Raises ServiceError where the scheduler cancelled the choice.
        """
        if self._position is not None:
            position, self._position = self._position, None
            return self._catch_up(position)
        record, start = self._record, self._num_read
        token_ids = record.token_ids[start : start + MAX_DELTA_TOKENS]
        end = record.end if start + len(token_ids) == len(record.token_ids) else None
        if end is not None and end.reason is FinishReason.CANCELLED:
            message = "the request was cancelled in the cell"
            raise ServiceError(grpc.StatusCode.CANCELLED, "CANCELLED_IN_CELL", message)
        text, num_kept = self._text.push(token_ids, end)
        self._num_read += num_kept
        if self._text.stop_string is not None:
            self._on_stop(self._index, self._num_read, self._text.stop_string)
            token_ids, end = token_ids[:num_kept], record.end
        events: list[Event] = []
        if token_ids or text:
            logprobs = record.logprobs if self._has_logprobs else None
            columns = None if logprobs is None else logprobs.slice(start, self._num_read)
            events.append(Delta(self._index, start, text, token_ids, columns))
        if end is not None:
            events.append(ChoiceFinished(self._index, end, self._num_read))
        return events

    def _catch_up(self, position: ResumePosition) -> list[Event]:
        """Go over what was read already; return what of its text was not, and the end where there is nothing behind it.

        Text is a function of the tokens, so what they gave before is known.
        """
        record, num_tokens = self._record, position.num_tokens
        if num_tokens > len(record.token_ids):
            raise _bad_position(self._index, f"{num_tokens} tokens, the request has {len(record.token_ids)}")
        end = record.end if num_tokens == len(record.token_ids) else None
        text, num_kept = self._text.push(record.token_ids[:num_tokens], end)
        self._num_read = num_kept
        if self._text.stop_string is not None:
            self._on_stop(self._index, num_kept, self._text.stop_string)
            end = record.end
        data = text.encode()
        try:
            rest = data[position.text_bytes :].decode()
        except UnicodeDecodeError:
            rest = None
        if num_kept != num_tokens or position.text_bytes > len(data) or rest is None:
            what = f"{position.text_bytes} bytes of text, where {num_tokens} tokens have {len(data)}"
            raise _bad_position(self._index, what)
        events: list[Event] = []
        if rest:
            events.append(Delta(self._index, num_kept, rest, (), None))
        if end is not None:
            events.append(ChoiceFinished(self._index, end, num_kept))
        return events


def _bad_position(choice: int, what: str) -> ServiceError:
    message = f"resume.positions: choice {choice} cannot have been read to {what}"
    return ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "BAD_POSITION", message)
