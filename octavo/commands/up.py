"""`octavo up`, also `octavo serve`: the three services on this machine."""

from __future__ import annotations

import argparse
import asyncio

from octavo.commands.cell_flags import add_cell_flags, count, given_settings
from octavo.settings import (
    ADMIN_PORT,
    EXECUTOR_PORT,
    GATEWAY_METRICS_PORT,
    GATEWAY_PORT,
    HTTP_PORT,
    SCHEDULER_PORT,
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "up",
        aliases=["serve"],
        help="serve a model on this machine until Ctrl-C",
        description="Start gateway, scheduler and executors on this machine, wait until they serve, keep them running, "
        "and stop them in order at Ctrl-C or SIGTERM. A model that is not prepared yet is fetched and prepared first. "
        "Everything listens on 127.0.0.1 unless --bind says otherwise; logs go to OCTAVO_HOME/logs.",
    )
    parser.add_argument("model", metavar="MODEL", help="as for `octavo prepare`")
    parser.add_argument(
        "--executors",
        type=count,
        default=1,
        metavar="N",
        help="executor processes; they share cores and memory [default: 1]",
    )
    parser.add_argument("--bind", metavar="ADDRESS", help="address the gateway listens on [default: 127.0.0.1]")
    for service, default, note in (
        ("gateway", GATEWAY_PORT, ""),
        ("scheduler", SCHEDULER_PORT, ""),
        ("executor", EXECUTOR_PORT, "; further executors take the ports after it that the cell leaves free"),
        ("http", HTTP_PORT, "; the OpenAI-compatible API"),
        ("admin", ADMIN_PORT, "; the operator's API"),
        ("metrics", GATEWAY_METRICS_PORT, "; the gateway's page, scheduler and executors take the ports after it"),
    ):
        parser.add_argument(
            f"--{service}-port", type=int, metavar="PORT", help=f"0 picks a free one{note} [default: {default}]"
        )
    add_cell_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal. Raises ModelError, PlanError, StartError."""
    from octavo.home import octavo_home
    from octavo.local.hints import ready_message
    from octavo.local.log_folder import log_folder
    from octavo.local.plan import PlanOptions, check_settings, plan_cell
    from octavo.local.screen import Screen
    from octavo.local.session import run_cell
    from octavo.models.ensure import ensure_prepared

    options = PlanOptions(
        num_executors=args.executors,
        extra=given_settings(args),
        gateway_port=args.gateway_port,
        scheduler_port=args.scheduler_port,
        executor_port=args.executor_port,
        http_port=args.http_port,
        admin_port=args.admin_port,
        metrics_port=args.metrics_port,
        bind=args.bind,
    )
    check_settings(options)
    model = ensure_prepared(args.model)
    plan = plan_cell(model, options)
    screen = Screen()
    with log_folder(octavo_home()) as logs:

        async def until_a_signal() -> None:
            print(f"\n{ready_message(model.name, plan)}\nlogs: {logs}", flush=True)
            await asyncio.Event().wait()

        asyncio.run(run_cell(plan, logs, screen.line, until_a_signal, progress=screen.progress))
    return 0
