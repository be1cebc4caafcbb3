"""`octavo kv`: who holds which KV block, why others wait, and an end to what the prefix cache keeps."""

from __future__ import annotations

import argparse

from octavo.commands.client_flags import add_admin_flags
from octavo.commands.numbers import whole_number

_TIMEOUT = 10.0
_MOST_LISTED = 100_000


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "kv",
        help="account for the KV blocks: who holds which, and why others wait",
        description="Account for the KV blocks of each executor, draw them as a map, and list the sequences that hold "
        "them or wait for some.",
    )
    add_admin_flags(parser)
    parser.add_argument(
        "--executor", metavar="HOST:PORT", help="one executor, as `octavo load` lists it [default: all]"
    )
    parser.add_argument(
        "--limit",
        type=whole_number(0, _MOST_LISTED),
        default=20,
        metavar="N",
        help="most sequences to list [default: 20]",
    )
    parser.add_argument("--flush", action="store_true", help="forget what the prefix cache holds, and show nothing")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show or flush. Raises ServiceError."""
    import dataclasses
    import json
    import sys

    import octavo
    from octavo.terminal.figures import counted
    from octavo.terminal.kv_report import MAP_CELLS, kv_report
    from octavo.terminal.style import Style

    with octavo.AdminClient(args.address) as client:
        if args.flush:
            freed = client.flush_prefix_cache(args.executor, timeout=_TIMEOUT)
            print(json.dumps({"freed_blocks": freed}) if args.json else f"freed {counted(freed, 'cached block')}")
            return 0
        state = client.get_kv_state(
            args.executor, limit=args.limit, block_ids=True, map_cells=MAP_CELLS, timeout=_TIMEOUT
        )
    print(json.dumps(dataclasses.asdict(state), indent=2) if args.json else kv_report(state, Style(sys.stdout)))
    return 0
