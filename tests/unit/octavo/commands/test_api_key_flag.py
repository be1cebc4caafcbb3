"""API keys at the terminal: by flag or variable, and what is said without one."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys

import pytest
from fake_gateway import FakeGateway

from octavo.cli import main
from octavo.client.discovery import GATEWAY
from octavo.terminal.api_key import API_KEY_HINT
from octavo.terminal.checks.finding import Level
from octavo.terminal.checks.ports import check_services

KEY = "a-key-of-mine"
COMMANDS = (["complete", "x"], ["chat"])


@pytest.fixture(autouse=True)
def _key_is_asked_for(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway takes one key, and the caller has none."""
    gateway.api_key = KEY
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)


def typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one question come through a pipe."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))


@pytest.mark.parametrize("argv", COMMANDS)
@pytest.mark.parametrize("source", ["flag", "variable", "both"])
def test_a_key_goes_with_the_call(
    argv: list[str],
    source: str,
    gateway: FakeGateway,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From flag or variable; the flag wins."""
    typed(monkeypatch)
    flags = ["--address", gateway.address]
    if source != "flag":
        monkeypatch.setenv("OCTAVO_API_KEY", KEY if source == "variable" else "another-key")
    if source != "variable":
        flags += ["--api-key", KEY]
    assert main([*argv, *flags]) == 0
    assert capsys.readouterr().out.startswith("yes")


@pytest.mark.parametrize("source", ["flag", "variable"])
def test_bench_shows_the_key_of_a_gateway(source: str, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every call: the model, the tokens of the prompts, and each request. OpenAI's key is another server's."""
    monkeypatch.setenv("OPENAI_API_KEY", "another-key")
    flags = ["--requests", "2", "--input-tokens", "4", "--output-tokens", "1", "--address", gateway.address]
    if source == "flag":
        flags += ["--api-key", KEY]
    else:
        monkeypatch.setenv("OCTAVO_API_KEY", KEY)
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "bench", *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(gateway.requests) == 2 + 2  # and the warm-up


def test_bench_names_a_key_that_cannot_be_sent(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """By its flag, and without showing it."""
    assert main(["bench", "--address", gateway.address, "--api-key", "bad secret"]) == 1
    assert capsys.readouterr().err.startswith("octavo: error: --api-key: must be printable ASCII without spaces")


@pytest.mark.parametrize("argv", [*COMMANDS, ["bench", "--requests", "1"]])
def test_without_a_key_it_is_said_how_to_give_one(
    argv: list[str], gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hint names variable and flag."""
    typed(monkeypatch)
    assert main([*argv, "--address", gateway.address]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert "an API key is required" in error
    assert hint == f"hint: {API_KEY_HINT}"


def test_a_key_that_cannot_be_sent_is_not_shown(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """The flag is named, the key is not."""
    with pytest.raises(SystemExit) as ended:
        main(["complete", "x", "--address", gateway.address, "--api-key", "bad secret"])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert "--api-key: must be printable ASCII without spaces" in err
    assert "secret" not in err


def test_the_doctor_says_that_a_key_is_missing(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that it would go away by itself; with a key the models are listed."""
    (found,) = asyncio.run(check_services({GATEWAY: [gateway.address]}))
    assert found.level is Level.NOTE
    assert found.text == "asks for an API key"
    assert found.advice == API_KEY_HINT
    monkeypatch.setenv("OCTAVO_API_KEY", KEY)
    (found,) = asyncio.run(check_services({GATEWAY: [gateway.address]}))
    assert (found.level, found.text) == (Level.OK, "serves m (1 executor ready)")
