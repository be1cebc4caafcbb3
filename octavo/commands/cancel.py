"""`octavo cancel`: an end to live requests."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.commands.client_flags import add_admin_flags

if TYPE_CHECKING:
    from octavo.client.admin_types import RequestInfo

_TIMEOUT = 10.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "cancel",
        help="end live requests",
        description="End live requests of the cell, in any state. Their clients get CANCELLED. Nothing is cancelled "
        "where one of the ids means no request, or more than one.",
    )
    parser.add_argument(
        "ids",
        nargs="+",
        metavar="ID",
        help="an id that `octavo requests` lists, the number at its end, or its beginning",
    )
    add_admin_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Cancel them and say so, a line each; 1 where one had ended meanwhile. Raises ServiceError, CommandError."""
    import json
    import sys

    import octavo
    from octavo.client.errors import NotFoundError

    cancelled, ended = [], []
    with octavo.AdminClient(args.address) as client:
        for request_id in resolve(args.ids, client.list_requests(timeout=_TIMEOUT)):
            try:
                client.cancel_request(request_id, timeout=_TIMEOUT)
                cancelled.append(request_id)
                if not args.json:
                    print(f"cancelled {request_id}", flush=True)
            except NotFoundError:
                ended.append(request_id)
                if not args.json:
                    print(f"{request_id} has ended by itself", file=sys.stderr)
    if args.json:
        print(json.dumps({"cancelled": cancelled, "ended": ended}))
    return 1 if ended else 0


def resolve(given: Sequence[str], requests: Sequence[RequestInfo]) -> list[str]:
    """Return the whole ids, each once. Raises CommandError for what fits no live request, or several."""
    from octavo.terminal.errors import CommandError

    live = [request.request_id for request in requests]
    found: dict[str, None] = {}
    for text in given:
        fitting = [text] if text in live else [each for each in live if _is_short_for(text, each)]
        if not fitting:
            raise CommandError(f"no live request has the id {text!r}", "`octavo requests` lists those that are live")
        if len(fitting) > 1:
            shown = ", ".join(fitting[:4]) + (", ..." if len(fitting) > 4 else "")
            raise CommandError(f"{text!r} stands for {len(fitting)} ids", f"which one? {shown}")
        found[fitting[0]] = None
    return list(found)


def _is_short_for(text: str, request_id: str) -> bool:
    """Whether a person may mean the id PREFIX-NUMBER: all of a cell's ids have one of few prefixes.

    A number is the number and nothing else: were it any end or beginning, 2 would cancel 12 once 2 has ended.
    """
    if text.isdecimal():
        return request_id.rpartition("-")[2] == text
    return bool(text) and (request_id.startswith(text) or ("-" in text and request_id.endswith(text)))
