"""The example in C++, built as its README says, against a real cell."""

from __future__ import annotations

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

pytestmark = pytest.mark.timeout(600)  # the build comes on top of the first test

HEADERS = "#include <grpcpp/grpcpp.h>\n#include <google/protobuf/message.h>\n"
TOOLS = {"cmake": "cmake", "c++": "g++", "protoc": "protobuf-compiler", "grpc_cpp_plugin": "protobuf-compiler-grpc"}
"""What the build needs, and the Debian package it is in."""


@pytest.fixture(scope="session")
def client(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The program, built outside the source tree: about 12 s on two cores."""
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    probe = ["c++", "-fsyntax-only", "-x", "c++", "-std=c++17", "-"]
    done = subprocess.run(probe, input=HEADERS, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        pytest.skip(f"not installed: libgrpc++-dev or libprotobuf-dev ({done.stderr.splitlines()[0]})")
    build = tmp_path_factory.mktemp("cpp")
    for command in (
        ["cmake", "-S", str(ROOT / "examples" / "cpp"), "-B", str(build), "-DCMAKE_CXX_FLAGS=-O0 -Werror"],
        ["cmake", "--build", str(build), "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return (build / "client",)


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
