"""Health by what can run: SERVING while an executor is ready, for the process and for each model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NoReturn

from octavo.rpc.server import HealthBoard
from scheduler_svc.load import ModelPoolView


class PoolHealth:
    """Keeps a HealthBoard in step with the model pools.

    `service_names` are SERVING while any model can run, "model/<name>" while that model can; none while the cell is
    stalled.
    """

    def __init__(self, board: HealthBoard, service_names: Sequence[str]) -> None:
        self._board = board
        self._service_names = service_names
        self._models: frozenset[str] = frozenset()
        self._is_stalled = False
        self._changed = asyncio.Event()

    def pools_changed(self, pools: Sequence[ModelPoolView]) -> None:
        """Take in which models can run now."""
        self._models = frozenset(pool.model for pool in pools)
        self._changed.set()

    def stall_changed(self, is_stalled: bool) -> None:
        """Take in whether work waits and nothing commits."""
        self._is_stalled = is_stalled
        self._changed.set()

    async def run(self) -> NoReturn:
        """Set the board on every change, for ever."""
        known: set[str] = set()
        while True:
            await self._changed.wait()
            self._changed.clear()
            models = frozenset() if self._is_stalled else self._models
            known |= self._models
            for model in sorted(known):
                await self._board.set(f"model/{model}", model in models)
            for name in self._service_names:
                await self._board.set(name, bool(models))
