"""The full record of one live request.

The record is also the queue to the client: the scheduler's frames are applied to it at once, and whoever writes to the
client reads from it at a pace of its own. So a slow client holds up nobody, and what it costs is bounded by max_tokens.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import Sequence

from gateway.logprob_record import LogprobRecord, PromptLogprobRecord, RecordError
from gateway.metrics import ModelMetrics
from gateway.requests import (
    ALL_SHOWN,
    CacheParams,
    ChoiceEnd,
    FinishReason,
    LogprobColumns,
    OutputParams,
    SamplingParams,
    SchedulingParams,
    StoppingParams,
)
from octavo.rpc.errors import ServiceError

_REQUEST_ID = re.compile(r"([0-9a-f]{32})-([1-9][0-9]{0,19})")

_END_OF_NOTHING = ChoiceEnd(FinishReason.LENGTH)


def format_request_id(incarnation: str, counter: int) -> str:
    """Return a request's public id: the gateway that minted it, and that gateway's counter."""
    return f"{incarnation}-{counter}"


def parse_request_id(text: str) -> tuple[str, int] | None:
    """Return incarnation and counter of a public id, None for what is none."""
    match = _REQUEST_ID.fullmatch(text)
    if match is None or (counter := int(match[2])) >= 2**64:
        return None
    return match[1], counter


class ChoiceRecord:
    """State of one choice: its tokens, their logprobs where asked for, its end."""

    def __init__(self, top_logprobs: int | None) -> None:
        self.token_ids: list[int] = []
        self.logprobs = None if top_logprobs is None else LogprobRecord(top_logprobs)
        self.end: ChoiceEnd | None = None
        self.is_stopped_here = False
        """A stop string in its text has ended it: what the scheduler sends behind that does not count."""
        self.last_token_at: float | None = None
        self.num_untold = 0
        """Tokens since its reader was last told that there are any."""

    def apply(
        self, first_token_index: int, token_ids: Sequence[int], logprobs: LogprobColumns | None, end: ChoiceEnd | None
    ) -> bool:
        """Append what is new of tokens that may be known already; return whether anything was.

        Raises RecordError on a gap, on a token that differs from a known one, and on anything new behind the end.
        """
        if self.is_stopped_here:
            return False
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

    def stop(self, num_kept: int, stop_string: str) -> None:
        """End the choice behind its first `num_kept` tokens, whatever has come since."""
        del self.token_ids[num_kept:]
        if self.logprobs is not None:
            self.logprobs.keep(num_kept)
        self.end = ChoiceEnd(FinishReason.STOP, stop_string=stop_string)
        self.is_stopped_here = True


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
        tenant: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        stopping: StoppingParams,
        num_choices: int,
        accepted_at: float,
        deadline: float | None,
        traceparent: str,
        scheduling: SchedulingParams,
        cache: CacheParams,
        metrics: ModelMetrics,
        output: OutputParams = ALL_SHOWN,
        resume_grace: float | None = None,
        first_id: tuple[str, int] | None = None,
        stream_interval: int = 1,
    ) -> None:
        """`stream_interval`: of a choice, its first token is told at once, and then so many together, or what there is
        at its end.
        """
        self.counter = counter
        self.id = format_request_id(incarnation, counter)
        self.output = output
        self.resume_grace = resume_grace
        """Seconds that it outlives its client, for whoever takes it up; None: it does not."""
        self.first_id = first_id or (incarnation, counter)
        """What its resume tokens name: the id that it had at the gateway that accepted it."""
        self.resume_token = ""
        self.is_token_told = False
        """Its client has what takes it up, or may have."""
        self.label = label
        self.model = model
        self.model_revision = model_revision
        self.tenant = tenant
        # Prompts are most of what a live request holds: four bytes a token, where a list has forty.
        self.prompt_token_ids: Sequence[int] = array("I", prompt_token_ids)
        self.sampling = sampling
        self.stopping = stopping
        self.choices = [ChoiceRecord(sampling.top_logprobs) for _ in range(num_choices)]
        self.prompt_logprobs: PromptLogprobRecord | None = None
        if sampling.prompt_logprobs is not None:
            self.prompt_logprobs = PromptLogprobRecord(
                sampling.prompt_logprobs, len(prompt_token_ids), sampling.prompt_logprobs_from
            )
        self.accepted_at = accepted_at
        self.deadline = deadline
        self.scheduling = scheduling
        self.cache = cache
        self.queue_deadline = _behind(accepted_at, scheduling.queue_ttl)
        """When it must have run; None: it has, or may take any time."""
        self.first_token_deadline = _behind(accepted_at, scheduling.first_token_target)
        """When there must be a token; None: there is one, or it may take any time."""
        self.num_cached_when_accepted = 0
        """Of the prompt, as the cache was when the scheduler had the request first."""
        self.num_cached_tokens = 0
        """Of the prompt, as the cache was when the request ran first."""
        self.traceparent = traceparent
        self.first_token_at: float | None = None
        self.confirmed = False
        """The scheduler has the request: it said so, or sent tokens."""
        self.error: ServiceError | None = None
        self.is_released = False
        """The scheduler has nothing to do with the request any more."""
        self.changed = asyncio.Event()
        """Set on every change, while only the end is awaited on no token before it; its one waiter clears it."""
        self.news: set[int] = set()
        """Choices with something that their one reader has not read; it takes them out."""
        self._num_unfinished = num_choices
        self._is_end_awaited = False
        self._stream_interval = stream_interval
        # Nothing is asked for beside tokens.
        self._is_plain = stopping.max_tokens > 0 and sampling.top_logprobs is None and self.prompt_logprobs is None
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

    def confirm(self, num_cached_tokens: int) -> None:
        """Note that the scheduler has the request, and how much of its prompt is in the cache now."""
        if not self.confirmed:
            self.confirmed = True
            self.num_cached_when_accepted = min(num_cached_tokens, len(self.prompt_token_ids))
            self.changed.set()

    def note_cached_tokens(self, choice: int, count: int) -> None:
        """Note how much of the prompt a choice, the first that ran, took from the cache."""
        # What a request that is taken up again finds in the cache holds output too, and is no news of its first run.
        if choice < len(self.choices) and not self.choices[choice].token_ids:
            self.num_cached_tokens = min(count, len(self.prompt_token_ids))

    def take_over(
        self, choice: int, token_ids: Sequence[int], logprobs: LogprobColumns | None, end: ChoiceEnd | None
    ) -> None:
        """Fill a choice with what another gateway's record of the request has. Raises RecordError."""
        record = self.choices[choice]
        if token_ids and record.logprobs is not None:
            record.logprobs.append(logprobs, len(token_ids), 0)
        record.token_ids.extend(token_ids)
        record.end = end
        if end is not None:
            self._num_unfinished -= 1
        self.queue_deadline = self.first_token_deadline = None
        self.confirmed = True
        self.news.add(choice)
        self.changed.set()

    def leave_queue(self) -> None:
        """Note that the request has run: its time in the queue is over, and ends it no more."""
        self.queue_deadline = None

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
        if self.stopping.max_tokens == 0:
            # The scheduler gives at least one token, which nobody has asked for.
            token_ids, logprobs = (), None
            end = _END_OF_NOTHING if end and end.reason is FinishReason.STOP else end
        if choice == 0 and self.prompt_logprobs is not None and not self.prompt_logprobs.is_complete:
            raise RecordError(f"output, where {len(self.prompt_logprobs)} logprobs of the prompt are known")
        if not record.apply(first_token_index, token_ids, logprobs, end):
            return
        self.queue_deadline = self.first_token_deadline = None
        if record.end is not None:
            self._num_unfinished -= 1
            self.is_released = self.is_complete
        num_new = len(record.token_ids) - num_known
        if num_new:
            self._note_arrival(record, num_new, now)
        self.confirmed = True
        record.num_untold += num_new
        if record.end is not None or not num_known or record.num_untold >= self._stream_interval:
            self._tell(choice, record)

    def append(self, choice: int, index: int, token_id: int, now: float) -> bool:
        """Apply one token, as `apply` would, where it is the next one of a choice that has some, and nothing is asked
        for beside tokens, as is mostly so; else change nothing and return False.
        """
        if not index or not self._is_plain or choice >= len(self.choices):
            return False
        record = self.choices[choice]
        if index != len(record.token_ids) or record.end is not None or self.error is not None:
            return False
        record.token_ids.append(token_id)
        self._note_arrival(record, 1, now)
        record.num_untold += 1
        if record.num_untold >= self._stream_interval:
            self._tell(choice, record)
        return True

    def _tell(self, choice: int, record: ChoiceRecord) -> None:
        """Tell the reader that a choice has something that it has not read."""
        record.num_untold = 0
        self.news.add(choice)
        # A task that is woken for each token and finds nothing to do costs as much as the token itself.
        if self.is_complete or not self._is_end_awaited:
            self.changed.set()

    def apply_prompt_logprobs(self, first_token_index: int, columns: LogprobColumns) -> None:
        """Apply logprobs of the prompt. Nothing changes after an end. Raises RecordError."""
        if self.has_ended:
            return
        if self.prompt_logprobs is None:
            raise RecordError("logprobs of the prompt came, which nobody had asked for")
        if self.prompt_logprobs.apply(first_token_index, columns):
            self.leave_queue()
            self.confirmed = True
            self.changed.set()

    def stop_choice(self, choice: int, num_kept: int, stop_string: str) -> bool:
        """End a choice whose text has a stop string behind `num_kept` tokens; return whether it was open until now.

        The scheduler is to be told of one that was: with the last it has nothing more to do with the request.
        """
        record = self.choices[choice]
        was_open = record.end is None
        record.stop(num_kept, stop_string)
        if was_open:
            self._num_unfinished -= 1
            self.is_released = self.is_complete
        return was_open and self.error is None

    async def wait_complete(self) -> None:
        """Return once every choice has its end; for the one waiter. Raises the ServiceError that ends the request."""
        self._is_end_awaited = True
        try:
            while not self.is_complete:
                if self.error is not None:
                    raise self.error
                await self.changed.wait()
                self.changed.clear()
        finally:
            self._is_end_awaited = False

    def choices_stopped_here(self) -> list[int]:
        """Return the choices that their text has ended."""
        return [index for index, choice in enumerate(self.choices) if choice.is_stopped_here]

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
            assert choice.is_stopped_here == (choice.end.stop_string is not None), f"{where}: stopped by whom?"
            if choice.is_stopped_here:
                assert choice.token_ids, f"{where}: stopped by its text without a token"
            elif choice.end.reason is FinishReason.STOP:
                assert choice.token_ids[-1:] == [choice.end.stop_token_id], f"{where}: not ended by its last token"
            elif choice.end.reason is FinishReason.LENGTH and self.stopping.max_tokens:
                assert choice.token_ids, f"{where}: ended by length without a token"

    def _note_arrival(self, record: ChoiceRecord, num_tokens: int, now: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = now
            self._metrics.first_token.observe(now - self.accepted_at)
        self._metrics.take(num_tokens, None if record.last_token_at is None else now - record.last_token_at)
        record.last_token_at = now


def _behind(start: float, seconds: float | None) -> float | None:
    return None if seconds is None else start + seconds
