"""Running several coroutines until the first of them ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def until_first(*coroutines: Coroutine[Any, Any, T]) -> T:
    """Run all until one ends, cancel and await the others, then return or raise what the first did.

    Where several have ended at once the earlier argument counts. No task outlives the call, however it ends.
    """
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        # A loser's own error is of no interest any more, but must be fetched or asyncio reports it as lost.
        await asyncio.gather(*tasks, return_exceptions=True)
    return next(task for task in tasks if task in done).result()
