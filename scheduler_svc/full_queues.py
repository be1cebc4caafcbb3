"""The queues that gateways are told of, so that they refuse by themselves what would be refused here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from octavo.rpc.full_queue import FullQueue


class FullQueues:
    """By model, the queues that have refused somebody, until they would take the last of those and are half empty.

    Under an overload a place gets free again and again: were gateways told of nothing each time, all would come for it.
    """

    def __init__(self, find: Callable[[str], FullQueue | None]) -> None:
        """`find`: a model's queue where whoever comes now has to wait, else None."""
        self._find = find
        self._last_refused: dict[str, tuple[int, int]] = {}
        self._queues: dict[str, FullQueue] = {}

    @property
    def queues(self) -> Mapping[str, FullQueue]:
        """The queues as they were looked at last."""
        return self._queues

    def note_refusal(self, model: str, num_choices: int, num_tokens: int) -> None:
        """Note that a request of so many choices, each of so many tokens, has met a full queue."""
        self._last_refused[model] = num_choices, num_tokens

    def look(self) -> bool:
        """Look again, and return whether anything has changed. Costs nothing while nobody was refused."""
        if not self._last_refused:
            return False
        before, self._queues = self._queues, {}
        for model, refused in list(self._last_refused.items()):
            queue = self._find(model)
            if queue is None or (queue.is_half_empty and queue.fits(*refused)):
                del self._last_refused[model]
            else:
                self._queues[model] = queue
        return self._queues != before
