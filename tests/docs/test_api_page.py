"""docs/api.md leaves out no field of the public API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from gateway.http import fields, known
from octavo.v1 import inference_pb2, model_pb2

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
_IN_CODE = re.compile(r"`([^`\n]+)`")
_NAME = re.compile(r"\w+")


def told() -> set[str]:
    """Every name that the page writes as code in its text."""
    return {name for code in _IN_CODE.findall(PAGE) for name in _NAME.findall(code)}


def bodies(model: type[BaseModel] = BaseModel) -> Iterator[type[BaseModel]]:
    """Yield every kind of request, and of object in one, that the HTTP API takes."""
    for each in model.__subclasses__():
        if each.__module__ == fields.__name__:
            yield each
            yield from bodies(each)


def test_every_field_of_the_protos_is_there() -> None:
    """Requests and answers of InferenceService and ModelService: each field's name is on the page."""
    names = {
        field.name
        for file in (inference_pb2.DESCRIPTOR, model_pb2.DESCRIPTOR)
        for message in file.message_types_by_name.values()
        for field in message.fields
    }
    assert {"continuations", "is_greedy", "next_page_token"} <= names
    assert names - told() == set()


def test_every_field_of_http_is_there() -> None:
    """Fields of bodies, those that are ignored and those that are refused by name."""
    names = {name for body in bodies() for name in body.model_fields}
    refused = {*known.CHAT, *known.COMPLETION, *known.MESSAGE, *known.STREAM_OPTIONS}
    assert {"max_completion_tokens", "include_usage", "tokens"} <= names
    assert (names | refused) - told() == set()
