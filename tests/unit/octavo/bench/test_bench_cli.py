"""`octavo bench` as a command: flags, exit codes, files, and what it says where something is missing."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from openai_server import DONE, Answer, openai_server, text_event, usage_event

from octavo.cli import main

WHOLE = [text_event("a"), text_event("b"), text_event("", "length"), usage_event(7, 2), DONE]
COUNT = Answer([b'{"usage": {"prompt_tokens": 9}}'], content_type="application/json")
FEW = ("--requests", "3", "--concurrency", "2", "--output-tokens", "2", "--warmup", "1")


async def octavo(*argv: str) -> int:
    """Run the command while this loop serves it."""
    return await asyncio.to_thread(_run, argv)


def _run(argv: Sequence[str]) -> int:
    # In a process of its own signals could be handled; here only what it prints and returns matters.
    return subprocess.run([sys.executable, "-m", "octavo", *argv], check=False).returncode


@pytest.mark.asyncio
async def test_a_run_over_http_prints_its_table_and_writes_its_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0, the table, JSON and PNG; the key is sent and stays out of every output."""
    async with openai_server(Answer(WHOLE)) as server:
        server.count = COUNT
        files = ("--json", str(tmp_path / "run.json"), "--png", str(tmp_path / "run.png"))
        assert await octavo("bench", "--url", server.url, "--api-key", "secret-key", *FEW, *files) == 0
        assert {headers["authorization"] for _, headers in server.requests} == {"Bearer secret-key"}
    out, err = capfd.readouterr()
    assert "m, completions over http at http://127.0.0.1:" in out
    assert "closed loop, 2 at once; 3 requests, 1 before to warm up" in out
    assert "3 ok, 0 failed" in out
    assert err == ""
    text = (tmp_path / "run.json").read_text()
    assert len(json.loads(text)["requests"]) == 3
    assert "secret-key" not in text + out
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.asyncio
async def test_where_no_request_succeeds_the_exit_code_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    """Without a warm-up to notice it: the table shows the errors, exit code 1."""
    body = b'{"error": {"message": "slow down", "code": "rate_limit_exceeded"}}'
    async with openai_server(Answer([body], "429 Too Many Requests", "application/json")) as server:
        server.count = COUNT
        assert await octavo("bench", "--url", server.url, *FEW, "--warmup", "0") == 1
    assert "0 ok, 3 failed; 3 HTTP_429" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--duration", "3"], "--duration: arrivals need a --rate"),
        (["--trace", "t", "--prompts", "p"], "--prompts, --trace: a trace has its own prompts"),
        (["--json", "/nowhere/x.json"], "--json: cannot write /nowhere/x.json"),
        (["--png", "/"], "--png: cannot write /"),
        (["--address", "here"], "--address: must be host:port, is 'here'"),
        (["--address", "127.0.0.1:1,there"], "--address: must be host:port, is 'there'"),
        (["--address", "127.0.0.1:1"], "no gateway answers at 127.0.0.1:1"),
        (["--url", "http://127.0.0.1:1", "--api-key", "\u00e9"], "--api-key, OPENAI_API_KEY: must be printable ASCII"),
        (["--url", "nowhere"], "--url: 'nowhere' is no HTTP address"),
    ],
)
def test_what_cannot_work_is_said_before_the_run(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence with the flag, exit code 1, no traceback."""
    assert main(["bench", *flags]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--concurrency", "2", "--rate", "1"],
        ["--rate", "0"],
        ["--timeout", "1e300"],
        ["--timeout", "nan"],
        ["--rate", "inf"],
        ["--concurrency", "0"],
        ["--requests", "x"],
        ["--input-tokens", "0"],
        ["--slo", "ttft=3"],
        ["--api", "embed"],
        ["--address", "a:1", "--url", "http://a"],
        ["--temperature", "-1"],
    ],
)
def test_bad_usage_is_told_apart(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What argparse can refuse ends with exit code 2 and the flag's name."""
    with pytest.raises(SystemExit) as ended:
        main(["bench", *flags])
    assert ended.value.code == 2
    assert f"octavo bench: error: {flags[-2]}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "package"), [(["--url", "http://127.0.0.1:1/v1"], "httpx"), (["--png", "run.png"], "matplotlib")]
)
def test_a_missing_package_is_named_with_its_extra(
    flags: list[str], package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the run, not after it: the flag, the package, and what installs it."""
    real = importlib.util.find_spec

    def without(name: str, *more: Any) -> Any:
        return None if name == package else real(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    assert main(["bench", *flags]) == 1
    words = f'{flags[0]} needs {package}, which is not installed: pip install "octavo[bench]"'
    assert words in capsys.readouterr().err


def test_neither_package_is_needed_over_grpc() -> None:
    """httpx and matplotlib are imported only where they are used."""
    parts = ("grpc_client", "session", "report", "document", "progress")
    imports = ", ".join(["octavo.commands.bench", *(f"octavo.bench.{part}" for part in parts)])
    code = f"import sys, {imports}; assert not {{'httpx', 'matplotlib', 'numpy', 'torch', 'tqdm'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
