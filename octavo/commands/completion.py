"""`octavo completion`: scripts that let a shell complete the command's words."""

from __future__ import annotations

import argparse
from pathlib import Path

from octavo.models.catalog import CATALOG

SHELLS = ("bash", "zsh", "tcsh")
_EPILOG = """\
to install, once:
  bash   mkdir -p ~/.local/share/bash-completion/completions
         octavo completion bash > ~/.local/share/bash-completion/completions/octavo
         (for this shell alone: eval "$(octavo completion bash)")
  zsh    mkdir -p ~/.zfunc; octavo completion zsh > ~/.zfunc/_octavo
         and in ~/.zshrc: fpath+=~/.zfunc; autoload -Uz compinit; compinit
  tcsh   octavo completion tcsh > ~/.octavo.tcsh
         and in ~/.tcshrc: source ~/.octavo.tcsh

Open a new shell afterwards, and repeat this after an upgrade of Octavo.
"""
_NAMES = " ".join(CATALOG)
_MODEL_OR_PATH = {"bash": "_octavo_models", "zsh": "_octavo_models", "tcsh": f"`echo {_NAMES}`"}
_MODEL = {"bash": "_octavo_model_names", "zsh": f"({_NAMES})", "tcsh": f"({_NAMES})"}
_PREAMBLE = {
    "bash": (
        f'_octavo_model_names() {{ compgen -W "{_NAMES}" -- "$1"; }}\n'
        '_octavo_models() { _octavo_model_names "$1"; compgen -f -- "$1"; }\n'
    ),
    "zsh": f"_octavo_models() {{ _alternative 'models:model:({_NAMES})' 'files:file:_files'; }}\n",
}
"""tcsh has no functions, and its rules take names or files, not both."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "completion",
        help="print a script that completes commands, flags and models in a shell",
        description="Print the script that makes a shell complete Octavo's commands, flags, model names and paths.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the script. `args.root_parser` is the parser of the whole command."""
    print(script(args.root_parser, args.shell))
    return 0


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion script of a whole command. The parser's arguments get marked on the way."""
    import shtab

    _mark(parser)
    # A dictionary from shells to preambles is what shtab documents; its annotation says less.
    text: str = shtab.complete(parser, shell=shell, preamble=_PREAMBLE)  # type: ignore[arg-type]
    return text


def _mark(parser: argparse.ArgumentParser) -> None:
    """Tell shtab, by the attribute that it reads, what completes each argument."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _mark(each)
            continue
        completer: object = None
        if action.dest == "model" or (action.dest == "name" and not action.option_strings):
            completer = _MODEL if action.option_strings else _MODEL_OR_PATH
        elif action.metavar == "FOLDER":
            completer = shtab.DIRECTORY
        elif action.type is Path or action.metavar == "FILE":
            completer = shtab.FILE
        if completer is not None:
            action.complete = completer  # type: ignore[attr-defined]
