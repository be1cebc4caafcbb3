"""Signs of the device's progress: what tells a long step from a hung one."""

from __future__ import annotations

from executor_svc.kernels.native.library import num_rounds


class DeviceTicks:
    """A count that grows as the device works: at both ends of each step, and with each round of compiled kernels.

    Ticked by the device thread alone; anyone may read it. Kernels of other kinds tick at the ends of steps only.
    """

    def __init__(self) -> None:
        self._num_ticks = 0

    def tick(self) -> None:
        """Note that the device thread has come further."""
        self._num_ticks += 1

    @property
    def count(self) -> int:
        """The ticks so far."""
        return self._num_ticks + num_rounds()
