"""Bodies that are not of the form that is asked for, as errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.http.errors import Failure, failure_of_status
from gateway.http.known import why_refused
from gateway.http.wanted import MODELS, words_for

_MAX_NAMED = 8
_MAX_WORDS = 3
"""Things that are said of one field: it may be an object with a thousand bad values."""
_NAMES = frozenset(name for model in MODELS for name in model.model_fields)


def failure_from_validation(errors: Sequence[Mapping[str, Any]]) -> Failure:
    """Return the error for what pydantic says of a request: 400, every bad field named once."""
    named: dict[str | None, list[str]] = {}
    for error in errors:
        words = named.setdefault(_param(error), [])
        if (text := _words(error)) not in words and len(words) < _MAX_WORDS:
            words.append(text)
    parts = [f"{name}: {' or '.join(words)}" if name else " or ".join(words) for name, words in named.items()]
    if len(parts) > _MAX_NAMED:
        parts[_MAX_NAMED:] = ["and more"]
    code = "invalid_json" if errors[0]["type"] == "json_invalid" else "invalid_request"
    return failure_of_status(400, "; ".join(parts), code, next(iter(named)))


def _param(error: Mapping[str, Any]) -> str | None:
    """Return the field's path in the request; None for the body itself."""
    if error["type"] == "json_invalid":
        return None
    path = ""
    # What is neither field nor index is pydantic's own: the kind of a union's member, the key of a map.
    places = error["loc"][1:]
    for index, place in enumerate(places):
        is_unknown = error["type"] == "extra_forbidden" and index == len(places) - 1
        if isinstance(place, int):
            path += f"[{place}]"
        elif place in _NAMES or is_unknown:
            path += f".{place[:100]}" if path else place[:100]
    return path or None


def _words(error: Mapping[str, Any]) -> str:
    kind, place = error["type"], error["loc"]
    match kind:
        case "json_invalid":
            return f"the body is not valid JSON: {error['ctx']['error']} at character {place[-1]}"
        case "missing" if len(place) == 1:
            return "a body is required: JSON, with content-type: application/json"
        case "missing":
            return "is required"
        case "model_attributes_type" if len(place) == 1:
            return "the body must be a JSON object, with content-type: application/json"
        case "extra_forbidden":
            return why_refused(str(place[-1]))
        case "value_error":
            return str(error["ctx"]["error"])
    words = words_for(kind, place[1:], error.get("input"))
    if words and place[-2:-1] == ("logit_bias",):
        return f"{words} for token {str(place[-1])[:20]}"
    return words or str(error["msg"]).replace("Input should be", "must be")
