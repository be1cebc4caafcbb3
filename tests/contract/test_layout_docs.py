"""The README says what is so."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from octavo.local.hints import grpcurl_commands
from octavo.rpc.settings import Settings, fields_of, variable_of
from octavo.settings import ALL_SETTINGS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("settings_class", ALL_SETTINGS, ids=[each.__name__ for each in ALL_SETTINGS])
def test_every_flag_is_listed_with_its_variable_and_default(settings_class: type[Settings]) -> None:
    """The tables follow the settings: no flag is missing, renamed or of another default."""
    for each in fields_of(settings_class):
        # By identity: 0.0 is equal to False.
        words = ((None, ""), (False, "false"), (True, "true"), (dataclasses.MISSING, "required"))
        default = next((word for value, word in words if each.default is value), str(each.default))
        flag = f"--{each.name.replace('_', '-')}"
        row = rf"^\| `{flag}` \| `{variable_of(settings_class, each.name)}` \| {re.escape(default)} \| .+ \|$"
        assert re.search(row, README, re.MULTILINE), row


def test_no_flag_is_listed_that_no_service_has() -> None:
    """A removed setting leaves the tables too."""
    known = {f"--{each.name.replace('_', '-')}" for one in ALL_SETTINGS for each in fields_of(one)}
    assert set(re.findall(r"^\| `(--[a-z-]+)`", README, re.MULTILINE)) <= known


def test_links_lead_somewhere() -> None:
    """Every relative link in README and docs names a file or folder."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_what_is_to_be_pasted_is_what_octavo_up_prints() -> None:
    """The calls shown are those of the tested hints, for the default address; the Python program at least compiles."""
    for command in grpcurl_commands("127.0.0.1:50051").values():
        start = command.partition(" -d ")[0]
        assert start in README
        assert command.rpartition(" ")[2] in README
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    ast.parse(program)
