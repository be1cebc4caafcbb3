"""The answers of the HTTP API, field by field, for its OpenAPI page. Answers are made without them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class ErrorFields(BaseModel):
    """What went wrong."""

    message: str = Field(description="For people: every bad field, and what to do.")
    type: str = Field(description="The kind of error.")
    param: str | None = Field(description="The first bad field of the request.")
    code: str = Field(description="The kind of error, finer: a stable word.")


class Error(BaseModel):
    """An error."""

    error: ErrorFields


class Alternative(BaseModel):
    """A token with its logprob. `bytes` are its UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Alternative):
    """A token of the output, or of the prompt, with alternatives, likeliest first."""

    top_logprobs: list[Alternative]


class ChatLogprobs(BaseModel):
    """Logprobs of a message's tokens."""

    content: list[TokenLogprob]
    refusal: None


class AssistantMessage(BaseModel):
    """What the model wrote."""

    role: Literal["assistant"]
    content: str
    refusal: None


class Choice(BaseModel):
    """What all choices have."""

    index: int
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = Field(description="The token id or the string that stopped it.")
    prompt_logprobs: list[TokenLogprob | None] | None = Field(
        default=None, description="On the first choice of a prompt, where asked for; null for the first token."
    )


class ChatChoice(Choice):
    """One message."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None
    prompt_text: str | None = Field(default=None, description="On the first choice, with echo.")


class CompletionLogprobs(BaseModel):
    """Logprobs of a text's tokens, in columns."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Choice):
    """One text."""

    text: str
    logprobs: CompletionLogprobs | None


class PromptTokensDetails(BaseModel):
    """More about the tokens of the prompt."""

    cached_tokens: int = Field(description="Of the prompt, those that the prefix cache had.")


class UsageFields(BaseModel):
    """Tokens of the request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Extension(BaseModel):
    """What Octavo adds."""

    seed: int = Field(description="The seed in use; sending it again repeats the output.")
    ignored: list[str] | None = Field(default=None, description="Fields of the request that changed nothing.")


class Answer(BaseModel):
    """What both kinds of answers have."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: UsageFields
    octavo: Extension


class ChatCompletion(Answer):
    """An answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Completion(Answer):
    """An answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ModelFields(BaseModel):
    """A name that requests may use."""

    id: str
    object: Literal["model"]
    created: int = Field(description="When this gateway started, seconds since 1970.")
    owned_by: str
    root: str = Field(description="The model that the name stands for.")
    max_model_len: int = Field(description="Longest input plus output, in tokens; 0 until an executor is ready.")
    supports_chat: bool


class ModelList(BaseModel):
    """The names that requests may use."""

    object: Literal["list"]
    data: list[ModelFields]


class Tokens(BaseModel):
    """Tokens of a text."""

    tokens: list[int]
    count: int
    max_model_len: int = Field(description="Longest input plus output, in tokens; 0 until an executor is ready.")


class DetokenizedText(BaseModel):
    """Text of tokens."""

    prompt: str


class Health(BaseModel):
    """Whether requests are served."""

    status: Literal["serving", "not_serving"]


class Version(BaseModel):
    """The version of this gateway."""

    version: str
