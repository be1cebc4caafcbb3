"""`octavo version`."""

from __future__ import annotations

import argparse

_SHOWN = ("grpcio", "protobuf", "tokenizers", "transformers", "torch")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("version", help="show the versions of Octavo and of what it stands on")
    parser.set_defaults(run=run)


def run(_args: argparse.Namespace) -> int:
    """Print the versions."""
    import platform
    from importlib import metadata

    print(f"octavo {metadata.version('octavo')}")
    print(f"python {platform.python_version()}")
    for name in _SHOWN:
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"{name} not installed")
    return 0
