"""What containers run: `octavo health` as health check, `octavo prepare --if-needed` or `--wait` before they start."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from gguf_samples import byte_level_metadata, write_gguf

from octavo.cli import main
from octavo.models.ensure import wait_prepared
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


def test_wait_prepares_nothing_and_ends_once_another_has(tmp_path: Path) -> None:
    """It tells each reason once, takes no model that is only half there, and never writes."""
    weights, away = tmp_path / "m.gguf", tmp_path / "away"
    reports: list[str] = []
    looks = iter(range(1, 100))

    def meanwhile(_: float) -> None:
        """What others do between two looks."""
        look = next(looks)
        if look == 2:
            write_gguf(weights, byte_level_metadata())
        elif look == 4:
            assert sorted(tmp_path.iterdir()) == [weights]
            main(["prepare", str(weights)])
            weights.rename(away)
        elif look == 6:
            away.rename(weights)

    assert wait_prepared(str(weights), reports.append, meanwhile).weights == weights
    assert next(looks) == 7
    missing, unprepared, missing_again = reports
    assert missing.startswith("waiting: no model")
    assert "not prepared yet" in unprepared
    assert missing_again == missing


def test_wait_is_ended_by_sigterm(tmp_path: Path) -> None:
    """Also as the first process of a container, where a signal without a handler is not heard."""
    command = [sys.executable, "-m", "octavo", "prepare", "--wait", str(tmp_path / "m.gguf")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline().startswith("waiting: no model")
        status = Path(f"/proc/{waiting.pid}/status").read_text()
        caught = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), 16)
        assert caught >> (signal.SIGTERM - 1) & 1
        waiting.terminate()
        assert waiting.wait(30) == 130


@pytest.mark.parametrize("flags", [["--if-needed"], ["--output", "out"]])
def test_wait_goes_with_no_flag_that_prepares(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody would know which of both was meant."""
    assert main(["prepare", "--wait", *flags, "smollm2-135m-instruct"]) == 1
    assert "--wait" in capsys.readouterr().err
