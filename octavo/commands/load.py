"""`octavo load`: how busy the cell is, and who holds the memory."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from octavo.commands.client_flags import add_admin_flags

if TYPE_CHECKING:
    from octavo.client.admin_types import Load
    from octavo.terminal.style import Style

_TIMEOUT = 10.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "load",
        help="show how busy the cell and its executors are",
        description="Show the requests of the cell and, for each executor, what runs on it and its KV blocks.",
    )
    add_admin_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show it. Raises ServiceError."""
    import dataclasses
    import json
    import sys

    import octavo
    from octavo.terminal.style import Style

    with octavo.AdminClient(args.address) as client:
        load = client.get_load(timeout=_TIMEOUT)
    print(json.dumps(dataclasses.asdict(load), indent=2) if args.json else summary(load, Style(sys.stdout)))
    return 0


def summary(load: Load, style: Style) -> str:
    """Return the cell in a line and its executors in a table."""
    from octavo.terminal.figures import counted, share
    from octavo.terminal.table import table

    cell = (
        f"{counted(load.live_requests, 'live request')}; sequences: {load.running_sequences} running, "
        f"{load.waiting_sequences} waiting; {counted(load.preemptions, 'preemption')} so far; "
        f"{counted(load.gateways, 'gateway')}"
    )
    if not load.executors:
        return f"{cell}\nno executor is ready"
    head = [
        "executor",
        "model",
        "running",
        "waiting",
        "in flight",
        "steps",
        "owned",
        "cached",
        "free",
        "total",
        "usage",
    ]
    rows = [
        [
            each.address,
            each.model,
            str(each.running_sequences),
            str(each.waiting_sequences),
            str(each.steps_in_flight),
            str(each.steps),
            str(each.owned_blocks),
            str(each.cached_blocks),
            str(each.free_blocks),
            str(each.total_blocks),
            share(each.owned_blocks, each.total_blocks),
        ]
        for each in load.executors
    ]
    return f"{cell}\n\n{table(head, rows, align='llrrrrrrrrr', style=style)}"
