"""What a runner on a device does otherwise where it is rank 0 of several."""

from __future__ import annotations

from executor_svc.device import Device
from executor_svc.parallel.lead import ConnectedRanks, LeadingGraphs, LeadingModel, RankModel
from executor_svc.parallel.messages import Kind


class Leading:
    """Rank 0 of ranks that each have a device of their own."""

    def __init__(self, model: RankModel, ranks: ConnectedRanks, device: Device) -> None:
        """`model`: rank 0's part."""
        self.model = LeadingModel(model, ranks)
        """What has the others run their parts, too."""
        self.graphs = LeadingGraphs(device, ranks.watch)
        self._ranks = ranks

    def least(self, left: int) -> int:
        """End the measuring, and return the least of what the ranks have left, in bytes."""
        self._ranks.watch.tell(Kind.PAUSE)
        return self._ranks.group.least(left)
