"""The `octavo` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from octavo.commands import demo, prepare, pull, up, version
from octavo.local.plan import PlanError
from octavo.local.supervisor import StartError
from octavo.models.errors import ModelError
from octavo.rpc.errors import ServiceError

_DESCRIPTION = "Octavo serves large language models as three gRPC services: gateway, scheduler, executors."
_EPILOG = """\
to begin:
  octavo demo                        everything once: fetch a model, serve it, ask it, stop
  octavo up smollm2-135m-instruct    serve a model until Ctrl-C
  octavo COMMAND --help              the flags of a command

each service also runs alone, one per machine or pod:
  python -m executor_svc --model MODEL
  python -m scheduler_svc --executors HOST:PORT,...
  python -m gateway --model MODEL --scheduler HOST:PORT

OCTAVO_HOME is where models and logs are kept [default: ~/.cache/octavo].
"""
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 1 where it failed, 2 for bad usage, 130 where it was interrupted."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except (ModelError, PlanError, ServiceError, StartError) as error:
        print(f"octavo: error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        # Fetching, preparing and running need what a gateway alone does not have.
        print(f'octavo: error: {error.name} is not installed: pip install "octavo[executor]"', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("octavo: interrupted; the same command goes on from here", file=sys.stderr)
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="octavo",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=18),
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (pull, prepare, up, demo, version):
        command.add_parser(commands)
    return parser
