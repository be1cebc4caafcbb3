"""The HTTP server: uvicorn on the gateway's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from gateway.http.protocol import PatientProtocol
from octavo.rpc.server import port_taken

MAX_HEADER_BYTES = 64 * 1024
"""Of a request line with its headers; a connection that sends more is answered 400 and closed."""
KEEP_ALIVE = 75.0
"""Seconds that an idle connection stays open: longer than clients and proxies keep theirs, so that they close first."""
_BACKLOG = 1024


class HttpServer:
    """Serves an ASGI application. Make it anywhere; `start` and `stop` on the event loop."""

    def __init__(self, app: Any, bind: str, port: int) -> None:
        """`port` 0 picks a free one."""
        self.port = port
        self._bind = bind
        # Signals are the service's own affair, and so is logging.
        self._server = _Server(
            uvicorn.Config(
                app,
                http=PatientProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=int(KEEP_ALIVE),
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises PortTakenError where the address is in use or not ours."""
        listener = self._listen()
        self.port = listener.getsockname()[1]
        self._serving = asyncio.create_task(self._server.serve([listener]))
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait({self._serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            ready.cancel()
            await self._serving

    async def stop(self, grace: float) -> None:
        """Refuse new connections, wait up to `grace` seconds for answers under way, then cut them."""
        if self._serving is None:
            return
        self._server.should_exit = True
        await asyncio.wait({self._serving}, timeout=grace)
        while not self._serving.done():
            # Nobody reads what is left: an application that writes to a connection that is gone ends by itself.
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            await asyncio.wait({self._serving}, timeout=0.05)
        await self._serving
        self._serving = None

    def _listen(self) -> socket.socket:
        # gRPC wants IPv6 in brackets, sockets want it bare; "::" is every address of both kinds, as for gRPC.
        host = self._bind.strip("[]")
        try:
            family = socket.getaddrinfo(host, self.port, type=socket.SOCK_STREAM)[0][0]
            both = host == "::" and socket.has_dualstack_ipv6()
            return socket.create_server((host, self.port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
        except OSError as error:
            raise port_taken(f"{self._bind}:{self.port}", error.strerror, "--http-port") from error


class _Server(uvicorn.Server):
    """uvicorn that says when it listens and leaves the process's signals alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield
