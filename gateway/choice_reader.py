"""One choice as its client sees it: deltas, read from the record."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from gateway.live_request import ChoiceRecord
from gateway.output_text import OutputText
from gateway.requests import ChoiceFinished, Delta, Event, FinishReason
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

    @property
    def has_unread_tokens(self) -> bool:
        """The record has tokens that were not read yet."""
        return self._num_read < len(self._record.token_ids)

    def take_events(self) -> list[Event]:
        """Return what the record has that was not read yet: at most one Delta, and with its last tokens the end.

        Raises ServiceError where the scheduler cancelled the choice.
        """
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
