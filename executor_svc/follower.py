"""A rank of an executor that is not the first: it has no port and no event loop, and does what rank 0 tells."""

from __future__ import annotations

import logging
import signal

from executor_svc.load import plan_load
from executor_svc.parallel.place import Place
from executor_svc.ranks_plan import RanksPlan
from octavo.rpc.stages import Stages
from octavo.settings import ExecutorSettings

logger = logging.getLogger(__name__)


class _SilentStages(Stages):
    """A start that nobody waits for: rank 0 tells of its own, which takes as long."""

    def done(self, stage: str) -> None:
        """See Stages."""

    def progress(self, stage: str, done: int, total: int) -> None:
        """See Stages."""


def run_follower(settings: ExecutorSettings, place: Place) -> int:
    """Run until rank 0 ends, and return the exit code. Raises SettingsError, ModelError and ModelLoadError.

    Signals to stop come to every rank of a terminal or of torchrun; rank 0 takes them and ends the others in its time.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def connected() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    load = plan_load(settings, _SilentStages(), ranks=RanksPlan(place, on_connected=connected))
    load.follow()
    logger.info("rank stopped", extra={"fields": {"rank": place.share.rank}})
    return 0
