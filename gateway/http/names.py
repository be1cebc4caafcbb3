"""What the HTTP requests call the fields that the domain names by their paths in octavo.v1."""

from __future__ import annotations

import re

_BIAS = re.compile(r"^sampling\.logit_bias\[\d+\]\.\w+$")
"""An entry of a list, there; here it is a key, which what is said names."""
_GROUP = re.compile(r"(sampling|stopping|output|scheduling)\.")
_COMMON = {
    "include_stop": "include_stop_str_in_output",
    "request_id": "user",
    "cache.salt": "cache_salt",
    "cache.bypass": "bypass_cache",
}
_PROMPT = {"text": "prompt", "token_ids.ids": "prompt", "input": "prompt"}
PROMPT_FIELDS = frozenset({"text", "token_ids.ids"})
"""What a completion's prompt is to the domain; where there are several, its place stands behind it in brackets."""
_CHAT = {"chat": "messages", "input": "messages"}


def chat_name(field: str) -> str:
    """Return the name in a chat completion, or in a tokenization."""
    name = _common(field)
    name = name.removeprefix("chat.")
    return _CHAT.get(name) or _PROMPT.get(name) or _COMMON.get(name, name)


def completion_name(field: str) -> str:
    """Return the name in a completion."""
    name = _common(field)
    if name == "top_logprobs":
        return "logprobs"
    base, bracket, place = name.partition("[")
    return f"{_PROMPT[base]}{bracket}{place}" if base in _PROMPT else _COMMON.get(name, name)


def _common(field: str) -> str:
    return _GROUP.sub("", _BIAS.sub("logit_bias", field), count=1)


def detokenize_name(field: str) -> str:
    """Return the name in a detokenization."""
    return "tokens" if field == "token_ids" else field
