"""Messages with something in every field, so that a field that is forgotten on the way shows."""

from __future__ import annotations

from itertools import count

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message


def fill(message: Message, numbers: count[int] | None = None) -> None:
    """Give every field a value, no two numbers and texts alike; lists get one entry, enums their first word."""
    numbers = count(1) if numbers is None else numbers
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None:
            inner = getattr(message, field.name)
            fill(inner.add() if field.is_repeated else inner, numbers)
            continue
        value = _value(field, next(numbers))
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)


def _value(field: FieldDescriptor, number: int) -> object:
    if field.enum_type is not None:
        return next(each.number for each in field.enum_type.values if each.number)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return f"text-{number}"
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return True
    return number
