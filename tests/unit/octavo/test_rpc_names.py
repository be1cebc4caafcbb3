"""A peer that comes back at another address, under the same name, is found: what Kubernetes does with every pod."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import cast

import grpc
import pytest

from octavo.rpc.channel import open_channel
from octavo.rpc.server import RpcServer

OLD, NEW = "127.0.0.2", "127.0.0.1"
NAME = "scheduler.test"
PATIENCE = 20.0
"""Seconds. gRPC's own waits for thirty before it asks for a name again."""
_TYPE_A = 1


class NameServer(asyncio.DatagramProtocol):
    """Answers every question for IPv4 addresses (RFC 1035) with what `address` says, others with nothing."""

    def __init__(self, address: Callable[[], str]) -> None:
        self._address = address
        self._transport: asyncio.DatagramTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """Answer one question; what follows it (EDNS) is left out."""
        end = data.index(b"\0", 12) + 5
        question = data[12:end]
        is_ipv4 = struct.unpack("!H", question[-4:-2])[0] == _TYPE_A
        header = data[:2] + struct.pack("!HHHHH", 0x8180, 1, int(is_ipv4), 0, 0)
        answer = b""
        if is_ipv4:
            answer = b"\xc0\x0c" + struct.pack("!HHIH", _TYPE_A, 1, 0, 4) + socket.inet_aton(self._address())
        self._transport.sendto(header + question + answer, addr)


@pytest.mark.asyncio
async def test_a_channel_follows_a_name_to_another_address() -> None:
    """A call that waits for a peer reaches it soon after its name has another address, over the same channel."""
    answers: list[str] = []

    def address() -> str:
        """The address of the pod that is gone, once, as name servers remember it; then that of the new one."""
        answers.append(NEW if answers else OLD)
        return answers[-1]

    server = RpcServer("127.0.0.1", 0)
    await server.start()
    names, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: NameServer(address), local_addr=("127.0.0.1", 0)
    )
    try:
        target = f"dns://127.0.0.1:{names.get_extra_info('sockname')[1]}/{NAME}:{server.port}"
        async with asyncio.timeout(PATIENCE), open_channel(target) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await check(b"\n\x07nothing", wait_for_ready=True)  # HealthCheckRequest(service="nothing")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND  # it is the server that says so
        assert answers[0] == OLD
        assert answers[-1] == NEW
    finally:
        names.close()
        await server.stop(0)
