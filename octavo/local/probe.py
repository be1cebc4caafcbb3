"""Asking a service for its health."""

from __future__ import annotations

import asyncio

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.rpc.channel import open_channel

INTERVAL = 0.2
"""Seconds between two questions."""


async def wait_until_serving(address: str) -> None:
    """Return once grpc.health.v1 at `address` says that the whole process serves. Waits for ever; cancel to give up."""
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.aio.AioRpcError:
                pass  # not listening yet, or busy
            await asyncio.sleep(INTERVAL)
