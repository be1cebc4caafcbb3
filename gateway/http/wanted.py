"""What a field of a request may be, in words: from the schema that its page shows, so that both say the same."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from gateway.http import fields

MODELS: tuple[type[BaseModel], ...] = (
    fields.ChatRequest,
    fields.CompletionRequest,
    fields.TokenizeRequest,
    fields.DetokenizeRequest,
    fields.Message,
    fields.StreamOptions,
)
"""Every object that a client can send."""
_TYPES = {
    "int_type": "integer",
    "int_from_float": "integer",
    "int_parsing_size": "integer",
    "greater_than_equal": "integer",
    "less_than_equal": "integer",
    "float_type": "number",
    "finite_number": "number",
    "bool_type": "boolean",
    "string_type": "string",
    "list_type": "array",
    "dict_type": "object",
    "model_type": "object",
    "model_attributes_type": "object",
}
"""By pydantic's name of an error: the type of JSON that was wanted."""
_WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a text",
    "array": "a list",
    "object": "an object",
}
_MOST_SHOWN = 40

_Schema = Mapping[str, Any]


def words_for(kind: str, place: Sequence[int | str], value: object) -> str | None:
    """Return what is wanted and what was given, for an error about a value's type or size; None for any other.

    `kind` is pydantic's name of the error, `place` the path in the request.
    """
    wanted = _TYPES.get(kind)
    if wanted is None:
        return None
    for field, option in _options_at(place):
        if wanted in _types_of(option):
            # What the page says of the whole field is the domain's range, and the narrower one.
            bounds = _bounds(field) or _bounds(option)
            names = [_WORDS[each] for each in _types_of(field)]
            return f"must be {' or '.join(names)}{bounds}, is {_shown(value)}"
    return f"must be {_WORDS[wanted]}, is {_shown(value)}"


def _options_at(place: Sequence[int | str]) -> Iterator[tuple[_Schema, _Schema]]:
    """Yield the schemas of a field, or of the elements of a list or object, each with each of its alternatives."""
    if not place:
        return
    is_element = not isinstance(place[-1], str) or place[-1] not in _properties()
    name = place[-2] if is_element and len(place) > 1 else place[-1]
    for field in _properties().get(str(name), ()):
        for option in _alternatives(field):
            if not is_element:
                yield field, option
                continue
            inner = option.get("items", option.get("additionalProperties"))
            if isinstance(inner, Mapping):
                for each in _alternatives(inner):
                    yield inner, each


@functools.cache
def _properties() -> Mapping[str, Sequence[_Schema]]:
    found: dict[str, list[_Schema]] = {}
    for model in MODELS:
        for name, schema in model.model_json_schema()["properties"].items():
            found.setdefault(name, []).append(schema)
    return found


def _alternatives(schema: _Schema) -> Sequence[_Schema]:
    options: Sequence[_Schema] = schema.get("anyOf", [schema])
    return [nested for option in options for nested in (_alternatives(option) if "anyOf" in option else [option])]


def _types_of(schema: _Schema) -> list[str]:
    types = ["object" if "$ref" in option else option.get("type") for option in _alternatives(schema)]
    return [each for each in dict.fromkeys(types) if each in _WORDS]


def _bounds(schema: _Schema) -> str:
    least, above, most = (schema.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    if above is not None:
        return f" above {above}" + (f" and at most {most}" if most is not None else "")
    if most is None:
        return "" if least is None else f" of at least {least}"
    return f" from {0 if least is None else least} to {most}"


def _shown(value: object) -> str:
    match value:
        case list() | tuple():
            return "a list"
        case dict():
            return "an object"
        case str():
            return json.dumps(value if len(value) <= _MOST_SHOWN else f"{value[:_MOST_SHOWN]}...")
        case int() if value.bit_length() > 4 * _MOST_SHOWN:
            return "a number of very many digits"
        case None | bool() | int() | float():
            return json.dumps(value)
    return f"of another type, {type(value).__name__[:_MOST_SHOWN]}"
