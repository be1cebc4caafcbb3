"""The gRPC server that every service starts: limits, error mapping, health, reflection, order of start and stop."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine

import grpc
import grpc.aio
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from octavo.rpc.interceptors import ErrorInterceptor
from octavo.rpc.limits import SERVER_OPTIONS
from octavo.rpc.reflection import add_reflection

logger = logging.getLogger(__name__)


class PortTakenError(Exception):
    """The address cannot be bound."""


def port_taken(address: str, reason: object, flag: str) -> PortTakenError:
    """Return the error for an address that cannot be bound; `flag` gave its port."""
    return PortTakenError(
        f"cannot listen on {address}: {reason}: choose another port with {flag} (0 picks a free one), or another "
        "address with --bind"
    )


class HealthBoard:
    """What grpc.health.v1 answers, by service name; "" is the whole process. Everything starts as NOT_SERVING.

    Watch streams every change, since grpc's own servicer does.
    """

    def __init__(self) -> None:
        self.servicer = HealthServicer()
        self._serving: dict[str, bool] = {}
        self._draining = False

    async def set(self, service: str, serving: bool) -> None:
        """Set one status. After `drain` everything stays NOT_SERVING."""
        serving = serving and not self._draining
        if self._serving.get(service) == serving:
            return
        self._serving[service] = serving
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self.servicer.set(service, status)

    def is_serving(self, service: str = "") -> bool:
        """Tell one status as it was set last."""
        return self._serving.get(service, False)

    async def drain(self) -> None:
        """Set everything to NOT_SERVING for good."""
        self._draining = True
        for service in list(self._serving):
            await self.set(service, False)


class RpcServer:
    """A grpc.aio server. Add servicers to `server`, then `start`; the bound port is in `port`."""

    def __init__(self, bind: str, port: int, flag: str = "--port") -> None:
        """`flag`: the one that gave the port, for people whose port is taken."""
        self.server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=SERVER_OPTIONS)
        self.health = HealthBoard()
        self.port = port
        self._bind = bind
        self._flag = flag

    async def start(self, *service_names: str) -> None:
        """Bind and listen. Health knows "" and `service_names`, all NOT_SERVING; reflection lists them.

        Raises PortTakenError where the address is in use or not ours.
        """
        health_pb2_grpc.add_HealthServicer_to_server(self.health.servicer, self.server)
        for name in ("", *service_names):
            await self.health.set(name, False)
        add_reflection(self.server, (*service_names, health.SERVICE_NAME))
        address = f"{self._bind}:{self.port}"
        try:
            self.port = self.server.add_insecure_port(address)
        except RuntimeError as error:
            raise port_taken(address, error, self._flag) from error
        await self.server.start()

    async def stop(self, grace: float) -> None:
        """Say NOT_SERVING, refuse new calls, wait up to `grace` seconds for live ones, then cut them."""
        await self.health.drain()
        await self.server.stop(grace)


async def wait_for_signal() -> None:
    """Return at the first SIGTERM or SIGINT. A second one of either takes its usual effect: the process dies."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    try:
        await stop.wait()
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(signum)


def run(main: Coroutine[None, None, int]) -> int:
    """Run a service's main coroutine on uvloop and return its exit code."""
    return uvloop.run(main)
