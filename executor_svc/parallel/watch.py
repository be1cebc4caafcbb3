"""The ranks' watch over one another, outside collectives: when one is lost all end, with the reason in every log.

A rank may sit in a collective that nobody will answer, so the end is that of the process, at once.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

from executor_svc.parallel.connection import Connection
from executor_svc.parallel.messages import Kind

logger = logging.getLogger(__name__)

EXIT_LOST = 1
"""Exit code of a rank that ends since another one was lost."""

_BETTER_REASON = 0.1
"""Seconds that an error waits for the loss behind it to be heard."""


def end_process() -> None:
    """End this process, whatever its threads do."""
    os._exit(EXIT_LOST)


class Watch:
    """This rank's connections: rank 0's to every other, or another's to rank 0. A thread of each hears its end."""

    def __init__(self, peers: Mapping[int, Connection], end: Callable[[], None] = end_process) -> None:
        """`peers`: by rank. `end`: ends this rank; called once, on any thread."""
        self._peers = dict(peers)
        self._end = end
        self._lock = threading.Lock()
        self._is_over = False
        self.received: SimpleQueue[tuple[Kind, bytearray]] = SimpleQueue()
        """What peers told, losses apart."""
        self._threads = [
            threading.Thread(target=self._listen, args=pair, name=f"rank-{pair[0]}", daemon=True)
            for pair in self._peers.items()
        ]

    def start(self) -> None:
        """Begin to listen."""
        for each in self._threads:
            each.start()

    def tell(self, kind: Kind, message: bytes = b"") -> None:
        """Send every peer a message. One that is gone is a loss."""
        for rank, connection in self._peers.items():
            try:
                connection.send(kind, message)
            except OSError as error:
                self.lose(f"rank {rank} is gone: {error}")

    def lose(self, reason: str) -> None:
        """End all ranks. Once the ranks end in order this does nothing."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        logger.critical("a rank is lost, all of them end", extra={"fields": {"reason": reason}})
        self._leave(Kind.LOST, reason)
        self._end()

    def leave(self, reason: str) -> None:
        """Tell the others that this rank ends, and why; they end too, and it goes on by itself."""
        with self._lock:
            self._is_over = True
        self._leave(Kind.LOST, reason)
        self.close()

    def finish(self) -> None:
        """End in order: what peers do from now on is no loss."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._leave(Kind.END, "")

    def close(self) -> None:
        """Close the connections, and end the threads that listen. Idempotent."""
        for connection in self._peers.values():
            connection.close()
        for each in self._threads:
            if each.is_alive() and each is not threading.current_thread():
                each.join()

    def _leave(self, kind: Kind, reason: str) -> None:
        for connection in self._peers.values():
            connection.say_last(kind, reason.encode())

    def _listen(self, rank: int, connection: Connection) -> None:
        while True:
            try:
                kind, message = connection.receive()
            except (OSError, EOFError) as error:
                self.lose(f"rank {rank} is gone: {error}")
                return
            if kind is Kind.LOST:
                self.lose(message.decode(errors="replace"))
                return
            if kind is Kind.END:
                with self._lock:
                    self._is_over = True
            self.received.put((kind, message))


class guarded:  # noqa: N801 - reads as a word
    """What all ranks do together, or none: an error inside is a loss, since the others wait for this rank."""

    def __init__(self, watch: Watch, rank: int) -> None:
        self._watch = watch
        self._rank = rank

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        """End; the error goes on, where the process does."""
        if error is not None:
            # Where a collective failed since a rank is gone, whoever listens to that rank knows better why.
            time.sleep(_BETTER_REASON)
            self._watch.lose(f"rank {self._rank}: {type(error).__name__}: {error}")
