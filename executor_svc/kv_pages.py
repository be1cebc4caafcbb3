"""Pages of the KV memory, made resident before a step writes to them.

The memory is taken when the executor starts and becomes resident page by page, at the first write: a step that comes to
new huge pages in each layer waits while the system finds and clears them, some milliseconds each on a virtual machine
whose host has to find them too. So a thread writes ahead: while the device idles, AHEAD_BYTES; while steps run, only
what the next ones need. What lies beyond stays with the system.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic

from executor_svc.huge_pages import HUGE_PAGE_BYTES, make_resident
from executor_svc.kv_cache import KVCache

AHEAD_BYTES = 1 << 30
"""Of KV memory beyond the highest block in use, made resident while no step runs."""
_IDLE_SECONDS = 0.05
"""Between two steps of a stream there is less."""
_LOOK_SECONDS = 1.0
"""How often the thread looks whether there is more to do and the device idles, until all memory is resident."""


class KvPages:
    """Keeps the memory ahead of the highest block resident. `begin` and `end` are called on the device thread."""

    def __init__(
        self, kv_cache: KVCache, ahead_bytes: int = AHEAD_BYTES, clock: Callable[[], float] = monotonic
    ) -> None:
        """`ahead_bytes`: over all layers. `clock`: seconds."""
        self._clock = clock
        self._tensors = (*kv_cache.keys, *kv_cache.values)
        layer_bytes = self._tensors[0][0].nbytes
        self._num_blocks = kv_cache.num_blocks
        # A huge page of each layer: less would be resident with it in any case.
        self._piece = max(1, HUGE_PAGE_BYTES // layer_bytes)
        self._ahead = max(self._piece, ahead_bytes // (layer_bytes * len(self._tensors)))
        self._resident = 0
        """Blocks, from the first, whose pages were asked for."""
        self._highest = 0
        self._idle_since: float | None = clock()
        self._is_stopped = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-pages", daemon=True)

    @property
    def num_resident_blocks(self) -> int:
        """Blocks, from block 0 on, that a step can write to without waiting for pages."""
        return self._resident

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._is_stopped = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def begin(self, new_blocks: Sequence[int]) -> None:
        """Note that a step begins, and the blocks that its rows are given."""
        self._idle_since = None
        if new_blocks:
            highest = max(new_blocks)
            if highest > self._highest:
                self._highest = highest
                if highest + self._piece >= self._resident:
                    self._wake.set()

    def end(self) -> None:
        """Note that it has ended."""
        self._idle_since = self._clock()

    def catch_up(self) -> bool:
        """Make resident what is wanted now. Returns False where there will be nothing more to do."""
        while self._resident < self._num_blocks:
            begin, end = self._resident, min(self._resident + self._piece, self._num_blocks)
            for tensor in self._tensors:
                if self._is_stopped:
                    return False
                if begin >= self._wanted():
                    return True  # what is left of this piece too: steps run again that do without
                if not make_resident(tensor[begin:end]):
                    return False  # then pages come as they are written to
            self._resident = end
        return False

    def _run(self) -> None:
        while self.catch_up():
            self._wake.wait(_LOOK_SECONDS)
            self._wake.clear()

    def _wanted(self) -> int:
        idle_since = self._idle_since
        is_idle = idle_since is not None and self._clock() - idle_since > _IDLE_SECONDS
        return self._behind_highest(self._ahead if is_idle else self._piece)

    def _behind_highest(self, num_blocks: int) -> int:
        return min(self._num_blocks, self._highest + 1 + num_blocks)
