"""`octavo graph`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from octavo.settings import PASSES


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "graph",
        help="show what the passes do to a model's graph, and draw it",
        description="Capture a model's graph, run the passes over it, and print its nodes, what each pass matched, and "
        "the buffers that its intermediates take. No weight is read and nothing is served.",
    )
    parser.add_argument("model", metavar="MODEL", help="as for `octavo prepare`; it need not be prepared")
    parser.add_argument(
        "--passes",
        default="all",
        metavar="PASSES",
        help=f"all, none, NAME,... or all,-NAME,... without these; there are {', '.join(PASSES)} [default: all]",
    )
    parser.add_argument("--ops", metavar="MODULE", help="custom operators, as for the executor: package.module")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="type of weights and intermediates, as for the executor [default: auto]",
    )
    parser.add_argument(
        "--tokens",
        type=_positive,
        default=512,
        metavar="N",
        help="tokens of the step that bytes are for [default: 512]",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the graph into this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the graph. Raises ModelError, ModuleNotFoundError."""
    import json
    import sys

    from octavo.local.executor_query import ask_executor
    from octavo.models.errors import ModelError
    from octavo.terminal.style import Style

    question = ["graph", args.model, f"--passes={args.passes}", "--dtype", args.dtype]
    question += [] if args.ops is None else ["--ops", args.ops]
    question += [] if args.svg is None else ["--svg", str(args.svg.expanduser().absolute())]
    answer = ask_executor(*question)
    if "problem" in answer:
        raise ModelError(answer["problem"])
    print(json.dumps(answer, indent=2) if args.json else report(answer, args.tokens, Style(sys.stdout)))
    if args.svg is not None and not args.json:
        print(f"\ndrawn into {args.svg}")
    return 0


def report(answer: dict[str, Any], tokens: int, style: Any) -> str:
    """Return the report for people: the passes, the nodes by op, the buffers."""
    from octavo.terminal.figures import size
    from octavo.terminal.table import table

    before, after = answer["before"], answer["after"]
    passes = [
        (each["name"], str(each["matches"]) if each["on"] else "off", str(each["nodes"] or ""), each["description"])
        for each in answer["passes"]
    ]
    names = dict.fromkeys([*before["ops"], *after["ops"]])
    ops = [(name, str(before["ops"].get(name, "")), str(after["ops"].get(name, ""))) for name in names]
    buffers = [
        (name, *(_bytes(state[key], tokens) for state in (before, after)))
        for name, key in (("buffers", "buffers"), ("if nothing were reused", "own_buffers"))
    ]
    peaks = [size(state["peak_bytes"] * tokens) for state in (before, after)]
    return "\n".join(
        [
            f"{answer['architecture']}, {answer['dtype']}: {before['nodes']} nodes, {after['nodes']} after the passes",
            "",
            table(("pass", "matches", "nodes", "what it does"), passes, align="lrrl", style=style),
            "",
            table(("op", "before", "after"), ops, align="lrr", style=style),
            "",
            table(
                (f"intermediates of {tokens} tokens", "before", "after"),
                [*buffers, ("held at once, at most", *peaks)],
                align="lrr",
                style=style,
            ),
        ]
    )


def _bytes(buffers: dict[str, int], tokens: int) -> str:
    from octavo.terminal.figures import size

    return f"{buffers['count']}, {size(buffers['bytes'] * tokens)}"


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, is {text!r}")
    return int(text)
