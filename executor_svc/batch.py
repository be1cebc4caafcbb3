"""The executor's own words for what the contract carries. No protobuf here: `convert` translates.

Columns of rows are parallel tuples, as on the wire; handles, sessions and steps are plain integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Limits:
    """What the executor can hold and run."""

    block_size: int
    """Tokens a KV block."""
    num_blocks: int
    """KV blocks, the null block included."""
    max_num_seqs: int
    """Most rows in a step."""
    max_num_batched_tokens: int
    """Most tokens in a step, over all rows."""
    max_model_len: int
    """Longest sequence, prompt and output together, in tokens."""
    vocab_size: int
    """Token ids are below this."""
    window: int = 0
    """The widest attention window of any layer, in tokens, the reading one included; 0: a layer reads everything."""

    def num_passed_blocks(self, position: int) -> int:
        """Blocks of a sequence, from the first, that no layer reads for the token at a position or a later one."""
        return max(0, position + 1 - self.window) // self.block_size if self.window else 0


@dataclass(frozen=True)
class ExecutorInfo:
    """Who the executor is, for its Welcome."""

    incarnation: str
    cell: str
    model_name: str
    model_revision: str
    tokenizer_hash: str
    fingerprint: str
    limits: Limits


@dataclass(frozen=True)
class SamplingParams:
    """How to sample, fully resolved. Meaning and order as in octavo.v1.SamplingConfig."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    top_logprobs: int | None = None
    """None: no logprobs."""
    typical_p: float = 1.0
    """1 is off."""
    bias_token_ids: tuple[int, ...] = ()
    """Distinct."""
    bias_values: tuple[float, ...] = ()
    """Parallel to bias_token_ids."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens, each at least one, that the output may not contain."""
    prompt_logprobs: int | None = None
    """None: no logprobs of the prompt's tokens."""
    prompt_logprobs_from: int = 1
    """Index of the first prompt token of which they are told, at least 1."""


@dataclass(frozen=True)
class StoppingParams:
    """When a sequence ends by itself, fully resolved."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class NewSequence:
    """The full record of one stay of a sequence."""

    handle: int
    token_ids: tuple[int, ...]
    """The prompt, then committed output."""
    num_prompt_tokens: int
    choice: int
    sampling: SamplingParams
    stopping: StoppingParams
    num_cached_tokens: int = 0
    """Of token_ids, from the first, those whose KV lies in the first of the row's blocks already."""


@dataclass(frozen=True)
class StepBatch:
    """One forward pass, as a delta to what the executor knows. All row columns have one length."""

    session: int
    step: int
    released_handles: tuple[int, ...] = ()
    new_sequences: tuple[NewSequence, ...] = ()
    handles: tuple[int, ...] = ()
    num_scheduled_tokens: tuple[int, ...] = ()
    num_computed_tokens: tuple[int, ...] = ()
    num_new_blocks: tuple[int, ...] = ()
    new_blocks: tuple[int, ...] = ()
    """As many as num_new_blocks sums to."""


class RowStatus(Enum):
    """What became of a row; see the contract."""

    OK = auto()
    SKIPPED = auto()
    NAN = auto()
    BAD_INPUT = auto()
    DESYNC = auto()


@dataclass(frozen=True)
class TokenLogprobs:
    """Logprobs of one sampled token: its own, and the likeliest tokens'."""

    sampled: float
    top_token_ids: npt.NDArray[np.int64]
    """[K], likeliest first."""
    top_logprobs: npt.NDArray[np.float32]
    """[K]."""


@dataclass(frozen=True)
class PromptLogprobs:
    """Logprobs of T consecutive tokens of a prompt, each under the tokens before it."""

    first_token_index: int
    """Index, in the sequence, of the first of the T tokens; at least 1."""
    logprobs: npt.NDArray[np.float32]
    """[T]: the prompt's own tokens."""
    top_token_ids: npt.NDArray[np.int64]
    """[T, K], likeliest first."""
    top_logprobs: npt.NDArray[np.float32]
    """[T, K]."""


@dataclass(frozen=True)
class StageTimings:
    """Where a step's time went, in seconds."""

    queue: float = 0.0
    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    idle: float | None = None
    """From the end of the step before to the start of this one; None where no sequence of this one was there then."""
    ahead: float | None = None
    """Building its inputs while the step before it computed, on another thread: no part of its own time. None where
    they were built in their turn, which is a part of `prepare`."""


class StepFailureReason(Enum):
    """Why a step failed whole."""

    OUT_OF_MEMORY = auto()
    INTERNAL = auto()
    REFUSED = auto()


@dataclass(frozen=True)
class StepFailure:
    """A whole step's failure; the message is for the log."""

    reason: StepFailureReason
    message: str


@dataclass(frozen=True)
class StepResult:
    """The answer to a StepBatch; columns are parallel to its rows, and empty where `failure` is set."""

    session: int
    step: int
    handles: tuple[int, ...] = ()
    statuses: tuple[RowStatus, ...] = ()
    sampled: tuple[int | None, ...] = ()
    """Each row's sampled token; None where it has none."""
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    """By index of the row, of the sampled tokens of the rows that asked for them."""
    prompt_logprobs: Mapping[int, PromptLogprobs] = field(default_factory=dict)
    """By index of the row, of the prompt tokens that its computed tokens tell, of the rows that asked for them."""
    timings: StageTimings = field(default_factory=StageTimings)
    failure: StepFailure | None = None
