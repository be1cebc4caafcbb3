"""The proxy that the fault harness stands on: each of its faults does what it says, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from tcp_proxy import DOWN, UP, TcpProxy

TIMEOUT = 10.0
LINE = b"a line of text\n"


@contextlib.asynccontextmanager
async def echo_behind_proxy() -> AsyncIterator[tuple[TcpProxy, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A service that sends back what it gets, and a connection to it through a proxy."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1000):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    proxy = TcpProxy(f"{host}:{port}", seed=1)
    await proxy.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        async with asyncio.timeout(TIMEOUT):
            writer.write(LINE)
            assert await reader.readline() == LINE
            yield proxy, reader, writer
    finally:
        writer.close()
        await proxy.stop()
        server.close()


@pytest.mark.asyncio
async def test_a_cut_resets_both_ends() -> None:
    """The peer's next read is the end or an error; a new connection is served."""
    async with echo_behind_proxy() as (proxy, reader, _):
        proxy.cut()
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        again, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(LINE)
        assert await again.readline() == LINE
        writer.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("direction", [UP, DOWN])
async def test_what_is_swallowed_never_comes(direction: str) -> None:
    """One direction is silent, and nobody is told: nothing has come when a connection made later has answered."""
    async with echo_behind_proxy() as (proxy, reader, writer):
        proxy.swallow(direction)
        writer.write(LINE)
        later, late_writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        late_writer.write(LINE)
        assert await later.readline() == LINE
        late_writer.close()
        silent = asyncio.create_task(reader.read(1))
        await asyncio.sleep(0)
        assert not silent.done()
        silent.cancel()
        await asyncio.gather(silent, return_exceptions=True)


@pytest.mark.asyncio
async def test_a_half_closed_direction_ends_for_its_reader() -> None:
    """Down: the client reads the end."""
    async with echo_behind_proxy() as (proxy, reader, _):
        proxy.half_close(DOWN)
        assert await reader.read() == b""


@pytest.mark.asyncio
@pytest.mark.parametrize("direction", [UP, DOWN])
async def test_corruption_changes_bytes_and_no_more(direction: str) -> None:
    """What comes next has the length that was sent, some bytes are others, and what comes behind is whole."""
    async with echo_behind_proxy() as (proxy, reader, writer):
        proxy.corrupt(direction, 2)
        writer.write(LINE)
        changed = await reader.readexactly(len(LINE))
        assert 1 <= sum(one != other for one, other in zip(changed, LINE, strict=True)) <= 2
        assert proxy.num_corrupted == 1
        writer.write(LINE)
        assert await reader.readexactly(len(LINE)) == LINE


@pytest.mark.asyncio
async def test_a_delay_holds_back_and_loses_nothing() -> None:
    """What was sent arrives, later."""
    async with echo_behind_proxy() as (proxy, reader, writer):
        proxy.delay(UP, 0.05)
        started = asyncio.get_running_loop().time()
        writer.write(LINE)
        assert await reader.readline() == LINE
        assert asyncio.get_running_loop().time() - started >= 0.05
