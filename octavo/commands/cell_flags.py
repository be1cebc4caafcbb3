"""The flags that `octavo up` and `octavo demo` share: those of the services, read from their settings."""

from __future__ import annotations

import argparse
import dataclasses

from octavo.rpc.settings import Settings, fields_of
from octavo.settings import ExecutorSettings, GatewaySettings, SchedulerSettings

# Decided by the plan: which model, who listens where, who talks to whom.
_PLANNED = frozenset({"model", "bind", "port", "http_port", "admin_port", "metrics_port", "scheduler", "executors"})


def add_cell_flags(parser: argparse.ArgumentParser) -> None:
    """Declare a flag for every setting that the services leave to the user."""
    for each in _passed_on():
        setting = each.metadata["octavo"]
        default = "" if each.default is None else f" [default: {each.default}]"
        parser.add_argument(
            f"--{each.name.replace('_', '-')}",
            *setting.aliases,
            metavar="VALUE",
            nargs=None if setting.alone is None else "?",
            const=setting.alone,
            help=(setting.help + default).replace("%", "%%"),
        )


def given_settings(args: argparse.Namespace) -> dict[str, str]:
    """Return the settings that the user gave, by field."""
    given = {each.name: getattr(args, each.name) for each in _passed_on()}
    return {name: value for name, value in given.items() if value is not None}


def count(text: str) -> int:
    """Return a number of executors, for argparse."""
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError("must be a number from 1 to 64")
    return int(text)


def _passed_on() -> list[dataclasses.Field[object]]:
    """Return the settings to pass on, each name once: services that share one share the flag."""
    services: tuple[type[Settings], ...] = (ExecutorSettings, SchedulerSettings, GatewaySettings)
    fields = {each.name: each for service in services for each in fields_of(service)}
    return [each for name, each in fields.items() if name not in _PLANNED]
