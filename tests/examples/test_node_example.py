"""The example in Node, its packages installed as its README says, and the pages' own, against a real cell."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

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
    run,
)
from pages import GATEWAY, Block, blocks
from stack import InProcessStack
from stack_client import generate, request_for

from octavo.v1 import inference_pb2

# What npm says where a registry cannot be reached or does not have a package. Anything else is the example's fault.
CANNOT_BE_HAD = re.compile(
    r"npm (?:error|ERR!) code (E(?:NOTFOUND|AI_AGAIN|CONN\w+|TIMEDOUT|NETUNREACH|403|404|TARGET)\b)"
)
_QUESTION = re.compile(r"content: '([^']+)'")
_MAX_TOKENS = re.compile(r"maxTokens: (\d+)")


def shown() -> list[Block]:
    """The JavaScript programs of the pages."""
    return [block for page in sorted((ROOT / "docs").glob("*.md")) for block in blocks(page, ("js",))]


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


@pytest.mark.asyncio
async def test_what_the_pages_show(cell: InProcessStack, client: Command) -> None:
    """Pasted into a file beside the packages and run at the root, each page's program prints the greedy answer."""
    node, example = Path(client[0]), Path(client[1])
    programs = shown()
    assert programs, "docs/api.md has one"
    for program in programs:
        question, max_tokens = _QUESTION.search(program.source), _MAX_TOKENS.search(program.source)
        assert question is not None
        assert max_tokens is not None
        request = request_for([], int(max_tokens[1]))
        request.chat.messages.add(role=inference_pb2.CHAT_ROLE_USER, content=question[1])
        wanted = (await generate(cell, request)).choices[0].text
        file = example.with_name("shown.mjs")
        file.write_text(program.source.replace(GATEWAY, cell.gateway_address))
        done = await run([node, file], folder=example.parents[2])
        assert (done.exit_status, done.stdout) == (0, wanted), done.stderr
