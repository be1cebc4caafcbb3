"""A target that answers by a script, on the running loop's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from virtual_time import clock

from octavo.bench.records import BenchRequest, Record, RequestFailed
from octavo.bench.target import TargetInfo


@dataclass(frozen=True)
class Script:
    """How one request goes: pauses in seconds, each followed by a delivery of as many tokens."""

    pauses: Sequence[float] = (0.5, 0.1, 0.1)
    tokens_per_delivery: int = 1
    failure: RequestFailed | None = None
    """Raised after the deliveries."""
    on_start: Callable[[], None] | None = None


class FakeTarget:
    """Answers request i by `scripts[i]`, else by `script`; notes who was live when and who was cancelled."""

    def __init__(self, script: Script | None = None, scripts: Mapping[int, Script] | None = None) -> None:
        self._script = script or Script()
        self._scripts = dict(scripts or {})
        self.info = TargetInfo("fake", "here", "completions", "model", "revision", 4096)
        self.live = 0
        self.most_live = 0
        self.cancelled: list[int] = []
        self.requests: list[BenchRequest] = []
        self.first_request = asyncio.Event()

    async def describe(self) -> TargetInfo:
        return self.info

    async def encode(self, text: str) -> Sequence[int] | None:
        return [len(word) for word in text.split()]

    async def count_tokens(self, text: str) -> int | None:
        return len(text.split())

    async def stream(self, request: BenchRequest, record: Record) -> None:
        script = self._scripts.get(record.index, self._script)
        self.requests.append(request)
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        self.first_request.set()
        try:
            if script.on_start is not None:
                script.on_start()
            for pause in script.pauses:
                await asyncio.sleep(pause)
                record.stamps.append(clock())
                record.delta_tokens.append(script.tokens_per_delivery)
            if script.failure is not None:
                raise script.failure
        except asyncio.CancelledError:
            self.cancelled.append(record.index)
            raise
        finally:
            self.live -= 1
            record.prompt_tokens = len(request.prompt)
            record.output_tokens = sum(record.delta_tokens)
            record.is_counted_by_server = True

    async def close(self) -> None:
        """Nothing to close."""
