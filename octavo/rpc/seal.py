"""Checksums of what is sent, which HTTP/2 without TLS does not have.

A frame between services whose message has an optional fixed32 field `checksum`, number 15, is sealed: the CRC-32 of its
bytes is put behind them as that field. Without it a byte that changes on the way is another token, and nobody would
know.

A client may seal its request, in a field of number 17; then each answer is sealed by a CRC-32 that goes on from the one
before, of the first from the request's. So an answer that is missing, or another stream's, is found too. An answer that
comes whole is the only one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from zlib import crc32

import grpc.aio
from google.protobuf.message import DecodeError, Message

SEALED_METHODS = "/octavo.internal."
"""Where the path of a method whose frames are sealed, both ways, begins; unary ones are not."""

_TAG = bytes([15 << 3 | 5])
_SIZE = 5
_REQUEST_TAG = b"\x8d\x01"
"""17 << 3 | 5 as a varint."""
_REQUEST_SIZE = 6

MessageT = TypeVar("MessageT", bound=Message)


class Damaged:
    """What is read in place of a frame that is not what was sent."""


def seal(message: Message) -> bytes:
    """Return a frame's bytes, sealed."""
    data = message.SerializeToString()
    return data + _TAG + crc32(data).to_bytes(4, "little")


def opened(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return what makes a frame of bytes: as `parse` does, or Damaged. A frame without a seal is taken as it is."""

    def open_frame(data: bytes) -> Any:
        try:
            frame = parse(data)
        except DecodeError:
            return Damaged()
        if not frame.HasField("checksum"):
            return frame
        is_whole = data[-_SIZE:-4] == _TAG and int.from_bytes(data[-4:], "little") == crc32(data[:-_SIZE])
        return frame if is_whole else Damaged()

    return open_frame


def sealed_stream(
    channel: grpc.aio.Channel, path: str, response_type: type[MessageT]
) -> grpc.aio.StreamStreamMultiCallable[Any, Any]:
    """Return a stream-stream method of a channel whose frames are sealed; what is read may be Damaged."""
    parse = opened(response_type.FromString)
    return channel.stream_stream(path, request_serializer=seal, response_deserializer=parse)


class DamagedRequest:
    """What is read in place of a sealed request that is not what was sent."""


def sealed_request(message: Message) -> bytes:
    """Return a request's bytes, sealed."""
    data = message.SerializeToString()
    return data + _REQUEST_TAG + crc32(data).to_bytes(4, "little")


def opened_request(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return what makes a request of bytes: as `parse` does, or DamagedRequest. One without a seal is taken as it is.

    Raises DecodeError for bytes that are no message and have no seal.
    """

    def open_request(data: bytes) -> Any:
        has_seal = data[-_REQUEST_SIZE:-4] == _REQUEST_TAG
        if has_seal and int.from_bytes(data[-4:], "little") == crc32(data[:-_REQUEST_SIZE]):
            return parse(data)
        try:
            request = parse(data)
        except DecodeError:
            if has_seal:
                return DamagedRequest()
            raise
        is_sealed = "checksum" in request.DESCRIPTOR.fields_by_name and request.HasField("checksum")
        return DamagedRequest() if is_sealed else request

    return open_request


class SealedAnswers:
    """The answers to one sealed request, in their order, at either end."""

    def __init__(self, request_checksum: int) -> None:
        self._checksum = request_checksum
        self._is_sealed = False

    @classmethod
    def to(cls, request: bytes) -> SealedAnswers:
        """Return those to the bytes of a sealed request."""
        return cls(int.from_bytes(request[-4:], "little"))

    @property
    def is_sealed(self) -> bool:
        """Whether answers have come that were sealed."""
        return self._is_sealed

    def seal(self, message: Message) -> bytes:
        """Return the bytes of the next answer."""
        data = message.SerializeToString()
        self._checksum = crc32(data, self._checksum)
        return data + _TAG + self._checksum.to_bytes(4, "little")

    def opened(self, parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        """Return what makes the next answer of bytes: as `parse` does, or Damaged. A peer that seals one seals all."""

        def open_answer(data: bytes) -> Any:
            try:
                answer = parse(data)
            except DecodeError:
                return Damaged()
            if not answer.HasField("checksum"):
                return Damaged() if self._is_sealed else answer
            self._is_sealed = True
            self._checksum = crc32(data[:-_SIZE], self._checksum)
            is_whole = data[-_SIZE:-4] == _TAG and int.from_bytes(data[-4:], "little") == self._checksum
            return answer if is_whole else Damaged()

        return open_answer


class SealCheck:
    """One stream's frames as they come: a peer that has sealed one seals all."""

    def __init__(self) -> None:
        self._is_sealed = False

    def is_whole(self, frame: Any) -> bool:
        """Whether a frame is what was sent, as far as that can be told. `frame`: a message, or Damaged."""
        if isinstance(frame, Damaged):
            return False
        if frame.HasField("checksum"):
            self._is_sealed = True
            return True
        return not self._is_sealed
