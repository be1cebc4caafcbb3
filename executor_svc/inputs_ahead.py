"""A thread that builds the next step's inputs while the device computes.

Compiled kernels run without Python's lock, so there is time for it. It reads the sequence table, which only the device
thread changes, and never while `computing` is on: that waits for a build under way before it lets the thread go on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Thread

import torch

from executor_svc.batch import StepBatch
from executor_svc.foresight import ForeseenInputs
from executor_svc.input_batch import InputBatch

logger = logging.getLogger(__name__)

Foresee = Callable[[StepBatch, InputBatch], ForeseenInputs | None]


class InputsAhead:
    """Steps that wait for their turn, and the inputs of the first of them once they are built."""

    def __init__(self, foresee: Foresee) -> None:
        self._foresee = foresee
        self._changed = Condition()
        self._waiting: deque[StepBatch] = deque()
        self._running: InputBatch | None = None
        self._tried: StepBatch | None = None
        """The step that was last looked at: once is enough."""
        self._built: ForeseenInputs | None = None
        self._is_building = False
        self._is_stopped = False
        # A daemon: it computes nothing for long, and the device thread waits for what it does.
        self._thread = Thread(target=self._run, name="inputs", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent, from any thread but itself."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def announce(self, batch: StepBatch) -> None:
        """Hear of a step that is about to be queued for the device thread. On any thread, in the order of the queue."""
        with self._changed:
            self._waiting.append(batch)
            if self._running is not None:
                self._changed.notify_all()

    def take(self, batch: StepBatch) -> ForeseenInputs | None:
        """Return what was built for a step whose turn has come, and forget it and all that were before it."""
        with self._changed:
            built, self._built = self._built, None
            if any(each is batch for each in self._waiting):
                while self._waiting.popleft() is not batch:
                    pass
        return built if built is not None and built.batch is batch else None

    @contextmanager
    def computing(self, inputs: InputBatch) -> Iterator[None]:
        """While this is on the device computes the step of these inputs, and the sequence table does not change."""
        with self._changed:
            self._running = inputs
            if self._waiting:
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._running = None
                self._changed.wait_for(lambda: not self._is_building)

    def build_next(self) -> bool:
        """Build the inputs of the step behind the running one. False where there is none, or it was tried already."""
        with self._changed:
            if not self._has_work():
                return False
            batch, running = self._waiting[0], self._running
            assert running is not None  # _has_work
            self._tried, self._is_building = batch, True
        built = None
        try:
            with torch.inference_mode():
                built = self._foresee(batch, running)
        except Exception:
            # The step's turn will come, and tell what is wrong with it.
            logger.warning("inputs were not built ahead", exc_info=True, extra={"fields": {"step": batch.step}})
        finally:
            with self._changed:
                self._built, self._is_building = built, False
                self._changed.notify_all()
        return True

    def _has_work(self) -> bool:
        return self._running is not None and bool(self._waiting) and self._waiting[0] is not self._tried

    def _run(self) -> None:
        # Its tensors are small. Threads of torch's own would look for more of them on the processors that compute.
        torch.set_num_threads(1)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopped or self._has_work())
                if self._is_stopped:
                    return
            self.build_next()
