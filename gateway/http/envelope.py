"""What every answer to one request has in common, and how it is written."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.requests import ChoiceEnd, FinishReason, Started

# One encoder for all, since making one takes longer than a token.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
# Line ends to Unicode, and so to clients that split a stream into lines as text: httpx does.
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")

_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


def encode_json(value: Any) -> str:
    """Return JSON on one line, whoever looks for lines."""
    text = _encode(value)
    return text if text.isascii() else _LINE_ENDS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


@dataclass(frozen=True)
class Asked:
    """What of a request its answer depends on.

    `model`: the name that the client used, empty where it used none. `ignored`: fields that changed nothing.
    """

    model: str
    created: int
    num_choices: int
    num_prompts: int
    seed: int
    echo: bool
    has_logprobs: bool
    has_prompt_logprobs: bool
    include_usage: bool
    ignored: Sequence[str]


def envelope(asked: Asked, started: Started, kind: str, prefix: str) -> dict[str, Any]:
    """Return the fields around the choices. `kind`: the object's name; `prefix`: of its id."""
    return {
        "id": f"{prefix}-{started.request_id}",
        "object": kind,
        "created": asked.created,
        "model": asked.model or started.model,
        "system_fingerprint": f"fp_{started.model_revision[:16]}",
    }


def extension(asked: Asked) -> dict[str, Any]:
    """Return what Octavo adds: the seed in use, and what was ignored."""
    added: dict[str, Any] = {"seed": asked.seed}
    if asked.ignored:
        added["ignored"] = list(asked.ignored)
    return added


def usage_object(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Return the usage; `cached_tokens`: of the prompt."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def ending(end: ChoiceEnd) -> dict[str, Any]:
    """Return why a choice ended: OpenAI's word, and the string or token that stopped it."""
    return {
        "finish_reason": _FINISH_REASONS[end.reason],
        "stop_reason": end.stop_token_id if end.stop_string is None else end.stop_string,
    }


def event_bytes(fields: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return f"data: {encode_json(fields)}\n\n".encode()


DONE = b"data: [DONE]\n\n"
