"""Starts the executor: python -m executor_svc."""

from __future__ import annotations

import logging
import os
import sys

# OpenMP reads it when torch is loaded, so it stands before every other import. A thread that spins for long at the end
# of a parallel loop takes the core that another service or a slower thread needs: docs/decisions/openmp-spinning.md.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from octavo.rpc.early_gc import pause_gc, resume_gc
from octavo.rpc.early_signals import end_at_sigterm

end_at_sigterm()
pause_gc()

from executor_svc.preload import preload_torch

preload_torch()

from executor_svc.parallel.place import find_place, take_cores
from executor_svc.parallel.start import start_ranks
from octavo.models import ModelError
from octavo.rpc.server import PortTakenError, run
from octavo.rpc.settings import SettingsError, refuse_start, stop_with
from octavo.rpc.stages import Stages, process_started
from octavo.rpc.telemetry import configure_logging
from octavo.settings import ExecutorSettings, load

SWITCH_INTERVAL = 0.0005
"""Seconds that one thread may run Python while another wants to; Python's own is 0.005. Whatever the event loop has to
do at length, a page of metrics or the frame of a long prompt, holds up the device by no more than this.
"""


def main() -> int:
    """Read the settings and run until told to stop."""
    settings = load(ExecutorSettings)
    sys.setswitchinterval(SWITCH_INTERVAL)
    stages = Stages(process_started())
    try:
        place = find_place(settings, os.environ)
    except SettingsError as error:
        stop_with("executor", error)
    rank = 0 if place is None else place.share.rank
    configure_logging(f"executor-rank-{rank}" if rank else "executor", settings.log_level)
    started = None
    if place is not None:
        started = start_ranks(settings, place)
        settings = take_cores(settings, place)
    # Here and not above: what is wrong with a flag is said without waiting for torch.
    from executor_svc.follower import run_follower
    from executor_svc.models import ModelLoadError
    from executor_svc.ranks_plan import RanksPlan
    from executor_svc.server import EXIT_HUNG, serve

    if not rank:
        stages.done("imports")
    resume_gc()
    try:
        if place is not None and rank:
            code = run_follower(settings, place)
        else:
            code = run(serve(settings, stages, None if place is None else RanksPlan(place, started)))
    except (ModelError, ModelLoadError, PortTakenError, SettingsError) as error:
        code = refuse_start("executor", error)
    # Python would wait for a device thread that hangs; and NCCL, of ranks on GPUs, for the graphs that it is part of.
    if code == EXIT_HUNG or (place is not None and settings.device != "cpu"):
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
