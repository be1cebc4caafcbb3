"""Settings that every test shares."""

from __future__ import annotations

import os
import signal

# As in executor_svc/__main__.py, and for the same reason: cells in this process share its cores with the tests.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# A shell starts jobs in the background deaf to Ctrl-C, and they hand that on to the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from hypothesis import HealthCheck, settings

# Examples differ between machines in time, never in outcome: no deadline, and the same ones in every run. The thorough
# profile looks further, under `make test-full`.
_SLOW_OK = [HealthCheck.too_slow]
settings.register_profile("quick", max_examples=40, deadline=None, derandomize=True, suppress_health_check=_SLOW_OK)
settings.register_profile("thorough", max_examples=1000, deadline=None, suppress_health_check=_SLOW_OK)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
