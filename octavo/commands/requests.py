"""`octavo requests`: what is live in the cell."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.commands.client_flags import add_admin_flags

if TYPE_CHECKING:
    from octavo.client.admin_types import RequestInfo
    from octavo.terminal.style import Style

_TIMEOUT = 10.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "requests",
        help="list the requests that are live in the cell",
        description="List the live requests of all gateways of the cell, oldest first.",
    )
    add_admin_flags(parser)
    parser.add_argument(
        "--watch",
        nargs="?",
        type=interval,
        const=1.0,
        metavar="SECONDS",
        help="list them again and again, every second or as given, until Ctrl-C",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List them. Raises ServiceError."""
    import json
    import sys
    import time

    import octavo
    from octavo.terminal.style import Style

    style = Style(sys.stdout)
    with octavo.AdminClient(args.address) as client:
        while True:
            requests = client.list_requests(timeout=_TIMEOUT)
            if args.json:
                # A list a line under --watch, so that each can be read as it comes.
                listed = [vars(request) for request in requests]
                print(json.dumps(listed, indent=None if args.watch else 2), flush=True)
            else:
                if args.watch and style.is_terminal:
                    sys.stdout.write("\x1b[H\x1b[2J")
                print(listing(requests, style), flush=True)
            if not args.watch:
                return 0
            time.sleep(args.watch)


def listing(requests: Sequence[RequestInfo], style: Style) -> str:
    """Return the table. Ids are told by their ends, which `octavo cancel` takes, where these differ; what is of no
    request has no column.
    """
    from octavo.terminal.figures import duration
    from octavo.terminal.kv_report import short_id
    from octavo.terminal.table import table

    if not requests:
        return "no live requests"
    ids = [short_id(each.request_id) for each in requests]
    if len(set(ids)) < len(ids):
        ids = [each.request_id for each in requests]
    head = ["id", "state", "why it waits", "model", "tenant", "prompt", "output", "cached", "blocks"]
    head += ["age", "left", "executors", "label"]
    rows = [
        [
            own_id,
            each.state.value,
            each.wait_reason.value if each.wait_reason else "-",
            each.model,
            each.tenant or "-",
            str(each.prompt_tokens),
            str(each.completion_tokens),
            str(each.cached_tokens),
            str(each.kv_blocks),
            duration(each.age),
            "-" if each.remaining_deadline is None else duration(each.remaining_deadline),
            ",".join(each.executors) or "-",
            each.label or "-",
        ]
        for own_id, each in zip(ids, requests, strict=True)
    ]
    columns = [index for index in range(len(head)) if {row[index] for row in rows} != {"-"}]
    shown = [[row[index] for index in columns] for row in (head, *rows)]
    align = "".join("lllllrrrrrrll"[index] for index in columns)
    return table(shown[0], shown[1:], align=align, style=style)


def interval(text: str) -> float:
    """Return a number of seconds, for argparse."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError("must be a number of seconds from 0.1 to 3600")
    return seconds
