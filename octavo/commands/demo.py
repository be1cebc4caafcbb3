"""`octavo demo`: everything once, from the model's file to an answer on the screen."""

from __future__ import annotations

import argparse
import asyncio
import time

from octavo.commands.cell_flags import add_cell_flags, count, given_settings
from octavo.models.catalog import DEFAULT_MODEL

QUESTION = "What is the capital of France, and what is it known for?"
_INTERRUPTED = 130


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "demo",
        help="fetch a small model, serve it, ask it one question, stop",
        description="Fetch and prepare the model, start the three services on free ports, stream the answer to one "
        "chat message over gRPC, say how fast it came, and stop everything.",
    )
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help=f"[default: {DEFAULT_MODEL}]")
    parser.add_argument("--question", default=QUESTION, help="what to ask [default: %(default)s]")
    parser.add_argument("--executors", type=count, default=1, metavar="N", help="executor processes [default: 1]")
    add_cell_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo. Raises ModelError, PlanError, StartError, ServiceError."""
    from octavo.home import octavo_home
    from octavo.local.log_folder import log_folder
    from octavo.local.plan import PlanOptions, check_settings, plan_cell
    from octavo.local.screen import Screen
    from octavo.local.session import run_cell
    from octavo.models.ensure import ensure_prepared

    extra = given_settings(args)
    options = PlanOptions(
        args.executors,
        gateway_port=0,
        scheduler_port=0,
        executor_port=0,
        http_port=0,
        admin_port=0,
        metrics_port=0,
        extra=extra,
    )
    check_settings(options)
    model = ensure_prepared(args.model)
    plan = plan_cell(model, options)
    screen = Screen()

    async def ask_once() -> None:
        await ask(plan.gateway_address, args.question)

    with log_folder(octavo_home()) as logs:
        finished = asyncio.run(run_cell(plan, logs, screen.line, ask_once, progress=screen.progress))
    return 0 if finished else _INTERRUPTED


async def ask(address: str, question: str) -> None:
    """Stream the answer to the screen and print its times. Raises ServiceError."""
    from octavo.client import AsyncClient, FinishReason, Message

    print(f"\nyou    {question}\nmodel  ", end="", flush=True)
    asked = time.monotonic()
    first = last = asked
    num_tokens = first_tokens = 0
    async with AsyncClient(address) as client:
        # Greedy: the demo says the same on every machine.
        stream = client.generate([Message("user", question)], temperature=0.0, max_tokens=256)
        async for delta in stream:
            last = time.monotonic()
            if num_tokens == 0:
                first, first_tokens = last, len(delta.token_ids)
            num_tokens += len(delta.token_ids)
            print(delta.text, end="", flush=True)
    rate = (num_tokens - first_tokens) / (last - first) if last > first else 0.0
    usage, (choice,) = stream.usage, stream.choices
    print(
        f"\n\n{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} tokens written, "
        f"{'cut at the limit of tokens' if choice.reason is FinishReason.LENGTH else 'ended by the model itself'}\n"
        f"time to first token {1000 * (first - asked):.0f} ms, then {rate:.1f} tokens/s\n",
        flush=True,
    )
