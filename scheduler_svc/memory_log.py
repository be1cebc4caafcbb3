"""A log line, time and again, that accounts for the KV blocks of every executor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

from scheduler_svc.kv_views import ExecutorKv, KvQuery, KvState

logger = logging.getLogger(__name__)


class MemoryLog:
    """Logs what GetKvState answers, but for the sequences: one line whatever the number of executors, at level info."""

    def __init__(
        self,
        kv_state: Callable[[KvQuery], KvState],
        interval: float,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """interval: seconds from line to line."""
        self._kv_state = kv_state
        self._interval = interval
        self._sleep = sleep

    async def run(self) -> NoReturn:
        """Log for ever, first after one interval."""
        while True:
            await self._sleep(self._interval)
            state = self._kv_state(KvQuery())
            fields = {"executors": [_fields(each) for each in state.executors], "sequences": state.num_sequences}
            logger.info("memory usage", extra={"fields": fields})


def _fields(kv: ExecutorKv) -> dict[str, object]:
    return {
        "executor": kv.address,
        "total_blocks": kv.total_blocks,
        "free_blocks": kv.free_blocks,
        "reserved_blocks": kv.reserved_blocks,
        "owned_blocks": kv.owned_blocks,
        "cached_blocks": kv.cached_blocks,
        "pinned_blocks": kv.pinned_blocks,
        "owned_slots": kv.owned_slots,
        "filled_slots": kv.filled_slots,
        "pending_slots": kv.pending_slots,
        "internal_fragmentation": round(kv.internal_fragmentation, 4),
        "sharing_factor": round(kv.sharing_factor, 4),
        "contiguous_saving": round(kv.contiguous_saving, 4),
        "running_sequences": kv.num_running,
        "waiting_sequences": kv.num_waiting,
    }
