"""An event loop whose time is virtual: sleeping costs nothing and takes the same time on any machine."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class _SkippingSelector(selectors.SelectSelector):
    """Where the loop would wait for its next timer, moves the loop's time on instead."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "the loop waits for something that no timer brings"
        self.loop.now += timeout
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at time 0."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _SkippingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def clock() -> float:
    """Return the time of the running loop."""
    return asyncio.get_running_loop().time()


def block(seconds: float) -> None:
    """Let time pass as busy code would: nothing else runs meanwhile."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.now += seconds


def run_virtually(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
