"""`python -m gateway`: the public API of a cell."""

from __future__ import annotations

import sys

from octavo.rpc.early_gc import pause_gc
from octavo.rpc.early_signals import end_at_sigterm

end_at_sigterm()
pause_gc()

from gateway.server import serve
from octavo.models.errors import ModelError
from octavo.rpc.server import PortTakenError, run
from octavo.rpc.settings import SettingsError, stop_with
from octavo.rpc.stages import Stages, process_started
from octavo.rpc.telemetry import configure_logging
from octavo.settings import GatewaySettings, load


def main() -> int:
    """Run the gateway; return the exit code."""
    settings = load(GatewaySettings)
    configure_logging("gateway", settings.log_level)
    stages = Stages(process_started())
    stages.done("imports")
    try:
        return run(serve(settings, stages))
    except (ModelError, SettingsError, PortTakenError) as error:
        stop_with(GatewaySettings.program, error)


if __name__ == "__main__":
    sys.exit(main())
