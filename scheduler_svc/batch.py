"""What goes to an executor, what comes back, and what the engine tells the gateways.

Rows travel as columns: a step has up to thousands of rows, nearly all alike, and an object for each would cost more
than all the rest. ScheduledRow and RowResult are one row, for whoever looks at single ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

from octavo.rpc.errors import ServiceError
from scheduler_svc.request_record import ChoiceEnd, RequestId, StoppingParams


@dataclass(frozen=True)
class ExecutorSpec:
    """What an executor says of itself when it joins. num_blocks counts the null block; lengths are in tokens."""

    address: str
    incarnation: str
    model: str
    model_revision: str
    tokenizer_hash: str
    fingerprint: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    window: int = 0
    """No layer reads KV that lies further back, in tokens, the reading one included; 0: a layer reads all of it."""


@dataclass(frozen=True)
class NewSequence:
    """A sequence that the executor does not hold yet, in full. token_ids is the prompt, then the committed output.

    num_cached_tokens of them, from the first, have their KV in the blocks of the row.

    request and queue_seconds are for the scheduler's own log and figures; the executor is not told. queue_seconds is
    the time from the request's acceptance by a gateway to this first admission; None where it had started before.
    """

    request: RequestId
    handle: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    choice: int
    sampling: object
    stopping: StoppingParams
    queue_seconds: float | None = None
    num_cached_tokens: int = 0


class ScheduledRow(NamedTuple):
    """One sequence's share of a step.

    num_computed_tokens is the number of tokens whose KV exists before the row runs: a checksum. new_blocks are
    appended to the executor's block table of the handle. A row that reaches the sequence's last known token samples
    one.
    """

    handle: int
    num_scheduled_tokens: int
    num_computed_tokens: int
    new_blocks: tuple[int, ...]


class RowColumns(NamedTuple):
    """The rows of a step, column by column; nobody changes them. new_blocks: by row, in order, where there are any."""

    handles: Sequence[int]
    num_scheduled_tokens: Sequence[int]
    num_computed_tokens: Sequence[int]
    new_blocks: Mapping[int, tuple[int, ...]]

    @classmethod
    def of(cls, rows: Iterable[ScheduledRow]) -> RowColumns:
        """Return the columns of some rows."""
        given = list(rows)
        return cls(
            [row.handle for row in given],
            [row.num_scheduled_tokens for row in given],
            [row.num_computed_tokens for row in given],
            {index: row.new_blocks for index, row in enumerate(given) if row.new_blocks},
        )

    def rows(self) -> tuple[ScheduledRow, ...]:
        """Return the rows one by one."""
        columns = zip(self.handles, self.num_scheduled_tokens, self.num_computed_tokens, strict=True)
        return tuple(
            ScheduledRow(handle, scheduled, computed, self.new_blocks.get(index, ()))
            for index, (handle, scheduled, computed) in enumerate(columns)
        )


@dataclass(frozen=True)
class ScheduledBatch:
    """One step. Order of effect: releases, new sequences, then the rows. Without rows it only carries releases.

    num_tokens is what all rows together compute.
    """

    session: int
    step: int
    released_handles: tuple[int, ...]
    new_sequences: tuple[NewSequence, ...]
    columns: RowColumns
    num_tokens: int

    @property
    def num_rows(self) -> int:
        """How many sequences it computes tokens for."""
        return len(self.columns.handles)

    @property
    def rows(self) -> tuple[ScheduledRow, ...]:
        """The rows one by one."""
        return self.columns.rows()


class RowStatus(Enum):
    """What became of a row; as in the executor's contract."""

    OK = "ok"
    SKIPPED = "skipped"
    NAN = "nan"
    BAD_INPUT = "bad_input"
    DESYNC = "desync"


class RowResult(NamedTuple):
    """The answer to one row. Both kinds of logprobs are passed through unread; those of the prompt, where there are
    any, come with whichever row computes the tokens before.
    """

    handle: int
    status: RowStatus
    token_ids: tuple[int, ...]
    logprobs: object | None
    prompt_logprobs: object | None = None


class ResultColumns(NamedTuple):
    """The answers to a step's rows, column by column; nobody changes them.

    token_ids: of all rows, one after the other, num_sampled_tokens of each. The others are by row: statuses of the rows
    that are not OK, and logprobs where there are any.
    """

    handles: Sequence[int]
    num_sampled_tokens: Sequence[int]
    token_ids: Sequence[int]
    statuses: Mapping[int, RowStatus]
    logprobs: Mapping[int, object]
    prompt_logprobs: Mapping[int, object]

    @classmethod
    def of(cls, rows: Iterable[RowResult]) -> ResultColumns:
        """Return the columns of some rows."""
        given = list(rows)
        numbered = list(enumerate(given))
        return cls(
            [row.handle for row in given],
            [len(row.token_ids) for row in given],
            [token_id for row in given for token_id in row.token_ids],
            {index: row.status for index, row in numbered if row.status is not RowStatus.OK},
            {index: row.logprobs for index, row in numbered if row.logprobs is not None},
            {index: row.prompt_logprobs for index, row in numbered if row.prompt_logprobs is not None},
        )

    def rows(self) -> tuple[RowResult, ...]:
        """Return the rows one by one."""
        starts = accumulate(self.num_sampled_tokens[:-1], initial=0)
        return tuple(self.row(index, start) for index, start in zip(range(len(self.handles)), starts, strict=False))

    def row(self, index: int, start: int) -> RowResult:
        """Return one row, whose tokens begin at `start`."""
        return RowResult(
            self.handles[index],
            self.statuses.get(index, RowStatus.OK),
            tuple(self.token_ids[start : start + self.num_sampled_tokens[index]]),
            self.logprobs.get(index),
            self.prompt_logprobs.get(index),
        )


NO_RESULTS = ResultColumns((), (), (), {}, {}, {})
"""Of a step that failed, or had no rows."""


class StepFailureReason(Enum):
    """Why a whole step failed; as in the executor's contract."""

    OUT_OF_MEMORY = "out_of_memory"
    INTERNAL = "internal"
    REFUSED = "refused"


class StageTimings(NamedTuple):
    """Where the executor's time went, in seconds. queue: from the arrival of the step to the start of work on it.

    idle: how long the device did nothing before it; None where the step had nothing to go on with. ahead: what was done
    for the step while the one before it computed; None where nothing was.
    """

    queue: float
    prepare: float
    forward: float
    sample: float
    idle: float | None = None
    ahead: float | None = None


@dataclass(frozen=True)
class BatchResult:
    """The answer to one batch, rows in the order of the batch; a failed step has neither rows nor timings."""

    session: int
    step: int
    columns: ResultColumns
    failure: StepFailureReason | None = None
    message: str = ""
    timings: StageTimings | None = None

    @property
    def rows(self) -> tuple[RowResult, ...]:
        """The rows one by one."""
        return self.columns.rows()


class TokensOut(NamedTuple):
    """New tokens of one choice, its end, logprobs of its prompt, or several of these.

    first_token_index counts the choice's tokens before these; num_cached_tokens is 0 where there are none, or where the
    gateway has been told.
    """

    request: RequestId
    choice: int
    first_token_index: int
    token_ids: tuple[int, ...]
    logprobs: object | None
    end: ChoiceEnd | None
    prompt_logprobs: object | None = None
    num_cached_tokens: int = 0


class StepTokens(NamedTuple):
    """What the requests of one gateway got in a step, of the choices that got one token and nothing else.

    Columns, which nobody changes: the request's counter, the choice, the index of the token in the choice, the token.
    """

    gateway: str
    requests: Sequence[int]
    choices: Sequence[int]
    token_indexes: Sequence[int]
    token_ids: Sequence[int]


class RequestDone(NamedTuple):
    """The end of a request: well, where error is None; then every choice has had its end.

    num_output_tokens is what all its choices got.
    """

    request: RequestId
    error: ServiceError | None
    num_output_tokens: int = 0


Event = TokensOut | StepTokens | RequestDone
