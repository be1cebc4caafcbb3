"""Errors on their way through trailers, which are small."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2

from octavo.rpc.errors import FieldViolation, ServiceError, from_rpc_error, invalid_argument, to_rpc_status

ROOM = 8 * 1024
"""Bytes of trailers that every client takes."""
OF_OTHERS = 1024
"""What of it the status line, names and other trailers may need."""


def violations_of(error: ServiceError) -> list[FieldViolation]:
    """The bad fields that a client is told of."""
    bad_request = error_details_pb2.BadRequest()
    unpacked = [detail.Unpack(bad_request) for detail in to_rpc_status(error).details]
    assert any(unpacked) == bool(error.violations)
    return [FieldViolation(each.field, each.description) for each in bad_request.field_violations]


def test_what_fits_is_told_in_full() -> None:
    """An error of a usual size keeps its words and every bad field."""
    error = invalid_argument([FieldViolation(f"field_{index}", "must be 1 to 3, is 7") for index in range(20)])
    assert to_rpc_status(error).message == error.message
    assert violations_of(error) == list(error.violations)


def test_a_long_message_ends_early_and_every_field_is_named() -> None:
    """Very many bad fields are all among the details; the message names as many as fit, each of them whole."""
    error = invalid_argument([FieldViolation(f"field_{index}", "must be 1 to 3, is 7") for index in range(70)])
    message = to_rpc_status(error).message
    assert message.endswith("is 7 ...")
    assert error.message.startswith(message.removesuffix(" ..."))
    assert violations_of(error) == list(error.violations)


@pytest.mark.parametrize("character", ["x", "%", "\n", "é", "\U0001f600"])
def test_no_error_is_too_large_for_trailers(character: str) -> None:
    """However long an error is, and whatever is in it, any client takes it; what is told of it is whole characters."""
    fields = [FieldViolation(f"field_{index}", character * 300) for index in range(1000)]
    metadata = {"asked": character * 100_000, "number": "7"}
    not_there = ServiceError(grpc.StatusCode.NOT_FOUND, "NOT_THERE", character * 100_000, metadata=metadata)
    for error in (invalid_argument(fields, metadata), not_there):
        status = to_rpc_status(error)
        assert status.message.removesuffix(" ...") == error.message[: len(status.message) - 4]
        plain = sum(" " <= each <= "~" and each != "%" for each in status.message)
        encoded = plain + 3 * (len(status.message.encode()) - plain)
        in_base64 = -(-status.ByteSize() // 3) * 4
        assert encoded + in_base64 < ROOM - OF_OTHERS
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        assert info.metadata["number"] == "7"
        assert info.metadata["asked"].removesuffix(" ...") == character * (len(info.metadata["asked"]) - 4)
        told = violations_of(error)
        assert told == list(error.violations[: len(told)])
        assert told or not error.violations


def test_details_count_with_the_code_that_they_came_with() -> None:
    """A refusal that comes in as the caller's own deadline passes does not lend it its reason and its delay."""
    refused = ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "full", retry_delay=3.0)
    details = ("grpc-status-details-bin", to_rpc_status(refused).SerializeToString())

    def received(code: grpc.StatusCode, message: str) -> ServiceError:
        return from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(details), message))

    told = received(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    assert (told.reason, told.retry_delay) == ("QUEUE_FULL", 3.0)
    late = received(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    assert (late.reason, late.message, late.retry_delay) == ("DEADLINE_EXCEEDED", "Deadline Exceeded", None)
