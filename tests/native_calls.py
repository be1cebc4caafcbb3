"""The calls of compiled kernels that a body makes, without their being made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from executor_svc.kernels.native.library import ADDRESS, load_library


class CallList:
    """A Recorder that notes each call's name and those of its arguments that are no addresses."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def add(self, name: str, of_words: int | None, types: Sequence[type], arguments: Sequence[Any]) -> None:
        """See Recorder."""
        numbers = (value for kind, value in zip(types, arguments, strict=True) if kind is not ADDRESS)
        self.calls.append((name, *map(float, numbers)))


def calls_of(body: Callable[[], Any]) -> list[tuple[Any, ...]]:
    """Return the calls of a body, in order."""
    calls = CallList()
    with load_library().recorded_by(calls):
        body()
    return calls.calls
