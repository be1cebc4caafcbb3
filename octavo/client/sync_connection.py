"""One connection for code that blocks.

It stands on grpc's own blocking channel and not on an event loop in a thread: that channel serves any number of
threads, has no thread while nothing is asked, and a cancel is a plain call from wherever it comes.
"""

from __future__ import annotations

import threading
from typing import Any

import grpc

from octavo.client.client_rpcs import SERVICE_CONFIG, RequestT, ResponseT, Rpc, grpc_timeout
from octavo.client.discovery import Api, checked_address, find_blocking, key_metadata
from octavo.client.errors import CallInfo, cancelled, error_from
from octavo.rpc.channel import open_sync_channel


class SyncConnection:
    """Finds its peer and connects on first use. Every method may be called from any thread."""

    def __init__(self, api: Api, address: str | None, api_key: str | None = None) -> None:
        """`address`: host:port; None: found on first use. `api_key` goes with each call.

        Raises InvalidArgumentError.
        """
        self._metadata = key_metadata(api_key)
        self._api = api
        self._address = None if address is None else checked_address(address)
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._is_closed = False

    @property
    def address(self) -> str | None:
        """Where the peer is; None until it has been looked for."""
        return self._address

    def call_info(self, rpc: Rpc[Any, Any], timeout: float | None) -> CallInfo:
        """Return what the words of an error need."""
        return CallInfo(f"the {self._api.noun} at {self._address}", rpc.name, timeout)

    def unary(self, rpc: Rpc[RequestT, ResponseT], request: RequestT, timeout: float | None) -> ResponseT:
        """Ask and wait for the answer. `timeout`: seconds. Whatever ends the waiting ends the call.

        Raises ServiceError.
        """
        seconds = grpc_timeout(timeout)
        with self._lock:
            method = self._open_channel().unary_unary(rpc.path, *_codecs(rpc))
            call = method.future(request, timeout=seconds, metadata=self._metadata)
        try:
            answer: ResponseT = call.result()
            return answer
        except grpc.FutureCancelledError:
            raise cancelled("CLIENT_CLOSED", "the client was closed before the call was complete") from None
        except grpc.RpcError as error:
            raise error_from(error, self.call_info(rpc, timeout)) from None
        except BaseException:  # KeyboardInterrupt, above all
            call.cancel()
            raise

    def stream(self, rpc: Rpc[RequestT, ResponseT], request: RequestT, timeout: float | None) -> Any:
        """Ask and return grpc's call, an iterator of answers. Raises ServiceError where nobody can be found."""
        seconds = grpc_timeout(timeout)
        with self._lock:
            return self._open_channel().unary_stream(rpc.path, *_codecs(rpc))(
                request, timeout=seconds, metadata=self._metadata
            )

    def close(self) -> None:
        """Close the connection; calls under way end. No effect where it is closed."""
        with self._lock:
            self._is_closed = True
            if self._channel is not None:
                self._channel.close()
                self._channel = None

    def _open_channel(self) -> grpc.Channel:
        if self._is_closed:
            raise RuntimeError("this client is closed: make a new one")
        if self._channel is None:
            if self._address is None:
                self._address = find_blocking(self._api)
            self._channel = open_sync_channel(self._address, SERVICE_CONFIG)
        return self._channel


def _codecs(rpc: Rpc[RequestT, ResponseT]) -> tuple[Any, Any]:
    return rpc.request_type.SerializeToString, rpc.response_type.FromString
