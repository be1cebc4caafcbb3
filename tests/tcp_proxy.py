"""A TCP proxy that can do to a connection what networks do: delay, cut, half-close, swallow and corrupt."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

CHUNK = 64 * 1024
UP, DOWN = "up", "down"
"""Directions: towards the service, and back from it."""


@dataclass(eq=False)
class _Pump:
    """One direction of one connection."""

    direction: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_swallowing: bool = False
    num_to_corrupt: int = 0


@dataclass(eq=False)
class TcpProxy:
    """Stands before `target` (host:port). What a fault does to connections, it does to those that are open then."""

    target: str
    seed: int = 0
    port: int = 0
    is_refusing: bool = False
    num_corrupted: int = 0
    _delays: dict[str, float] = field(default_factory=lambda: {UP: 0.0, DOWN: 0.0})
    _pumps: set[_Pump] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _server: asyncio.Server | None = None

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=CHUNK)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Cut everything and listen no more."""
        if self._server is None:
            return
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection, both ways."""
        for pump in list(self._pumps):
            pump.writer.transport.abort()

    def half_close(self, direction: str) -> None:
        """End one direction of every connection as its sender would by closing for writing; the other goes on."""
        for pump in self._of(direction):
            pump.is_swallowing = True
            with contextlib.suppress(OSError, RuntimeError):
                pump.writer.write_eof()

    def swallow(self, direction: str) -> None:
        """Let nothing more through one way, and tell nobody: a cut in one direction, until the connection ends."""
        for pump in self._of(direction):
            pump.is_swallowing = True

    def corrupt(self, direction: str, num_bytes: int = 1) -> None:
        """Change so many bytes of what comes next on every connection."""
        for pump in self._of(direction):
            pump.num_to_corrupt += num_bytes

    def delay(self, direction: str, seconds: float) -> None:
        """Hold back all that comes from now on for so long."""
        self._delays[direction] = seconds

    def _of(self, direction: str) -> list[_Pump]:
        return [pump for pump in self._pumps if pump.direction == direction]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._connect(reader, writer)
        except asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_refusing:
            return
        host, _, port = self.target.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port), limit=CHUNK)
        except OSError:
            return
        pumps = [_Pump(UP, reader, far_writer), _Pump(DOWN, far_reader, writer)]
        self._pumps.update(pumps)
        try:
            # A peer that ends its side, or dies, ends the connection: gRPC never uses one that is half open.
            tasks = [asyncio.create_task(self._pump(pump)) for pump in pumps]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._pumps.difference_update(pumps)
            far_writer.transport.abort()

    async def _pump(self, pump: _Pump) -> None:
        with contextlib.suppress(OSError):
            while data := await pump.reader.read(CHUNK):
                if self._delays[pump.direction]:
                    await asyncio.sleep(self._delays[pump.direction])
                if pump.is_swallowing:
                    continue
                if pump.num_to_corrupt:
                    data = self._corrupted(data, pump)
                pump.writer.write(data)
                await pump.writer.drain()

    def _corrupted(self, data: bytes, pump: _Pump) -> bytes:
        changed = bytearray(data)
        for _ in range(min(pump.num_to_corrupt, len(changed))):
            changed[self._random.randrange(len(changed))] ^= self._random.randrange(1, 256)
        pump.num_to_corrupt = 0
        self.num_corrupted += 1
        return bytes(changed)
