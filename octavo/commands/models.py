"""`octavo models`."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "models",
        help="list the model families and file formats that can be served",
        description="List the families that run on Octavo's own decoder, the formats that are read, and the models "
        "that were fetched to this machine. Of other families, whatever causal language model transformers can load "
        "runs by its code where that can work: `octavo inspect` tells.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List them. Raises ModelError, ModuleNotFoundError."""
    import json
    import sys

    from octavo.local.executor_query import ask_executor
    from octavo.models.location import fetched_models, models_folder
    from octavo.terminal.style import Style

    answer = ask_executor("families")
    answer["fetched"] = fetched_models(models_folder())
    print(json.dumps(answer, indent=2) if args.json else report(answer, Style(sys.stdout)))
    return 0


def report(answer: dict[str, Any], style: Any) -> str:
    """Return the lists for people."""
    from octavo.terminal.table import table

    families = [(each["architecture"], ", ".join(each["gguf"]) or "-") for each in answer["families"]]
    formats = [(each["format"], ", ".join(each["types"]), each["files"]) for each in answer["formats"]]
    fetched = "\n".join(answer["fetched"]) or "none: `octavo pull` fetches one"
    return "\n\n".join(
        (
            table(("family (architectures in config.json)", "GGUF"), families, align="ll", style=style),
            table(("format", "element types", "files"), formats, align="lll", style=style),
            f"{style.bold('fetched to this machine')}\n{fetched}",
        )
    )
