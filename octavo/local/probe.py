"""Waiting for a service's health."""

from __future__ import annotations

import asyncio

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.rpc.channel import open_channel

INTERVAL = 0.1
"""Seconds between two tries to reach a service that does not listen yet. One costs about a millisecond."""


async def wait_until_serving(address: str) -> None:
    """Return once grpc.health.v1 at `address` says that the whole process serves. Waits for ever; cancel to give up.

    A service that listens is watched, so the change is known when it comes.
    """
    while True:
        # A channel for each try: the pauses that a channel makes by itself grow to seconds.
        async with open_channel(address) as channel:
            call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            try:
                async for answer in call:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError:
                pass  # not listening yet, or gone again
            finally:
                call.cancel()  # ends it in every case, also where this task was cancelled
        await asyncio.sleep(INTERVAL)
