"""The command line's parser: what cannot be understood is named alone, with what was probably meant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from octavo.spelling import did_you_mean

_BAD_USAGE = 2


class Parser(argparse.ArgumentParser):
    """As argparse's, which tells of a misspelt flag only after it has taken its value for something else."""

    def __init__(self, *args: Any, extra_hint: str = "", **kwargs: Any) -> None:
        """`extra_hint`: what to do instead of giving words that the command does not take."""
        super().__init__(*args, **{"allow_abbrev": False} | kwargs)
        self._extra_hint = extra_hint

    def parse_known_args(  # type: ignore[override]  # argparse's own overloads say nothing more
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse. Ends the process with exit code 2 and what is wrong; no argument is ever left over."""
        args = sys.argv[1:] if args is None else list(args)
        commands = self._commands()
        for word in args:
            if word == "--":
                break
            if commands is not None and not word.startswith("-"):
                if word not in commands:
                    self.error(f"there is no command {word!r}{did_you_mean(word, commands)}")
                break
            self._check_flag(word)
        found, extra = super().parse_known_args(args, namespace)
        if extra:
            self.error(f"takes no {' '.join(map(repr, extra))}", self._extra_hint)
        return found, extra

    def error(self, message: str, hint: str = "") -> NoReturn:
        """End the process with exit code 2: one line of what is wrong, one of what to do."""
        hint = hint or f"`{self.prog} --help` lists what there is"
        self.exit(_BAD_USAGE, f"{self.prog}: error: {message.removeprefix('argument ')}\nhint: {hint}\n")

    def _check_flag(self, word: str) -> None:
        """Refuse a flag that is none. What has a space in it is a text, as argparse sees it too."""
        flag = word.partition("=")[0]
        if flag.startswith("--") and " " not in word and flag not in self._option_string_actions:
            known = [each for each in self._option_string_actions if each.startswith("--")]
            self.error(f"there is no flag {flag}{did_you_mean(flag, known)}")

    def _commands(self) -> list[str] | None:
        """Return the names of the subcommands; None where there are none."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return list(action.choices)
        return None
