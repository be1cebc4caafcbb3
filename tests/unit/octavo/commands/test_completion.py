"""`octavo completion`: scripts that a shell runs; and the help that they are made from."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from octavo.cli import _parser, main
from octavo.commands.completion import SHELLS, script
from octavo.models.catalog import CATALOG

TERMINAL_COMMANDS = ("chat", "complete", "requests", "cancel", "load", "kv", "doctor", "completion")
_ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
$(complete -p octavo | sed 's/.*-F \\([^ ]*\\).*/\\1/') octavo "${COMP_WORDS[COMP_CWORD]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""What bash does when Tab is pressed after the given words: calls the registered function with the line."""


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script for bash, in a file."""
    path = tmp_path_factory.mktemp("completion") / "octavo.bash"
    path.write_text(script(_parser(), "bash"))
    return path


def completions(bash_script: Path, folder: Path, *words: str) -> list[str]:
    """Return what bash offers for the last word."""
    command = ["bash", "--norc", "-c", _ASK, "ask", str(bash_script), "octavo", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_commands_and_flags_are_completed(bash_script: Path, tmp_path: Path) -> None:
    """The words come from the parser itself, so none is missing."""
    assert {"chat", "complete", "completion"} <= set(completions(bash_script, tmp_path, "c"))
    assert completions(bash_script, tmp_path, "completion", "t") == ["tcsh"]
    assert completions(bash_script, tmp_path, "requests", "--wa") == ["--watch"]


def test_models_and_paths_are_completed_where_they_make_sense(bash_script: Path, tmp_path: Path) -> None:
    """A model to serve is a name of the catalog or a path; one to ask is a name; a folder is a folder."""
    (tmp_path / "smo.gguf").touch()
    (tmp_path / "smother").mkdir()
    names = [name for name in CATALOG if name.startswith("smo")]
    assert set(completions(bash_script, tmp_path, "up", "smo")) == {*names, "smo.gguf", "smother"}
    assert completions(bash_script, tmp_path, "chat", "--model", "smo") == names
    assert completions(bash_script, tmp_path, "prepare", "--output", "smo") == ["smother"]


@pytest.mark.parametrize("command", TERMINAL_COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`octavo COMMAND --help` says what it does and exits 0, and `octavo --help` lists it with a line."""
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: octavo {command} [-h]" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    assert re.search(rf"^    {command} +\w", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_a_script_with_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The script is all there is on the output, ready to be redirected into a file."""
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("doctor", "requests", "max-tokens", *CATALOG))


def test_an_unknown_shell_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """The known ones are named."""
    with pytest.raises(SystemExit) as ended:
        main(["completion", "sh"])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert all(shell in err for shell in SHELLS)
