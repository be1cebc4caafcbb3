"""Fields of a message that this version does not know: refused by number, never dropped.

They come from newer clients, and from hand-made stubs that are wrong. Either way the client has asked for something
that it would not get.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from octavo.rpc.errors import FieldViolation, invalid_argument

# What is wrong travels in trailers, which are small.
_MAX_NAMED = 8


def refuse_unknown_fields(message: Message) -> None:
    """Raise ServiceError (INVALID_ARGUMENT) naming the unknown fields of a request and the messages they stand in."""
    violations = list(islice(_violations(message, ""), _MAX_NAMED))
    if violations:
        raise invalid_argument(violations)


def _violations(message: Message, path: str) -> Iterator[FieldViolation]:
    unknown: Any = UnknownFieldSet(message)  # a sequence, which its stub does not say
    for number in sorted({field.field_number for field in unknown}):
        name = message.DESCRIPTOR.full_name
        description = f"{name} has no field {number} in this version of the gateway; unknown fields are not ignored"
        yield FieldViolation(f"{path}.{number}" if path else str(number), description)
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None:
            continue
        name = f"{path}.{descriptor.name}" if path else descriptor.name
        for suffix, part in _parts(value):
            yield from _violations(part, name + suffix)


def _parts(value: Message | Iterable[Message]) -> Iterator[tuple[str, Message]]:
    if isinstance(value, Message):
        yield "", value
        return
    for index, part in enumerate(value):
        yield f"[{index}]", part
