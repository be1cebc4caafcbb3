"""Graphs of decode: all that a step of so many rows launches, in two parts, made again by two calls.

Steps of fewer rows are filled up with rows that are nobody's. What only some steps want of sampling stands between
the parts: such a step takes the first graph, and samples by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from torch import Tensor

from executor_svc.device import Device, Graph
from executor_svc.pipeline.columns import DeviceColumns, Layout, layout
from executor_svc.pipeline.sampling import DeviceSampler
from executor_svc.pipeline.step_ops import Computed, StepOps

logger = logging.getLogger(__name__)

Capture = Callable[[Callable[[], None]], Graph]
"""See Device.capture."""
CAPTURE_SECONDS = 60.0
"""After which no further size is captured: steps of that size are filled up to a larger one."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Rows of the graphs: powers of two, and the most there can be."""
    return sorted({1 << power for power in range(max_num_seqs.bit_length())} | {max_num_seqs})


@dataclass(frozen=True)
class DecodeGraph:
    """A decode step of some number of rows."""

    where: Layout
    columns: DeviceColumns
    forward: Graph
    computed: Computed
    """What `forward` leaves."""
    draw: Graph
    packed: Tensor
    """What `draw` leaves, see StepOps.finish."""


class DecodeGraphs:
    """The graphs of a runner."""

    def __init__(
        self, device: Device, ops: StepOps, sampler: DeviceSampler, place: Tensor, capture_model: Capture | None = None
    ) -> None:
        """`place`: where every step reads its columns. `capture_model`: captures what runs the model, where that takes
        more than the device's own.
        """
        self._device = device
        self._capture_model = device.capture if capture_model is None else capture_model
        self._ops = ops
        self._sampler = sampler
        self._place = place
        self._graphs: list[DecodeGraph] = []

    def __len__(self) -> int:
        """How many there are."""
        return len(self._graphs)

    def fitting(self, rows: int) -> DecodeGraph | None:
        """Give the smallest that has room for so many rows."""
        return next((graph for graph in self._graphs if graph.where.rows >= rows), None)

    def drop(self) -> None:
        """Forget all: something that they hold the address of has moved."""
        self._graphs.clear()

    def capture(self, sizes: Sequence[int], fill: Callable[[Layout], None], seconds: float = CAPTURE_SECONDS) -> None:
        """Capture a graph of each size, the largest first, whose memory the others then share.

        `fill` brings columns of nobody's rows to the device. Raises what a captured step raises.
        """
        started = monotonic()
        made: list[DecodeGraph] = []
        for size in sorted(sizes, reverse=True):
            if made and monotonic() - started > seconds:
                break
            made.append(self._capture(layout(size, size, size), fill))
        self._graphs = made[::-1]
        fields = {"sizes": [graph.where.rows for graph in self._graphs], "seconds": round(monotonic() - started, 3)}
        logger.info("graphs of decode steps captured", extra={"fields": fields})
        if len(made) < len(sizes):
            left = sorted(set(sizes) - {graph.where.rows for graph in made})
            logger.warning(
                "the time for capturing graphs was up; smaller steps take larger graphs",
                extra={"fields": {"left_out": left}},
            )

    def _capture(self, where: Layout, fill: Callable[[Layout], None]) -> DecodeGraph:
        device, ops, sampler = self._device, self._ops, self._sampler
        columns = where.device_views(self._place)
        results: list[Computed] = []
        packed: list[Tensor] = []

        def forward() -> None:
            results.append(ops.compute(columns, (1,) * where.rows, None))

        def draw() -> None:
            computed = results[-1]
            drawn = sampler.draw(computed.logits, computed.finite_logits, columns)
            packed.append(ops.finish(columns, drawn, computed))

        fill(where)
        with device.on(device.compute):
            # Compiles and sets up whatever is used for the first time.
            forward()
            draw()
        device.synchronize()
        results.clear()
        packed.clear()
        forwarding = self._capture_model(forward)
        return DecodeGraph(where, columns, forwarding, results[-1], device.capture(draw), packed[-1])
