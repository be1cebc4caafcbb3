"""Typed errors: what a service raises, how it crosses the wire, and how a client gets it back.

On the wire an error is a gRPC status whose `grpc-status-details-bin` trailer holds a google.rpc.Status with ErrorInfo,
BadRequest where fields are at fault, and RetryInfo where another try can help (google/rpc/error_details.proto). All of
it travels in trailers, so it is cut to what every client takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "octavo"
_DETAILS_KEY = "grpc-status-details-bin"
# A client that nobody has configured takes 8 KiB of trailers for certain, and fails calls with more at random. Details
# are sent in base64, which adds a third; the message is among them and, percent-encoded, beside them.
_MAX_ERROR_BYTES = 7000
_MAX_METADATA_BYTES = 800
_MAX_VIOLATION_BYTES = 2700
_VIOLATION_OVERHEAD = 8
_MORE = " ..."
_CODE_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True)
class FieldViolation:
    """One bad field of a request: its path (`sampling.top_p`) and what to put there."""

    field: str
    description: str


class ServiceError(Exception):
    """An error meant for the caller.

    `reason` is UPPER_SNAKE_CASE and stable; `message` is for people and says what to do; `metadata` holds the numbers;
    `retry_delay` is in seconds, None where trying again cannot help.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        violations: Sequence[FieldViolation] = (),
        retry_delay: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.metadata = dict(metadata or {})
        self.violations = tuple(violations)
        self.retry_delay = retry_delay

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.code.name}, {self.reason}, {self.message!r})"


def invalid_argument(violations: Sequence[FieldViolation], metadata: Mapping[str, str] | None = None) -> ServiceError:
    """Return the INVALID_ARGUMENT error that names every bad field at once; `metadata` holds the numbers."""
    listed = "; ".join(f"{violation.field}: {violation.description}" for violation in violations)
    code = grpc.StatusCode.INVALID_ARGUMENT
    return ServiceError(code, "INVALID_REQUEST", listed, metadata=metadata, violations=violations)


def code_from_number(number: int) -> grpc.StatusCode:
    """Return the status code of a number on the wire; UNKNOWN for a number that is none."""
    return _CODE_BY_NUMBER.get(number, grpc.StatusCode.UNKNOWN)


def number_from_code(code: grpc.StatusCode) -> int:
    """Return the number that stands for a status code on the wire."""
    number: int = code.value[0]
    return number


def to_rpc_status(error: ServiceError) -> status_pb2.Status:
    """Return the google.rpc.Status of an error, details included.

    A long message ends early, with "...", and so does a long value of the metadata; of very many violations only the
    first are there.
    """
    metadata = dict(_first_metadata(error.metadata))
    violations = list(_first_violations(error.violations))
    in_details = sum(map(_size, violations)) + sum(len(key) + len(value.encode()) for key, value in metadata.items())
    room = (_MAX_ERROR_BYTES - in_details * 4 / 3) / (1 + 4 / 3)
    status = status_pb2.Status(code=number_from_code(error.code), message=_shortened(error.message, room))
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    status.details.append(_pack(info))
    if error.violations:
        bad_request = error_details_pb2.BadRequest()
        for violation in violations:
            bad_request.field_violations.add(field=violation.field, description=violation.description)
        status.details.append(_pack(bad_request))
    if error.retry_delay is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_delay * 1e9))
        status.details.append(_pack(retry))
    return status


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ServiceError) -> NoReturn:
    """End a call with an error. Does not return: grpc raises to unwind the handler."""
    status = to_rpc_status(error)
    trailer = (_DETAILS_KEY, status.SerializeToString())
    # The trailers that the handler set before must survive.
    earlier = tuple(context.trailing_metadata() or ())
    await context.abort(error.code, status.message, (*earlier, trailer))
    raise AssertionError("abort returned")


def from_rpc_error(rpc_error: grpc.RpcError) -> ServiceError:
    """Return the ServiceError that a peer sent; reason is the code's name where the peer sent no details.

    A call that its own deadline or a cancel ends while the peer's answer comes in can have the details of the one and
    the code of the other: they are left out then.
    """
    # Both flavours of RpcError (sync calls and aio) have these three methods; the base class declares none of them.
    call: Any = rpc_error
    code: grpc.StatusCode = call.code()
    message: str = call.details() or code.name
    for key, value in call.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            status = status_pb2.Status.FromString(value)
            if status.code == code.value[0]:
                return _from_rpc_status(code, message, status)
    return ServiceError(code, code.name, message)


def _from_rpc_status(code: grpc.StatusCode, message: str, status: status_pb2.Status) -> ServiceError:
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    retry_delay: float | None = None
    for detail in status.details:
        # Unpack tells by its result whether the detail is of the message's type.
        if detail.Unpack(info) or detail.Unpack(bad_request):
            continue
        if detail.Unpack(retry):
            retry_delay = retry.retry_delay.ToNanoseconds() / 1e9
    return ServiceError(
        code,
        info.reason or code.name,
        message,
        metadata=dict(info.metadata),
        violations=[FieldViolation(each.field, each.description) for each in bad_request.field_violations],
        retry_delay=retry_delay,
    )


def _shortened(message: str, room: float) -> str:
    """Return as much of a message as fits into `room` bytes: whole characters and, where it has parts, whole parts."""
    if len(message) <= room and message.isascii() and message.isprintable() and "%" not in message:
        return message  # as nearly all do: a refusal is to cost little
    for index, character in enumerate(message):
        # Bytes as gRPC encodes them: all but printable ASCII takes three characters a byte.
        room -= 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode())
        if room < 0:
            kept = message[:index]
            return (kept.rpartition("; ")[0] or kept) + _MORE
    return message


def _first_metadata(metadata: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    room = _MAX_METADATA_BYTES
    # The short ones first: a number is whole, whatever else is there.
    for key, value in sorted(metadata.items(), key=lambda item: len(item[1])):
        fitting = value
        if len(key) + len(value.encode()) > room:
            fitting = value.encode()[: max(0, room - len(key) - len(_MORE))].decode(errors="ignore") + _MORE
        room -= len(key) + len(fitting.encode())
        yield key, fitting


def _first_violations(violations: Sequence[FieldViolation]) -> Iterator[FieldViolation]:
    room = _MAX_VIOLATION_BYTES
    for violation in violations:
        room -= _size(violation)
        if room < 0:
            return
        yield violation


def _size(violation: FieldViolation) -> int:
    return len(violation.field.encode()) + len(violation.description.encode()) + _VIOLATION_OVERHEAD


def _pack(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
