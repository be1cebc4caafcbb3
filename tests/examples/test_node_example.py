"""The example in Node, its packages installed as its README says, against a real cell."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from example_programs import (
    ROOT,
    Command,
    check_cancel,
    check_chat,
    check_error,
    check_no_server,
    check_streams,
    check_usage,
)
from stack import InProcessStack

# What npm says where a registry cannot be reached or does not have a package. Anything else is the example's fault.
CANNOT_BE_HAD = re.compile(
    r"npm (?:error|ERR!) code (E(?:NOTFOUND|AI_AGAIN|CONN\w+|TIMEDOUT|NETUNREACH|403|404|TARGET)\b)"
)


@pytest.fixture(scope="session")
def client(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The program with its packages, in a copy of the folders it uses: the source tree stays as it is."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not both installed")
    copy = tmp_path_factory.mktemp("node")
    for folder in ("examples", "protos"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("node_modules", "build"))
    folder = copy / "examples" / "node"
    install = [npm, "ci", "--no-audit", "--no-fund", "--fetch-retries=1", "--fetch-timeout=20000"]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    if missing := CANNOT_BE_HAD.search(done.stderr):
        pytest.skip(f"npm cannot get the packages: {missing[1]}")
    assert done.returncode == 0, done.stderr
    return node, folder / "client.js"


def test_the_lock_file_names_no_registry() -> None:
    """Packages come from whatever registry npm is set up with."""
    lock = (ROOT / "examples" / "node" / "package-lock.json").read_text()
    assert '"resolved"' not in lock
    assert '"integrity"' in lock


@pytest.mark.asyncio
async def test_chat_prints_the_greedy_answer(cell: InProcessStack, client: Command) -> None:
    """The text printed is that of the same chat asked by the tests' own client."""
    await check_chat(cell, client)


@pytest.mark.asyncio
async def test_chat_prints_while_the_answer_is_written(client: Command) -> None:
    """The first piece is on the screen before the second is made."""
    await check_streams(client)


@pytest.mark.asyncio
async def test_cancel_frees_the_request(cell: InProcessStack, client: Command) -> None:
    """The call ends CANCELLED after a few tokens, and the cell is idle long before the answer would have ended."""
    await check_cancel(cell, client)


@pytest.mark.asyncio
async def test_error_names_every_field(cell: InProcessStack, client: Command) -> None:
    """The details of a refusal are read: reason and all three fields."""
    await check_error(cell, client)


@pytest.mark.asyncio
async def test_no_server_is_an_error_at_once(client: Command) -> None:
    """Without a server the program says UNAVAILABLE and fails."""
    await check_no_server(client)


@pytest.mark.asyncio
async def test_usage(client: Command) -> None:
    """Wrong arguments are answered with what is right."""
    await check_usage(client)
