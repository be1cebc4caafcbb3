"""What an operator wants to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol


class DrainableLink(Protocol):
    """A session with an executor."""

    def drain(self) -> None:
        """Have the executor stop. Never waits."""


class Drains:
    """`drained` is set once this scheduler is to stop; `links`: those of the executors in session, by address."""

    def __init__(self, links: Mapping[str, DrainableLink]) -> None:
        self.drained = asyncio.Event()
        self._links = links

    def drain_executor(self, address: str) -> bool:
        """Have an executor stop; returns whether one is in session at this address."""
        link = self._links.get(address)
        if link is not None:
            link.drain()
        return link is not None
