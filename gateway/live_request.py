"""The full record of one live request.

The record is also the queue to the client: the scheduler's frames are applied to it at once, and whoever writes to the
client reads from it at a pace of its own. So a slow client holds up nobody, and what it costs is bounded by max_tokens.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import Sequence

from gateway.metrics import ModelMetrics
from gateway.requests import ChoiceEnd, FinishReason, LogprobColumns, SamplingParams, StoppingParams
from octavo.rpc.errors import ServiceError

_REQUEST_ID = re.compile(r"([0-9a-f]{32})-([1-9][0-9]{0,19})")


def format_request_id(incarnation: str, counter: int) -> str:
    """Return a request's public id: the gateway that minted it, and that gateway's counter."""
    return f"{incarnation}-{counter}"


def parse_request_id(text: str) -> tuple[str, int] | None:
    """Return incarnation and counter of a public id, None for what is none."""
    match = _REQUEST_ID.fullmatch(text)
    if match is None or (counter := int(match[2])) >= 2**64:
        return None
    return match[1], counter


class RecordError(Exception):
    """The scheduler sent what cannot follow from the record: a bug on one of the two sides."""


class LogprobRecord:
    """Logprobs of a choice's tokens, in flat arrays that grow; `num_top` alternatives a token."""

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self._sampled = bytearray()
        self._top_token_ids = bytearray()
        self._top_logprobs = bytearray()

    def __len__(self) -> int:
        return len(self._sampled) // 4

    def append(self, columns: LogprobColumns | None, num_tokens: int, skip: int) -> None:
        """Append those of `num_tokens` tokens, less the first `skip`. Raises RecordError where the sizes do not fit."""
        if columns is None:
            raise RecordError("tokens came without the logprobs that were asked for")
        top_bytes = 4 * num_tokens * self.num_top
        sizes = (columns.num_top, len(columns.sampled), len(columns.top_token_ids), len(columns.top_logprobs))
        if sizes != (self.num_top, 4 * num_tokens, top_bytes, top_bytes):
            raise RecordError(f"logprobs of {num_tokens} tokens with {self.num_top} alternatives have sizes {sizes}")
        self._sampled += columns.sampled[4 * skip :]
        self._top_token_ids += columns.top_token_ids[4 * skip * self.num_top :]
        self._top_logprobs += columns.top_logprobs[4 * skip * self.num_top :]

    def slice(self, start: int, stop: int) -> LogprobColumns:
        """Return those of tokens `start` to `stop`."""
        top = slice(4 * start * self.num_top, 4 * stop * self.num_top)
        return LogprobColumns(
            self.num_top,
            bytes(self._sampled[4 * start : 4 * stop]),
            bytes(self._top_token_ids[top]),
            bytes(self._top_logprobs[top]),
        )


class ChoiceRecord:
    """State of one choice: its tokens, their logprobs where asked for, its end."""

    def __init__(self, top_logprobs: int | None) -> None:
        self.token_ids: list[int] = []
        self.logprobs = None if top_logprobs is None else LogprobRecord(top_logprobs)
        self.end: ChoiceEnd | None = None
        self.last_token_at: float | None = None

    def apply(
        self, first_token_index: int, token_ids: Sequence[int], logprobs: LogprobColumns | None, end: ChoiceEnd | None
    ) -> bool:
        """Append what is new of tokens that may be known already; return whether anything was.

        Raises RecordError on a gap, on a token that differs from a known one, and on anything new behind the end.
        """
        num_known = len(self.token_ids)
        if first_token_index > num_known:
            raise RecordError(f"a gap: tokens from index {first_token_index} on, where {num_known} are known")
        skip = min(num_known - first_token_index, len(token_ids))
        if skip and self.token_ids[first_token_index : first_token_index + skip] != list(token_ids[:skip]):
            raise RecordError(f"tokens {list(token_ids[:skip])} at index {first_token_index} are not those known")
        is_new = skip < len(token_ids) or (end is not None and self.end is None)
        if is_new and self.end is not None:
            raise RecordError(f"{len(token_ids) - skip} tokens behind the end of the choice")
        if skip < len(token_ids):
            if self.logprobs is not None:
                self.logprobs.append(logprobs, len(token_ids), skip)
            self.token_ids.extend(token_ids[skip:])
        if self.end is None:
            self.end = end
        return is_new


class LiveRequest:
    """One request from its acceptance by the gateway to its end. Times are seconds of the event loop's clock.

    It ends once: with `error`, or when every choice has its end.
    """

    def __init__(
        self,
        *,
        counter: int,
        incarnation: str,
        label: str,
        model: str,
        model_revision: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        stopping: StoppingParams,
        num_choices: int,
        accepted_at: float,
        deadline: float | None,
        traceparent: str,
        metrics: ModelMetrics,
    ) -> None:
        self.counter = counter
        self.id = format_request_id(incarnation, counter)
        self.label = label
        self.model = model
        self.model_revision = model_revision
        # Prompts are most of what a live request holds: four bytes a token, where a list has forty.
        self.prompt_token_ids: Sequence[int] = array("I", prompt_token_ids)
        self.sampling = sampling
        self.stopping = stopping
        self.choices = [ChoiceRecord(sampling.top_logprobs) for _ in range(num_choices)]
        self.accepted_at = accepted_at
        self.deadline = deadline
        self.traceparent = traceparent
        self.first_token_at: float | None = None
        self.confirmed = False
        """The scheduler has the request: it said so, or sent tokens."""
        self.error: ServiceError | None = None
        self.is_released = False
        """The scheduler has nothing to do with the request any more."""
        self.changed = asyncio.Event()
        """Set on every change; its one waiter clears it."""
        self.news: set[int] = set()
        """Choices with something that their one reader has not read; it takes them out."""
        self._num_unfinished = num_choices
        self._metrics = metrics

    @property
    def is_complete(self) -> bool:
        """Every choice has its end."""
        return self._num_unfinished == 0

    @property
    def has_ended(self) -> bool:
        """Nothing more can come."""
        return self.error is not None or self.is_complete

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)

    def confirm(self) -> None:
        """Note that the scheduler has the request."""
        if not self.confirmed:
            self.confirmed = True
            self.changed.set()

    def apply(
        self,
        choice: int,
        first_token_index: int,
        token_ids: Sequence[int],
        logprobs: LogprobColumns | None,
        end: ChoiceEnd | None,
        now: float,
    ) -> None:
        """Apply what one choice got. Nothing changes after an end. Raises RecordError."""
        if self.has_ended:
            return
        if choice >= len(self.choices):
            raise RecordError(f"output for choice {choice} of {len(self.choices)}")
        record = self.choices[choice]
        num_known = len(record.token_ids)
        if not record.apply(first_token_index, token_ids, logprobs, end):
            return
        if record.end is not None:
            self._num_unfinished -= 1
            self.is_released = self.is_complete
        if len(record.token_ids) > num_known:
            self._note_arrival(record, len(record.token_ids) - num_known, now)
        self.confirmed = True
        self.news.add(choice)
        self.changed.set()

    def fail(self, error: ServiceError, *, released: bool) -> None:
        """End with an error, unless ended already. `released`: by word of the scheduler, which need not be told."""
        if not self.has_ended:
            self.error = error
            self.is_released = released
            self.changed.set()

    def check_invariants(self) -> None:
        """Raise AssertionError where the record contradicts itself."""
        assert self._num_unfinished == sum(choice.end is None for choice in self.choices)
        for index, choice in enumerate(self.choices):
            where = f"request {self.id} choice {index}"
            assert len(choice.token_ids) <= self.stopping.max_tokens, f"{where}: more than max_tokens"
            assert choice.logprobs is None or len(choice.logprobs) == len(choice.token_ids), f"{where}: logprobs"
            if choice.end is None:
                continue
            if choice.end.reason is FinishReason.STOP:
                assert choice.token_ids[-1:] == [choice.end.stop_token_id], f"{where}: not ended by its last token"
            if choice.end.reason is FinishReason.LENGTH:
                assert choice.token_ids, f"{where}: ended by length without a token"

    def _note_arrival(self, record: ChoiceRecord, num_tokens: int, now: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = now
            self._metrics.first_token.observe(now - self.accepted_at)
        self._metrics.take(num_tokens, None if record.last_token_at is None else now - record.last_token_at)
        record.last_token_at = now
