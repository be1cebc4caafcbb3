"""Which executors there are: a list or a DNS name, looked up again and again."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import NamedTuple, NoReturn

from scheduler_svc.executor_client import ExecutorClient
from scheduler_svc.term import Term

logger = logging.getLogger(__name__)

LOOK_UP_TIMEOUT = 10.0
"""Seconds for one answer; a name server that does not answer counts as no answer."""


class TargetsError(ValueError):
    """Text that is no list of executors; the message shows the bad entry."""


class Target(NamedTuple):
    """One entry of `--executors`."""

    host: str
    port: int


Resolver = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses (host:port, numeric) of a name and port. Raises OSError where there is no answer."""


def parse_targets(text: str) -> list[Target]:
    """Return the entries of a comma-separated list of host:port. Raises TargetsError."""
    targets = []
    for entry in filter(None, map(str.strip, text.split(","))):
        host, separator, port = entry.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not (separator and host and port.isdecimal() and 0 < int(port) < 65536):
            raise TargetsError(f"{entry!r} is not host:port")
        targets.append(Target(host, int(port)))
    if not targets:
        raise TargetsError("at least one host:port is needed")
    return targets


async def resolve(host: str, port: int) -> list[str]:
    """Look a name up with the system's resolver. Numeric addresses answer for themselves."""
    answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in answers)
    return [f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts]


class ExecutorDirectory:
    """Runs one client for each address. An address is dialled, never its name.

    A failed look-up changes nothing. An address that is missing from an answer is retired: its session, if it has one,
    goes on to its natural end, and it is not dialled again unless it comes back.
    """

    def __init__(
        self,
        targets: list[Target],
        term: Term,
        make_client: Callable[[str], ExecutorClient],
        *,
        interval: float,
        resolver: Resolver = resolve,
    ) -> None:
        self._targets = targets
        self._term = term
        self._make_client = make_client
        self._interval = interval
        self._resolver = resolver
        self._clients: dict[str, ExecutorClient] = {}
        self._last_answers: dict[Target, list[str]] = {}

    @property
    def addresses(self) -> list[str]:
        """The addresses that have a client, retired ones in session included."""
        return list(self._clients)

    async def run(self) -> NoReturn:
        """Look up and keep the clients running, for ever. Raises an ExceptionGroup of what ended a client."""
        async with asyncio.TaskGroup() as group:
            are_expected = False
            while True:
                addresses = await self._look_up()
                if addresses and not are_expected:
                    self._term.expect(addresses)
                    are_expected = True
                self._reconcile(addresses, group)
                await asyncio.sleep(self._interval)

    async def _look_up(self) -> list[str]:
        """Return all addresses, in the order of the targets; where there is no answer, those of the one before."""
        for target in self._targets:
            try:
                async with asyncio.timeout(LOOK_UP_TIMEOUT):
                    answer = await self._resolver(*target)
            except (OSError, TimeoutError, UnicodeError) as error:  # the last: what cannot be a DNS name
                fields = {"host": target.host, "error": str(error) or type(error).__name__}
                level = logging.WARNING if self._last_answers.get(target) is None else logging.INFO
                logger.log(level, "no answer for an executor's name", extra={"fields": fields})
                continue
            if answer:
                self._last_answers[target] = answer
        answers = (self._last_answers.get(target, []) for target in self._targets)
        return list(dict.fromkeys(itertools.chain.from_iterable(answers)))

    def _reconcile(self, addresses: list[str], group: asyncio.TaskGroup) -> None:
        for address in addresses:
            if address not in self._clients:
                client = self._clients[address] = self._make_client(address)
                group.create_task(self._run_client(client))
        for address, client in self._clients.items():
            client.set_retired(address not in addresses)

    async def _run_client(self, client: ExecutorClient) -> None:
        try:
            await client.run()
        finally:
            del self._clients[client.address]
