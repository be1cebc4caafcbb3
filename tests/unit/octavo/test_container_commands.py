"""What containers run: `octavo health` as their health check, `octavo prepare --if-needed` before they start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from gguf_samples import byte_level_metadata, write_gguf

from octavo.cli import main
from octavo.rpc.server import RpcServer

PART = "octavo.v1.InferenceService"


@pytest_asyncio.fixture
async def server() -> AsyncIterator[RpcServer]:
    """A service that has just started: it and its part do not serve yet."""
    server = RpcServer("127.0.0.1", 0)
    await server.start(PART)
    yield server
    await server.stop(0)


async def ask(server: RpcServer, *flags: str) -> int:
    """Run the command against the server, beside the loop that serves."""
    return await asyncio.to_thread(main, ["health", f"127.0.0.1:{server.port}", *flags])


@pytest.mark.asyncio
async def test_the_exit_code_follows_the_health(server: RpcServer, capsys: pytest.CaptureFixture[str]) -> None:
    """1 while the process does not serve, 0 once it does, whatever its parts do."""
    assert await ask(server) == 1
    assert capsys.readouterr().out == "NOT_SERVING\n"
    await server.health.set("", True)
    assert await ask(server) == 0
    assert capsys.readouterr().out == "SERVING\n"
    assert await ask(server, "--service", PART) == 1


@pytest.mark.asyncio
async def test_no_answer_and_no_such_service_are_said(server: RpcServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Both exit with 1 and one sentence, and neither is taken for NOT_SERVING."""
    assert await ask(server, "--service", "nothing") == 1
    assert "knows no service 'nothing'" in capsys.readouterr().err
    await server.stop(0)
    assert await ask(server) == 1
    captured = capsys.readouterr()
    address = f"127.0.0.1:{server.port}"
    hint = "`octavo doctor` shows which services answer"
    assert captured.err == f"octavo: error: cannot connect to {address}: connection refused\nhint: {hint}\n"
    assert captured.out == ""


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_a_timeout_that_is_none_is_bad_usage(seconds: str) -> None:
    """A check that could wait for ever would hang its container's engine."""
    with pytest.raises(SystemExit) as ended:
        main(["health", "127.0.0.1:1", f"--timeout={seconds}"])
    assert ended.value.code == 2


def test_if_needed_prepares_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second time nothing is written; weights that have changed since are an error, not prepared over."""
    weights = write_gguf(tmp_path / "m.gguf", byte_level_metadata())
    assert main(["prepare", "--if-needed", str(weights)]) == 0
    manifest = tmp_path / "m.octavo" / "manifest.json"
    written = manifest.stat()
    assert main(["prepare", "--if-needed", str(weights)]) == 0
    assert manifest.stat() == written
    with weights.open("ab") as file:
        file.write(b"more")
    capsys.readouterr()
    assert main(["prepare", "--if-needed", str(weights)]) == 1
    assert "octavo prepare" in capsys.readouterr().err


def test_if_needed_looks_in_one_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With another output nobody could say what is there already."""
    weights = write_gguf(tmp_path / "m.gguf", byte_level_metadata())
    assert main(["prepare", "--if-needed", "--output", str(tmp_path / "out"), str(weights)]) == 1
    assert "leave out --output" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
