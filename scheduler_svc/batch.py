"""What goes to an executor, what comes back, and what the engine tells the gateways.

The types made once per row and step are named tuples: a frozen dataclass costs three times as much to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from octavo.rpc.errors import ServiceError
from scheduler_svc.sequence import ChoiceEnd, RequestId, StoppingParams


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


@dataclass(frozen=True)
class ScheduledBatch:
    """One step. Order of effect: releases, new sequences, then the rows. Without rows it only carries releases.

    num_tokens is what all rows together compute.
    """

    session: int
    step: int
    released_handles: tuple[int, ...]
    new_sequences: tuple[NewSequence, ...]
    rows: tuple[ScheduledRow, ...]
    num_tokens: int


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


class StepFailureReason(Enum):
    """Why a whole step failed; as in the executor's contract."""

    OUT_OF_MEMORY = "out_of_memory"
    INTERNAL = "internal"
    REFUSED = "refused"


class StageTimings(NamedTuple):
    """Where the executor's time went, in seconds. queue: from the arrival of the step to the start of work on it."""

    queue: float
    prepare: float
    forward: float
    sample: float


@dataclass(frozen=True)
class BatchResult:
    """The answer to one batch, rows in the order of the batch; a failed step has neither rows nor timings."""

    session: int
    step: int
    rows: tuple[RowResult, ...]
    failure: StepFailureReason | None = None
    message: str = ""
    timings: StageTimings | None = None


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


class RequestDone(NamedTuple):
    """The end of a request: well, where error is None; then every choice has had its end."""

    request: RequestId
    error: ServiceError | None


Event = TokensOut | RequestDone
