"""Starts the scheduler: python -m scheduler_svc."""

from __future__ import annotations

from octavo.rpc.early_gc import pause_gc, resume_gc
from octavo.rpc.early_signals import end_at_sigterm

end_at_sigterm()
pause_gc()

from octavo.rpc.server import run
from octavo.rpc.settings import stop_with
from octavo.rpc.stages import Stages, process_started
from octavo.rpc.telemetry import configure_logging
from octavo.settings import SchedulerSettings, load
from scheduler_svc.server import StartError, serve


def main() -> int:
    """Read the settings and run until told to stop."""
    settings = load(SchedulerSettings)
    configure_logging("scheduler", settings.log_level)
    stages = Stages(process_started())
    stages.done("imports")
    resume_gc()
    try:
        return run(serve(settings, stages))
    except StartError as error:
        stop_with("scheduler", error)


if __name__ == "__main__":
    raise SystemExit(main())
