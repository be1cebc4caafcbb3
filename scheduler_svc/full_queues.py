"""The queues that gateways are told of, so that they refuse by themselves what would be refused here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from octavo.rpc.full_queue import FullQueue

HOLD = 1.0
"""Seconds that a queue is told of once it would take whom it has refused last, and is half empty.

Where all rows end in one step the queue is empty a step later, and full again by the next refusals: were gateways told
of nothing in between, all would come at once, and wait for one another to hear that they came for nothing.
"""


@dataclass
class _Watched:
    """The choices, and tokens of each, of whom it has refused last, and since when it would not have."""

    refused: tuple[int, int]
    open_since: float | None = None


class FullQueues:
    """By model, the queues that have refused somebody, until they have been open for HOLD.

    What is told is what is so, places included: a queue that is told of refuses nobody whom it has a place for.
    """

    def __init__(self, find: Callable[[str], FullQueue | None], clock: Callable[[], float]) -> None:
        """`find`: a model's queue; None where nothing is known of any. `clock`: seconds."""
        self._find = find
        self._clock = clock
        self._watched: dict[str, _Watched] = {}
        self._queues: dict[str, FullQueue] = {}

    @property
    def queues(self) -> Mapping[str, FullQueue]:
        """The queues as they were looked at last."""
        return self._queues

    def note_refusal(self, model: str, num_choices: int, num_tokens: int) -> None:
        """Note that a request of so many choices, each of so many tokens, has met a full queue."""
        self._watched[model] = _Watched((num_choices, num_tokens))

    def look(self) -> bool:
        """Look again, and return whether anything has changed. Costs nothing while nobody was refused."""
        if not self._watched:
            return False
        now = self._clock()
        before, self._queues = self._queues, {}
        for model, watched in list(self._watched.items()):
            queue = self._find(model)
            if queue is not None and not (queue.is_half_empty and queue.fits(*watched.refused)):
                watched.open_since = None
            elif watched.open_since is None:
                watched.open_since = now
            elif now - watched.open_since >= HOLD:
                del self._watched[model]
                continue
            if queue is not None:
                self._queues[model] = queue
        return self._queues != before
