"""A request, its choices as sequences, and when they end."""

from __future__ import annotations

import sys
from enum import Enum

from scheduler_svc.request_record import ChoiceEnd, FinishReason, RequestId, RequestRecord

NEVER = sys.maxsize
"""A number of tokens that no sequence reaches."""


class SequenceStatus(Enum):
    """WAITING holds no blocks; RUNNING holds blocks and a live handle; FINISHED holds nothing."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class SuspectGroup:
    """Sequences that run apart from all others until they are cleared; compared by identity. See suspects.py."""

    __slots__ = ("members",)

    def __init__(self, members: list[Sequence]) -> None:
        self.members = members


class LiveRequest:
    """An accepted request that has not ended. arrival and deadlines are on the engine's clock, in seconds.

    deadline ends it in any state, queue_deadline until it runs first, first_token_deadline until it has a token.
    num_cached_tokens are those of the prompt that its first stay took from the prefix cache.
    """

    __slots__ = (
        "arrival",
        "deadline",
        "first_token_deadline",
        "has_run",
        "num_cached_tokens",
        "num_open",
        "prompt_hashes",
        "queue_deadline",
        "record",
        "sequences",
        "was_started",
    )

    def __init__(self, record: RequestRecord, max_num_tokens: int, now: float) -> None:
        """max_num_tokens: the longest any choice may get, prompt included."""
        self.record = record
        self.arrival = now - record.age
        self.deadline = _later(now, record.remaining_deadline)
        self.queue_deadline = _later(now, record.remaining_queue_ttl)
        self.first_token_deadline = _later(now, record.remaining_first_token)
        self.num_cached_tokens = 0
        # Of the prompt's full blocks, and their size; made by the prefix cache when it first needs them.
        self.prompt_hashes: tuple[int, list[bytes]] = (0, [])
        # Once started it is owed an ending: policies may no longer shed it.
        self.was_started = record.is_resumed
        # What another scheduler has accepted may only have waited there: its time in the queue goes on here.
        self.has_run = record.has_output
        self.sequences = tuple(Sequence(self, index, max_num_tokens) for index in range(len(record.choices)))
        self.num_open = len(self.sequences)

    @property
    def num_output_tokens(self) -> int:
        """Committed tokens of all choices."""
        return sum(len(sequence.output_token_ids) for sequence in self.sequences)


class Sequence:
    """One choice of one live request: counters, block table, handle. Everything else is derived.

    There is no prefill or decode phase: num_computed_tokens catches up with num_tokens + num_placeholders. The
    counters run ahead of the results: num_computed_tokens counts scheduled rows as done, num_placeholders counts the
    tokens that rows in flight will sample. Tokens are committed when their result arrives.

    A *stay* on an executor begins with admission and ends with preemption or the end of the sequence. At most one
    stay has rows in flight, because readmission waits for those of the stay before.
    """

    __slots__ = (
        "block_hashes",
        "block_table",
        "choice",
        "end",
        "group",
        "handle",
        "has_yielded",
        "is_discarding",
        "logprobs",
        "max_num_tokens",
        "num_cached_tokens",
        "num_cached_tokens_untold",
        "num_charged_prompt_tokens",
        "num_computed_tokens",
        "num_deaths",
        "num_deaths_alone",
        "num_failures",
        "num_in_flight_rows",
        "num_passed_blocks",
        "num_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_slots",
        "num_tokens",
        "num_tokens_at_admission",
        "output_token_ids",
        "publish_at",
        "request",
        "request_id",
        "session",
        "status",
        "steady_until",
        "stop_token_ids",
        "stopping",
        "suspect_until",
        "view",
    )

    def __init__(self, request: LiveRequest, choice: int, max_num_tokens: int) -> None:
        record = request.record
        self.request = request
        self.request_id = record.id
        self.choice = choice
        self.stopping = record.stopping
        self.stop_token_ids = record.stopping.stop_token_ids
        self.max_num_tokens = max_num_tokens
        self.num_prompt_tokens = len(record.prompt_token_ids)
        self.output_token_ids = list(record.choices[choice].token_ids)
        self.num_tokens = self.num_prompt_tokens + len(self.output_token_ids)  # committed
        self.num_placeholders = 0
        self.num_computed_tokens = 0
        self.status = SequenceStatus.WAITING
        self.end: ChoiceEnd | None = record.choices[choice].end  # that its gateway is told of
        # Of its tokens, where they are asked for and the request may be taken up: those of one token or several each.
        self.logprobs: list[object] = list(record.choices[choice].logprobs)
        # Where it is placed, waiting or running; 0 is nowhere.
        self.session = 0
        # Of the latest stay in this session; 0 before the first.
        self.handle = 0
        self.block_table: list[int] = []
        self.num_slots = 0  # tokens that block_table has room for
        # The first of block_table that every window has passed: null blocks stand for them.
        self.num_passed_blocks = 0
        # Once so many tokens are computed, one more block is full and can be shared.
        self.publish_at = NEVER
        # Of its full blocks, and their size; the prefix cache makes them.
        self.block_hashes: tuple[int, list[bytes]] = (0, [])
        self.num_cached_tokens = 0  # that this stay took from the prefix cache
        self.num_cached_tokens_untold = 0  # of the request's first stay, where the gateway has not heard of them
        # See begin_steady; 0 outside of it.
        self.steady_until = 0
        self.num_in_flight_rows = 0
        # It was made to give way, so it queues by its key again.
        self.has_yielded = False
        # The stay went wrong: what its rows in flight still bring would leave a gap.
        self.is_discarding = False
        self.num_tokens_at_admission = 0
        # Stays in a row that a failed step or a lost row ended before they committed anything.
        self.num_failures = 0
        # Deaths of executors at which it was in flight, those of them at which it was alone, the number of tokens from
        # which on none of them is its fault, and with whom it runs apart. See suspects.py.
        self.num_deaths = 0
        self.num_deaths_alone = 0
        self.suspect_until = 0
        self.group: SuspectGroup | None = None
        self.num_preemptions = 0
        self.num_charged_prompt_tokens = 0
        self.view = SequenceView(self)

    def __repr__(self) -> str:
        return f"Sequence({self.request_id}, choice {self.choice}, {self.status.name}, handle {self.handle})"

    @property
    def num_known_tokens(self) -> int:
        """Committed tokens and those that rows in flight will sample."""
        return self.num_computed_tokens + 1 if self.steady_until else self.num_tokens + self.num_placeholders

    @property
    def num_held_blocks(self) -> int:
        """Blocks that it holds."""
        return len(self.block_table) - self.num_passed_blocks

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt, then the committed output."""
        return self.request.record.prompt_token_ids + tuple(self.output_token_ids)

    def tokens_between(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens numbered start to end - 1, all committed."""
        first, last = start - self.num_prompt_tokens, end - self.num_prompt_tokens
        if first >= 0:
            return tuple(self.output_token_ids[first:last])
        return self.request.record.prompt_token_ids[start:end] + tuple(self.output_token_ids[: max(0, last)])

    def begin_stay(self, session: int, handle: int, num_cached_tokens: int) -> None:
        """Start from the full record on an executor, where the KV of the first num_cached_tokens is there already."""
        self.status = SequenceStatus.RUNNING
        self.session = session
        self.handle = handle
        self.is_discarding = False
        self.has_yielded = False
        self.num_tokens_at_admission = self.num_tokens
        self.num_computed_tokens = self.num_cached_tokens = num_cached_tokens
        self.request.was_started = True
        if not self.request.has_run:
            self.request.has_run = True
            self.request.num_cached_tokens = self.num_cached_tokens_untold = num_cached_tokens

    def begin_steady(self) -> None:
        """Count less from now on, until end_steady: all that is left of this stay is one token after the other.

        While num_tokens is below steady_until, a token that arrives and is no stop brings nothing but itself. Each row
        computes one token and samples the next, so the counters of what is in flight, which would make each step
        dearer, are not kept: both are num_computed_tokens + 1 - num_tokens.
        """
        self.steady_until = self.max_num_tokens - 1

    def end_steady(self) -> None:
        """Keep all counters again; nothing happens where they are kept."""
        if self.steady_until:
            self.num_placeholders = self.num_in_flight_rows = self.num_computed_tokens + 1 - self.num_tokens
            self.steady_until = 0

    def end_stay(self) -> None:
        """Forget all computed state; tokens in flight are committed when they arrive, not counted on before."""
        self.end_steady()
        self.status = SequenceStatus.WAITING
        self.num_computed_tokens = self.num_cached_tokens = 0
        self.num_placeholders = 0

    def commit(self, token_id: int) -> ChoiceEnd | None:
        """Append a sampled token; returns the end that it brings, if it brings one."""
        self.output_token_ids.append(token_id)
        self.num_tokens += 1
        self.num_failures = 0
        if self.num_placeholders:
            self.num_placeholders -= 1
        self.end = self.end_at(len(self.output_token_ids))
        return self.end

    def keep(self, num_output_tokens: int) -> None:
        """Forget the output past num_output_tokens tokens; for a sequence that is being ended."""
        self.end_steady()
        del self.output_token_ids[max(0, num_output_tokens) :]
        self.num_tokens = self.num_prompt_tokens + len(self.output_token_ids)

    def end_at(self, num_output_tokens: int) -> ChoiceEnd | None:
        """The end that the last of num_output_tokens output tokens brings, or None. A stop beats the length."""
        stopping = self.stopping
        if num_output_tokens > stopping.min_tokens:
            token_id = self.output_token_ids[num_output_tokens - 1]
            if token_id in stopping.stop_token_ids:
                return ChoiceEnd(FinishReason.STOP, token_id)
        if self.num_prompt_tokens + num_output_tokens >= self.max_num_tokens:
            return ChoiceEnd(FinishReason.LENGTH)
        return None

    def find_end(self) -> ChoiceEnd | None:
        """The first end that any committed token brings, or None."""
        ends = (self.end_at(count) for count in range(1, len(self.output_token_ids) + 1))
        return next((end for end in ends if end is not None), None)


def _later(now: float, seconds: float | None) -> float | None:
    return None if seconds is None else now + seconds


class SequenceView:
    """What a policy may know of a sequence: read-only, live, compared by identity."""

    __slots__ = ("_sequence",)

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence

    @property
    def request_id(self) -> RequestId:
        """The request it belongs to."""
        return self._sequence.request_id

    @property
    def choice(self) -> int:
        """Its index in the request."""
        return self._sequence.choice

    @property
    def tenant(self) -> str:
        """Who pays."""
        return self._sequence.request.record.tenant

    @property
    def model(self) -> str:
        """Name of the model."""
        return self._sequence.request.record.model

    @property
    def arrival(self) -> float:
        """When a gateway first accepted the request: seconds on the clock of `now`."""
        return self._sequence.request.arrival

    @property
    def priority(self) -> int:
        """Higher is more urgent, -100 to 100."""
        return self._sequence.request.record.priority

    @property
    def deadline(self) -> float | None:
        """When the request is overdue: seconds on the clock of `now`, or None."""
        return self._sequence.request.deadline

    @property
    def queue_deadline(self) -> float | None:
        """When it has waited too long, if it has not run by then: seconds on the clock of `now`, or None."""
        return self._sequence.request.queue_deadline

    @property
    def first_token_deadline(self) -> float | None:
        """When its first token is overdue: seconds on the clock of `now`, or None."""
        return self._sequence.request.first_token_deadline

    @property
    def status(self) -> SequenceStatus:
        """Waiting or running."""
        return self._sequence.status

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._sequence.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Committed tokens of the output."""
        return len(self._sequence.output_token_ids)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens computed in this stay, rows in flight included."""
        return self._sequence.num_computed_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Of those, the ones whose KV came from the prefix cache."""
        return self._sequence.num_cached_tokens

    @property
    def max_num_tokens(self) -> int:
        """The longest it can get, prompt included."""
        return self._sequence.max_num_tokens

    @property
    def num_blocks(self) -> int:
        """KV blocks it holds."""
        return self._sequence.num_held_blocks

    @property
    def num_preemptions(self) -> int:
        """How often it was preempted."""
        return self._sequence.num_preemptions
