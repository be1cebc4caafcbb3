"""What can be measured: a server that streams tokens, behind one interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.bench.records import BenchRequest, Record

Clock = Callable[[], float]
"""Seconds from any origin, never going back."""


@dataclass(frozen=True)
class TargetInfo:
    """The server, as it describes itself. `revision` is empty and `max_model_len` 0 where it does not say."""

    protocol: str
    address: str
    api: str
    model: str
    revision: str = ""
    max_model_len: int = 0


@dataclass(frozen=True)
class GenerationOptions:
    """What every request asks for beside its prompt and length."""

    model: str = ""
    """Empty: the only one served."""
    is_chat: bool = False
    """The prompt is the one message of a user; else it is continued as it is."""
    ignore_eos: bool = True
    temperature: float = 0.0
    timeout: float = 600.0
    """Seconds from sending to the end; longer ones fail."""


class Target(Protocol):
    """A server. One instance holds the connections of a run."""

    async def describe(self) -> TargetInfo:
        """Return what is served. Raises BenchError where nothing can be measured."""

    async def encode(self, text: str) -> Sequence[int] | None:
        """Return the text's token ids, for use as prompts; None where the server cannot tell or does not take them."""

    async def count_tokens(self, text: str) -> int | None:
        """Return how many input tokens a prompt comes to, template included; None where the server does not say.

        Raises BenchError where it refuses.
        """

    async def stream(self, request: BenchRequest, record: Record) -> None:
        """Send the request and note in `record` every delivery of tokens as it comes, then the counts.

        Returns at the stream's good end. Raises RequestFailed. Where the caller is cancelled, so is the server's work.
        """

    async def close(self) -> None:
        """Close the connections."""
