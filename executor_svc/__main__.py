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

from octavo.models import ModelError
from octavo.rpc.server import PortTakenError, run
from octavo.rpc.settings import SettingsError, stop_with
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
    configure_logging("executor", settings.log_level)
    stages = Stages(process_started())
    # Here and not above: what is wrong with a flag is said without waiting for torch.
    from executor_svc.models import ModelLoadError
    from executor_svc.server import EXIT_HUNG, serve

    stages.done("imports")
    resume_gc()
    try:
        code = run(serve(settings, stages))
        if code == EXIT_HUNG:
            # Python would wait for the device thread.
            logging.shutdown()
            os._exit(code)
        return code
    except (ModelError, ModelLoadError, PortTakenError, SettingsError) as error:
        stop_with("executor", error)


if __name__ == "__main__":
    raise SystemExit(main())
