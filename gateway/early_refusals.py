"""Refusing before any work is done what the scheduler would refuse: by its last word on its queues."""

from __future__ import annotations

from gateway.cell import Cell
from gateway.metrics import GatewayMetrics
from gateway.served_models import ServedModels
from octavo.rpc.errors import ServiceError


class EarlyRefusals:
    """Costs a look into a dictionary, so that ten times the load costs the streams that are served next to nothing."""

    def __init__(self, models: ServedModels, cell: Cell, metrics: GatewayMetrics) -> None:
        self._models = models
        self._cell = cell
        self._metrics = metrics

    def check(self, model: str, num_choices: int) -> None:
        """Raise ServiceError (RESOURCE_EXHAUSTED), counted, where so many choices find no place however short they are.

        `model` as a request names it. One that is not served is let through, to be refused for that.
        """
        served = self._models.find(model)
        if served is None:
            return
        try:
            self._cell.check_room(served.name, max(1, num_choices), 1)
        except ServiceError as error:
            self._metrics.refuse(error.code)
            raise

    def check_all(self) -> None:
        """Raise as `check` where no served model has a place for one choice: whatever a request says, it is refused."""
        full = None
        for served in self._models:
            try:
                self._cell.check_room(served.name, 1, 1)
            except ServiceError as error:
                full = error
            else:
                return
        if full is not None:
            self._metrics.refuse(full.code)
            raise full
