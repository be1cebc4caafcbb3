"""Settings that every test shares."""

from __future__ import annotations

import os
import signal
import sys

# As in executor_svc/__main__.py, and for the same reason: cells in this process share its cores with the tests.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Triton reads it when it is imported. A process interprets kernels or compiles them: tests that compile start one.
os.environ["TRITON_INTERPRET"] = "1"

# A shell starts jobs in the background deaf to Ctrl-C, and they hand that on to the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import asyncio
import gc
import importlib.util

import grpc.aio
import pytest
from cell_of_tests import CELL
from hypothesis import HealthCheck, is_hypothesis_test, settings

# Of the cells that commands start for tests; those that tests start themselves are given it.
os.environ["OCTAVO_CELL"] = CELL

# Examples differ between machines in time, never in outcome: no deadline, and the same ones in every run. The thorough
# profile looks further, under `make test-full`.
_SLOW_OK = [HealthCheck.too_slow]
settings.register_profile("quick", max_examples=20, deadline=None, derandomize=True, suppress_health_check=_SLOW_OK)
settings.register_profile("thorough", max_examples=1000, deadline=None, suppress_health_check=_SLOW_OK)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_configure(config: pytest.Config) -> None:
    """Keep what all tests use: gRPC's poller, and the kernels, compiled once whatever home the services are given."""
    asyncio.run(_keep_poller())
    if importlib.util.find_spec("torch") is None:
        return
    from instruction_sets import everyday, libraries

    from executor_svc.cpu_features import cpu_features
    from executor_svc.kernels.native.build import BUILT_AHEAD_IN, find_library

    for isa in (everyday if config.option.markexpr == "not full" else libraries)(cpu_features()):
        library = find_library(isa)
    os.environ[BUILT_AHEAD_IN] = str(library.parent)


async def _keep_poller() -> None:
    """Hold gRPC's poller for the life of the process.

    gRPC ends it with the last asyncio channel and makes it anew for the next: thousands of times here, as tests have a
    loop each. That is a thing no service does, it has had races (grpc's issues 22365 and 43364), and a run has crashed.
    """
    grpc.aio.init_grpc_aio()


def pytest_collection_finish() -> None:
    """Collect garbage again: a service's `__main__`, which tests import, has that stop until the service runs."""
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Say once a file which instruction sets are missing; let the thorough profile look for as long as it takes."""
    # Imported by those that need it, and by nobody where there is no torch.
    if "instruction_sets" in sys.modules:
        repeated = set(sys.modules["instruction_sets"].repeated_skips(items))
        config.hook.pytest_deselected(items=[item for item in items if item in repeated])
        items[:] = [item for item in items if item not in repeated]
    if settings.default is settings.get_profile("thorough"):
        for item in items:
            if is_hypothesis_test(getattr(item, "obj", None)):
                item.add_marker(pytest.mark.timeout(1800))
