"""Health that means progress, and one dump of the gateway's state for each stall."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

from gateway.cell import Cell
from gateway.live_request import LiveRequest
from gateway.live_requests import LiveRequests
from gateway.served_models import ServedModels
from octavo.rpc.progress import StallLog, StallWatch
from octavo.rpc.server import HealthBoard

logger = logging.getLogger(__name__)

INFERENCE_SERVICE = "octavo.v1.InferenceService"
ADMIN_SERVICE = "octavo.v1.AdminService"
_MOST_DUMPED_REQUESTS = 20


class GatewayHealth:
    """Keeps health true: a model serves while the cell can run it and is not stalled, the service while any model does.

    A cell is stalled where its scheduler says so, or where requests wait here and nothing is heard of it: no scheduler,
    or one that says nothing. A queue that moves without us is none.
    """

    def __init__(
        self,
        board: HealthBoard,
        admin_board: HealthBoard,
        models: ServedModels,
        cell: Cell,
        live: LiveRequests,
        num_detached: Callable[[], int],
        *,
        stall_timeout: float,
        clock: Callable[[], float],
    ) -> None:
        """`admin_board`, that of the operator's port, serves while there is a scheduler to ask. `clock`: seconds, that
        of the requests.
        """
        self._board = board
        self._admin_board = admin_board
        self._models = models
        self._cell = cell
        self._live = live
        self._num_detached = num_detached
        self._clock = clock
        self._watch = StallWatch(lambda: bool(live.unended()), lambda: cell.num_signs, stall_timeout)
        self._log = StallLog(
            logger, stalled="requests wait and nothing comes", again="requests go on", state=self._state
        )
        self._has_told = False

    async def watch(self) -> NoReturn:
        """Find out for ever whether requests wait and nothing comes."""
        await self._watch.run(self._cell.set_stuck, self._clock)

    async def publish(self) -> NoReturn:
        """Set the boards on every change, for ever."""
        while True:
            is_stalled = self._cell.is_stalled
            for model in self._models:
                is_ready = not is_stalled and self._cell.pool(model.prepared) is not None
                await self._board.set(f"model/{model.name}", is_ready)
            is_any = any(self._board.is_serving(f"model/{model.name}") for model in self._models)
            for service in ("", INFERENCE_SERVICE):
                await self._board.set(service, is_any)
            for service in ("", ADMIN_SERVICE):
                await self._admin_board.set(service, self._cell.is_attached)
            self._tell(is_stalled and bool(self._live.unended()), is_stalled)
            await self._cell.wait_changed()

    def _tell(self, is_stuck: bool, is_stalled: bool) -> None:
        if is_stuck and not self._has_told:
            self._has_told = True
            self._log.tell(True, self._watch.stuck_for)
        elif self._has_told and not is_stalled:
            self._has_told = False
            self._log.tell(False, self._watch.stuck_for)

    def _state(self) -> dict[str, object]:
        unended = self._live.unended()
        return {
            "is_attached": self._cell.is_attached,
            "live": len(self._live),
            "waiting": len(unended),
            "without_client": self._num_detached(),
            "oldest_requests": repr([self._describe(request) for request in unended[:_MOST_DUMPED_REQUESTS]]),
        }

    def _describe(self, request: LiveRequest) -> dict[str, object]:
        now = self._clock()
        last = max((each.last_token_at for each in request.choices if each.last_token_at is not None), default=None)
        return {
            "request_id": request.id,
            "age_s": round(now - request.accepted_at, 1),
            "prompt_tokens": len(request.prompt_token_ids),
            "output_tokens": request.num_output_tokens,
            "is_confirmed": request.confirmed,
            "since_last_token_s": None if last is None else round(now - last, 1),
        }
