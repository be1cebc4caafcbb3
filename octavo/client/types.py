"""What goes into a call and what comes out of it: plain values, no protobuf. The fields are those of octavo.v1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias, TypedDict

Role: TypeAlias = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str


Messages: TypeAlias = Sequence[Message | Mapping[str, str]]
"""A conversation, oldest turn first. A mapping has the keys `role` and `content`."""

Prompt: TypeAlias = str | Sequence[int] | Messages
"""What to continue: text, token ids, or a conversation."""


class GenerateOptions(TypedDict, total=False):
    """Every option of a request, by its name in octavo.v1. None, or left out: the model's or the gateway's default."""

    model: str | None
    """Name of the model. Default: the only one served."""
    temperature: float | None
    """0 to 2; 0 always takes the likeliest token."""
    top_p: float | None
    """Keep the smallest set of tokens with this much probability, in (0, 1]."""
    top_k: int | None
    """Keep this many likeliest tokens; 0 keeps all."""
    min_p: float | None
    """Keep tokens at least this likely relative to the likeliest, in [0, 1]."""
    repetition_penalty: float | None
    """Divide and multiply logits of tokens in prompt or output, in (0, 2]; 1 is off."""
    presence_penalty: float | None
    """Subtract from the logit of every token in the output, in [-2, 2]."""
    frequency_penalty: float | None
    """Subtract per occurrence in the output, in [-2, 2]."""
    typical_p: float | None
    """Keep the smallest set of tokens closest to the entropy with this much probability, in (0, 1]."""
    logit_bias: Mapping[int, float] | None
    """By token id, what is added to its logit, -100 to 100; -100 forbids the token. At most 1024."""
    bad_words: Sequence[str] | None
    """Texts that the output may not contain, at most 64."""
    max_tokens: int | None
    """Most tokens of each choice; 0 generates nothing. Default: what is left of the model's context."""
    min_tokens: int | None
    """Fewest tokens before an end or stop token may come."""
    stop_token_ids: Sequence[int] | None
    """Further token ids that stop, at most 64."""
    ignore_eos: bool | None
    """True: end-of-sequence tokens do not stop."""
    stop: Sequence[str] | None
    """Texts that stop, at most 16: the output ends where the first of them begins."""
    include_stop: bool | None
    """True: what stopped a choice is part of its text."""
    top_logprobs: int | None
    """Report log-probabilities, and those of this many alternatives, 0 to 20."""
    prompt_logprobs: int | None
    """Report those of the prompt's tokens, likewise."""
    echo: bool | None
    """True: report the prompt's tokens and text."""
    skip_special_tokens: bool | None
    """False: special tokens are written out as text."""
    n: int | None
    """Number of choices, 1 to 128."""
    best_of: int | None
    """Generate this many and return the n likeliest; more than n with `complete` alone."""
    seed: int | None
    """Seed of the sampling noise, an unsigned 64-bit number. Default: drawn by the gateway, told in Started."""
    truncate_prompt_tokens: int | None
    """Keep this many last tokens of the prompt, where it has more."""
    priority: int | None
    """-100 to 100: higher goes first where the scheduler's policy is `priority`; other policies ignore it."""
    queue_ttl: float | None
    """Seconds that it may wait before it runs, 0.001 to 86400. Default: any."""
    first_token_target: float | None
    """Seconds from the gateway's acceptance to the first token, 0.001 to 86400; without one by then it is ended."""
    cache_salt: str | None
    """Share cached prefixes only with requests of the same salt, at most 128 characters."""
    bypass_cache: bool | None
    """True: nothing is taken from the prefix cache, and nothing left in it. The output is the same."""
    resume_grace: float | None
    """Seconds that the request outlives a stream that is lost, 0 to 600: the stream is then taken up, at any gateway.
    Default: 30, but 0 with prompt_logprobs. 0: a stream that is lost ends the request. For `generate` alone.
    """
    request_id: str | None
    """A label of the caller's own for logs, at most 128 characters."""
    continue_final_message: bool | None
    """True, for a conversation: its last message, the assistant's, is continued instead of a new one begun."""


@dataclass(frozen=True)
class Started:
    """What was made of a request."""

    request_id: str
    """The gateway's id: what AdminClient.cancel_request takes."""
    model: str
    model_revision: str
    seed: int
    """The seed in use; given again, it repeats the output."""
    prompt_tokens: int
    max_tokens: int
    """Most tokens each choice can get."""
    cached_tokens: int = 0
    """Of the prompt, those in the prefix cache when it was accepted; Usage has the figure that came of it."""
    resume_token: str = ""
    """What takes the stream up again where it is lost; empty where it cannot be."""


@dataclass(frozen=True)
class TopLogprob:
    """One alternative token."""

    token_id: int
    logprob: float


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithm of a token's probability, before penalties and temperature, and the likeliest alternatives."""

    logprob: float
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True)
class PromptTokens:
    """The tokens of a prompt, where they were asked for."""

    text: str
    """Their text where echo was given, else empty."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    """One per token where prompt_logprobs was given, else empty. None for the first, of which nothing is known."""


@dataclass(frozen=True)
class Delta:
    """New tokens of one choice. The texts of a choice, joined, are its output; each ends at a whole character."""

    choice: int
    first_token_index: int
    """Tokens of this choice that came before."""
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """One per token where top_logprobs was given, else empty."""


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens, or the end of the model's context."""
    UNKNOWN = "unknown"
    """A reason that this version of the client does not know."""


@dataclass(frozen=True)
class ChoiceFinished:
    """The end of one choice."""

    choice: int
    reason: FinishReason
    stop_token_id: int | None
    """The token that stopped it; the last of its tokens and not part of the text. None: no token did."""
    completion_tokens: int
    stop_string: str | None = None
    """The stop string that stopped it. None: none did."""


@dataclass(frozen=True)
class Usage:
    """Token counts of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Of the prompt, those that the prefix cache had, so that they were not computed."""


@dataclass(frozen=True)
class Choice:
    """One whole continuation."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """One per token where top_logprobs was given, else empty."""
    finished: ChoiceFinished


@dataclass(frozen=True)
class Completion:
    """The whole output of a request."""

    started: Started
    choices: tuple[Choice, ...]
    usage: Usage
    prompt: PromptTokens | None = None
    """The prompt's tokens, where echo or prompt_logprobs was given."""

    @property
    def text(self) -> str:
        """The text of the only choice. Raises ValueError where there are several."""
        if len(self.choices) != 1:
            raise ValueError(f"there are {len(self.choices)} choices, each with a text: see .choices")
        return self.choices[0].text


@dataclass(frozen=True)
class ContinuationScore:
    """How likely one continuation is."""

    logprob: float
    """Natural logarithm of the probability of the whole."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each token, given those before it; they add up to `logprob`."""
    is_greedy: bool
    """Whether each token is the likeliest at its place."""


@dataclass(frozen=True)
class Scores:
    """The scores of continuations, in their order."""

    scores: tuple[ContinuationScore, ...]
    usage: Usage


@dataclass(frozen=True)
class TokenCount:
    """The size of an input."""

    tokens: int
    max_model_len: int
    """Longest input plus output that the model takes now, in tokens; 0 until an executor is ready."""


@dataclass(frozen=True)
class DefaultSampling:
    """What sampling options that are left out mean for a model."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


@dataclass(frozen=True)
class Model:
    """A served model."""

    name: str
    revision: str
    """Content hash of weights and tokenizer."""
    max_model_len: int
    """Longest input plus output, in tokens. 0 until an executor is ready."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    supports_chat: bool
    """Whether conversations are accepted as a prompt."""
    ready_executors: int
    default_sampling: DefaultSampling
