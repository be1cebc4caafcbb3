"""Fields of OpenAI's requests that Octavo does not act on: which are refused, which are ignored, which say nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Unsupported:
    """A field that is refused. `neutral`: values that ask for nothing, which pass as null does. `why`: what is said."""

    why: str
    neutral: Sequence[object] = ()


_NO_TOOLS = "is not supported: this server calls no tools and no functions"
_TEXT_ONLY = "is not supported: text is the only kind of output"

CHAT: Mapping[str, Unsupported] = {
    "tools": Unsupported(_NO_TOOLS, ([],)),
    "tool_choice": Unsupported(_NO_TOOLS, ("none", "auto")),
    "parallel_tool_calls": Unsupported(_NO_TOOLS, (True, False)),
    "functions": Unsupported(_NO_TOOLS, ([],)),
    "function_call": Unsupported(_NO_TOOLS, ("none", "auto")),
    "response_format": Unsupported('is not supported but for {"type": "text"}', ({"type": "text"},)),
    "modalities": Unsupported(_TEXT_ONLY, (["text"],)),
    "audio": Unsupported(_TEXT_ONLY),
    "prediction": Unsupported("is not supported: leave it out, the output is the same"),
    "web_search_options": Unsupported("is not supported: this server searches nothing"),
    "reasoning_effort": Unsupported("is not supported: say it in a message, as the model's own page tells"),
    "verbosity": Unsupported("is not supported: say it in a message", ("medium",)),
    "moderation": Unsupported("is not supported: nothing is moderated here"),
    "store": Unsupported("is not supported: nothing is stored here", (False,)),
}
COMPLETION: Mapping[str, Unsupported] = {
    "suffix": Unsupported("is not supported: nothing is filled in before a suffix", ("",)),
}
MESSAGE: Mapping[str, Unsupported] = {
    "refusal": Unsupported("is not supported in a message: put it into content", ("",)),
    "annotations": Unsupported("is not supported in a message", ([],)),
    "audio": Unsupported("is not supported in a message: text is the only kind of input"),
    "tool_calls": Unsupported(_NO_TOOLS, ([],)),
    "tool_call_id": Unsupported(_NO_TOOLS),
    "function_call": Unsupported(_NO_TOOLS),
}
STREAM_OPTIONS: Mapping[str, Unsupported] = {
    "include_obfuscation": Unsupported("is not supported: chunks are not padded", (False,)),
}
_BY_FIELD = {**MESSAGE, **STREAM_OPTIONS, **COMPLETION, **CHAT}


def without_neutral(given: Mapping[str, Any], unsupported: Mapping[str, Unsupported]) -> dict[str, Any]:
    """Return an object less the unsupported fields whose values ask for nothing; clients send them as defaults."""
    return {
        name: value
        for name, value in given.items()
        if name not in unsupported or not _is_neutral(value, unsupported[name].neutral)
    }


def why_refused(field: str) -> str:
    """Return what is said of a field that a request does not have: it is unsupported, or nobody knows it."""
    known = _BY_FIELD.get(field)
    return "is no field of this request: check its spelling, or leave it out" if known is None else known.why


def _is_neutral(value: object, neutral: Sequence[object]) -> bool:
    # By type too: 0 == False.
    return value is None or any(type(value) is type(each) and value == each for each in neutral)
