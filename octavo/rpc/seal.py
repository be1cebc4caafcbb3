"""Checksums of the frames between services, which HTTP/2 without TLS does not have.

A frame whose message has an optional fixed32 field `checksum`, number 15, is sealed: the CRC-32 of its bytes is put
behind them as that field. Without it a byte that changes on the way is another token, and nobody would know.
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
