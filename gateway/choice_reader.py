"""One choice as its client sees it: deltas of text, read from the record.

What is to be done to text on its way out belongs here, between the detokenizer and the Delta.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from gateway.detokenizer import Detokenizer
from gateway.live_request import ChoiceRecord
from gateway.requests import ChoiceFinished, Delta, Event, FinishReason
from gateway.vocabulary import Vocabulary
from octavo.rpc.errors import ServiceError

MAX_DELTA_TOKENS = 256
"""A client that fell behind by an hour catches up in messages of a bounded size, each made in a few milliseconds."""


class ChoiceReader:
    """Reads a choice's record from a cursor of its own."""

    def __init__(
        self, index: int, record: ChoiceRecord, vocabulary: Vocabulary, prompt_token_ids: Sequence[int]
    ) -> None:
        self._index = index
        self._record = record
        self._detokenizer = Detokenizer(vocabulary, prompt_token_ids)
        self._num_read = 0

    @property
    def has_unread_tokens(self) -> bool:
        """The record has tokens that were not read yet."""
        return self._num_read < len(self._record.token_ids)

    def take_events(self) -> list[Event]:
        """Return what the record has that was not read yet: at most one Delta, and with its last tokens the end.

        Raises ServiceError where the scheduler cancelled the choice.
        """
        start = self._num_read
        token_ids = self._record.token_ids[start : start + MAX_DELTA_TOKENS]
        self._num_read += len(token_ids)
        end = None if self.has_unread_tokens else self._record.end
        if end is None:
            text = self._detokenizer.push(token_ids)
        elif end.reason is FinishReason.CANCELLED:
            message = "the request was cancelled in the cell"
            raise ServiceError(grpc.StatusCode.CANCELLED, "CANCELLED_IN_CELL", message)
        else:
            # The token that stopped the choice is no part of its text.
            shown = token_ids[:-1] if end.reason is FinishReason.STOP else token_ids
            text = self._detokenizer.push(shown) + self._detokenizer.flush()
        events: list[Event] = []
        if token_ids or text:
            logprobs = self._record.logprobs
            columns = None if logprobs is None else logprobs.slice(start, self._num_read)
            events.append(Delta(self._index, start, text, token_ids, columns))
        if end is not None:
            events.append(ChoiceFinished(self._index, end, self._num_read))
        return events
