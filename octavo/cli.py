"""The `octavo` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from octavo.commands import (
    bench,
    cancel,
    chat,
    complete,
    completion,
    demo,
    doctor,
    export,
    graph,
    health,
    inspect,
    kv,
    load,
    models,
    prepare,
    pull,
    requests,
    up,
    version,
)
from octavo.rpc.settings import SettingsError, check_variable_names, stop_with
from octavo.settings import known_variables, wrong_client_variables
from octavo.terminal.streams import drop_output, prepare_streams
from octavo.terminal.usage import Parser

_DESCRIPTION = "Octavo serves large language models as three gRPC services: gateway, scheduler, executors."
_EPILOG = """\
to begin:
  octavo demo                        everything once: fetch a model, serve it, ask it, stop
  octavo up smollm2-135m-instruct    serve a model until Ctrl-C
  octavo chat                        talk to the model that is served
  octavo doctor                      what this machine lacks, and what runs on it
  octavo COMMAND --help              the flags of a command

each service also runs alone, one per machine or pod:
  python -m executor_svc --model MODEL
  python -m scheduler_svc --executors HOST:PORT,...
  python -m gateway --model MODEL --scheduler HOST:PORT

OCTAVO_HOME is where models, compiled kernels and logs are kept [default: ~/.cache/octavo].
"""
_INTERRUPTED = 130
_BROKEN_PIPE = 141
"""What a shell reports for a program that SIGPIPE ended, which is how `| head` ends most programs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 1 where it failed, 2 for bad usage, which a wrong value of a flag or
    variable is too, 130 where it was interrupted.
    """
    prepare_streams()
    args = _parser().parse_args(argv)
    # The doctor names every misspelt or bad variable itself.
    if args.run is not doctor.run:
        try:
            check_variable_names(os.environ, known_variables())
            for _, wrong in wrong_client_variables(os.environ):
                raise SettingsError(wrong)
        except SettingsError as error:
            stop_with("octavo", error)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("octavo: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        drop_output()
        return _BROKEN_PIPE
    except Exception as error:
        # Imported here: it knows the errors of grpc, and `octavo --help` waits for no such import.
        from octavo.terminal.errors import explain, show

        explained = explain(error)
        if explained is None:
            raise
        show(explained)
        try:
            sys.stdout.flush()
        except OSError:  # it may be what failed
            drop_output()
        return explained.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="octavo", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=_formatter)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the versions of Octavo and what it stands on")
    parser.set_defaults(root_parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    # In the order in which a newcomer meets them.
    for command in (
        models,
        pull,
        inspect,
        prepare,
        up,
        demo,
        chat,
        complete,
        requests,
        cancel,
        load,
        kv,
        health,
        bench,
        export,
        graph,
        doctor,
        completion,
        version,
    ):
        command.add_parser(commands)
    return parser


class _Version(argparse.Action):
    """`octavo --version`, which people try before they know the command of that name."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.exit(version.run(argparse.Namespace()))


def _formatter(prog: str) -> argparse.HelpFormatter:
    formatter = argparse.RawDescriptionHelpFormatter(prog, max_help_position=18)
    # argparse overlooks that the commands stand further in than their heading, and would break the longest lines.
    formatter._action_max_length = 16
    return formatter
