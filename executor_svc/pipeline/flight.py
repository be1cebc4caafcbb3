"""A step between its launch and the moment that the host knows what it gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from executor_svc.batch import PromptLogprobs, RowStatus, StepBatch, StepResult
from executor_svc.device import Device, Event, Pinned
from executor_svc.pipeline.columns import Layout
from executor_svc.pipeline.sampling import FetchedLogprobs

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Marks:
    """Timed places of a step on the compute stream."""

    begun: Event
    forwarded: Event
    done: Event


@dataclass(frozen=True)
class Airborne:
    """What was launched for R rows, N of which sample, and what the host will read of it."""

    rows: Ints
    """int64 [R]: index in the batch."""
    slots: Ints
    """int64 [R]."""
    query_start: npt.NDArray[np.int32]
    """int32 [R + 1]."""
    sampling: Ints
    """int64 [N]: which of the R."""
    places: Ints
    """int64 [N]: index in its sequence of each token that is drawn."""
    where: Layout
    """What was launched, rows of nobody included."""
    packed: Pinned
    """See StepOps.finish."""
    landed: Event
    """Behind all that is fetched."""
    marks: Marks
    prompt_sound: Bools | None = None
    """bool [R]: False where scoring a prompt met what is not finite."""
    logprobs: FetchedLogprobs | None = None
    prompt_logprobs: Mapping[int, PromptLogprobs] = field(default_factory=dict)

    def read(self) -> tuple[Ints, Bools]:
        """Give the drawn tokens, int64 [N], and which of the R rows are sound. After `landed`."""
        told, where = self.packed.bytes(), self.where
        split = 8 * where.sampling
        tokens = told[:split].view(np.int64)[: len(self.sampling)].copy()
        flags = told[split : split + self.query_start[-1]].astype(bool)
        # A row is sound if all its tokens are; each has at least one.
        sound: Bools = np.logical_and.reduceat(flags, self.query_start[:-1])
        logits = told[split + where.tokens :].astype(bool)
        sound[self.sampling] &= logits[: len(self.sampling)]
        if self.prompt_sound is not None:
            sound &= self.prompt_sound
        return tokens, sound


class Flight:
    """A step under way, or one that was over at its launch and waits for its turn to be told."""

    def __init__(
        self,
        batch: StepBatch,
        statuses: list[RowStatus] | None = None,
        airborne: Airborne | None = None,
        *,
        result: StepResult | None = None,
        prepare: float = 0.0,
    ) -> None:
        """`result`: what it gave, where that is known; `prepare`: seconds from its beginning to its launch."""
        self.batch = batch
        self.statuses = [] if statuses is None else statuses
        self.airborne = airborne
        self.result = result
        self.prepare = prepare
        self.skipped: set[int] = set()
        """Handles whose stays a step before this one has ended, as turned out after the launch."""
        self.waited: Event | None = None
        """The end of the step before it, where the device went on from that one to this."""

    def wait(self) -> None:
        """Wait until what it gave is in the host's memory. Any thread may. Raises DeviceLostError."""
        if self.airborne is not None:
            self.airborne.landed.synchronize()

    def idle(self, device: Device) -> float | None:
        """Seconds that the device had nothing to do before it; None where it did not go on from another. Landed."""
        if self.waited is None or self.airborne is None:
            return None
        return max(0.0, device.seconds_between(self.waited, self.airborne.marks.begun))
