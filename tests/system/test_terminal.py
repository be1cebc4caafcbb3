"""The terminal tools as a person uses them: real processes, a real cell, and a terminal where one matters."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from factories import make_llama
from stack import ProcessStack, plan_processes, wait_idle, wait_serving

import octavo
from octavo.models.prepare import prepare
from octavo.models.prepared import PreparedModel, open_prepared
from octavo.terminal.kv_report import short_id

TIMEOUT = 60.0
OCTAVO = (sys.executable, "-m", "octavo")
FOREVER = ("--ignore-eos", "--temperature", "1", "--seed", "5", "--max-tokens", "1000000")
"""Goes on for the whole context, which takes the model many seconds."""
TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Makes the terminal the session's own, so that Ctrl-C there is a signal, and becomes the program."""
BRIEF = ("--max-tokens", "6", "--temperature", "0")


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessStack]:
    """A cell of processes whose model has a long context, so that there is time to interfere with an answer."""
    folder = make_llama(tmp_path_factory.mktemp("models") / "long", seed=1, max_position_embeddings=16384)
    prepare(str(folder))
    model: PreparedModel = open_prepared(str(folder))
    running = plan_processes(model, tmp_path_factory.mktemp("logs"), flags={"check_invariants": "false"})
    running.start_all()
    yield running
    exit_codes = running.stop_all()
    assert set(exit_codes.values()) == {0}, {name: running.log_of(name) for name in exit_codes}


@pytest_asyncio.fixture
async def stack(cell: ProcessStack) -> AsyncIterator[ProcessStack]:
    """The cell, serving; idle again when the test is done, so that whatever was stopped really ended."""
    await wait_serving(cell.gateway_address)
    yield cell
    await wait_idle(cell)


@pytest.fixture
def environ(cell: ProcessStack, tmp_path: Path) -> dict[str, str]:
    """A user with a home of its own, who has told the shell where the cell is."""
    addresses = {"OCTAVO_ADDRESS": cell.gateway_address, "OCTAVO_ADMIN_ADDRESS": cell.admin_address}
    return os.environ | addresses | {"OCTAVO_HOME": str(tmp_path / "home"), "TERM": "xterm"}


def run(
    environ: dict[str, str], *argv: str, stdin: str | None = None, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; its input is empty unless given."""
    done = subprocess.run(
        [*OCTAVO, *argv], env=environ, input=stdin or "", capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@contextmanager
def started(environ: dict[str, str], *argv: str, stdout: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[str]]:
    """Run a command, its errors piped, beside the body; it has ended behind it, whatever happens."""
    with subprocess.Popen([*OCTAVO, *argv], env=environ, stdout=stdout, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


async def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end of a command and return its exit code and what it wrote to its errors."""
    assert process.stderr is not None
    errors = await asyncio.to_thread(process.stderr.read)
    process.stderr.close()
    return await asyncio.to_thread(process.wait, TIMEOUT), errors


class Terminal:
    """A command in a terminal of its own, as a window or an ssh session gives it one."""

    def __init__(self, environ: dict[str, str], *argv: str) -> None:
        self.screen = ""
        self._keyboard, side = pty.openpty()
        command = [sys.executable, "-c", TAKE_TERMINAL, *OCTAVO, *argv]
        self.process = subprocess.Popen(
            command, env=environ, stdin=side, stdout=side, stderr=side, start_new_session=True
        )
        os.close(side)

    def type(self, keys: str) -> None:
        """Press keys: \\r is Enter, \\x03 Ctrl-C, \\x04 Ctrl-D."""
        os.write(self._keyboard, keys.encode())

    def until(self, pattern: str) -> str:
        """Wait until what came since the last call matches, take it off, and return it. Fails after TIMEOUT."""
        deadline = time.monotonic() + TIMEOUT
        while not (found := re.search(pattern, self.screen, re.DOTALL)):
            left = deadline - time.monotonic()
            ready = left > 0 and select.select([self._keyboard], [], [], left)[0]
            assert ready, f"{pattern!r} never came: {self.screen!r}"
            try:
                self.screen += os.read(self._keyboard, 65536).decode(errors="replace")
            except OSError:  # the other side is closed: the program has ended
                raise AssertionError(f"ended before {pattern!r}: {self.screen!r}") from None
        taken, self.screen = self.screen[: found.end()], self.screen[found.end() :]
        return taken

    def wait(self) -> int:
        """Return the exit code."""
        while True:  # what is still written must go somewhere, or the program waits for room
            try:
                if not os.read(self._keyboard, 65536):
                    break
            except OSError:
                break
        return self.process.wait(TIMEOUT)

    def close(self) -> None:
        """End the program if it still runs."""
        self.process.kill()
        self.process.wait()
        os.close(self._keyboard)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    """Terminals that the test opens; closed whatever happens."""
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


async def live_requests(stack: ProcessStack, count: int) -> Sequence[octavo.RequestInfo]:
    """Wait until so many requests run, and return them."""
    async with asyncio.timeout(TIMEOUT), octavo.AsyncAdminClient(stack.admin_address) as admin:
        while True:
            found = await admin.list_requests()
            if len(found) == count and all(each.completion_tokens for each in found):
                return found
            await asyncio.sleep(0.02)


@pytest.mark.asyncio
async def test_a_chat_over_a_pipe_says_what_the_client_says(stack: ProcessStack, environ: dict[str, str]) -> None:
    """Each line is a question, sent with all turns before it; the output is the answers and nothing else."""
    answers = await asyncio.to_thread(run, environ, "chat", *BRIEF, "--system", "s", stdin="the sea\nand then\n")
    async with octavo.AsyncClient(stack.gateway_address) as client:
        turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "the sea"}]
        first = await client.complete(turns, temperature=0, max_tokens=6)
        turns += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "and then"}]
        second = await client.complete(turns, temperature=0, max_tokens=6)
        alone = await client.complete(turns[-1:], temperature=0, max_tokens=6)
    assert first.text
    assert second.text != alone.text, "the history makes no difference to this model"
    assert answers.stdout == f"{first.text}\n{second.text}\n"
    assert answers.stderr == ""


@pytest.mark.asyncio
async def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(
    stack: ProcessStack, environ: dict[str, str], terminals: list[Terminal]
) -> None:
    """A real Ctrl-C ends the request in the cell, the partial answer is remembered, and the next one comes whole."""
    chat = Terminal(environ, "chat", *FOREVER)
    terminals.append(chat)
    await asyncio.to_thread(chat.until, "Ctrl-D ends.*> ")
    chat.type("the first\r")
    await asyncio.to_thread(chat.until, r"the first\r\n.{40}")
    chat.type("\x03")
    stopped = await asyncio.to_thread(chat.until, r"stopped: \d+ tokens? written, prompt \d+.*> ")
    figures = re.search(r"stopped: (\d+) tokens? written, prompt (\d+)", stopped)
    assert figures is not None
    await wait_idle(stack)
    assert chat.process.poll() is None
    chat.type("the second\r")
    await asyncio.to_thread(chat.until, r"the second\r\n.")
    chat.type("\x03")
    again = await asyncio.to_thread(chat.until, r"written, prompt (\d+).*> ")
    later = re.search(r"written, prompt (\d+)", again)
    assert later is not None
    # The second prompt holds the first, at least some tokens of the partial answer, and its own question.
    assert int(later[1]) > int(figures[2]) + 20
    chat.type("\x03")
    await asyncio.to_thread(chat.until, r"\(Ctrl-D or /quit ends the chat\).*> ")
    chat.type("\x04")
    assert await asyncio.to_thread(chat.wait) == 0


@pytest.mark.asyncio
async def test_what_was_typed_comes_back_in_the_next_chat(
    stack: ProcessStack, environ: dict[str, str], terminals: list[Terminal]
) -> None:
    """Arrow-up in a new chat brings the last line of the old one, edited before it is sent; the file is private."""
    for keys in ("the seven seas\r", "\x1b[A\x7fx\r"):
        chat = Terminal(environ, "chat", *BRIEF)
        terminals.append(chat)
        await asyncio.to_thread(chat.until, "Ctrl-D ends.*> ")
        chat.type(keys)
        await asyncio.to_thread(chat.until, "6 tokens written, prompt .*> ")
        chat.type("\x04")
        assert await asyncio.to_thread(chat.wait) == 0
    history = Path(environ["OCTAVO_HOME"]) / "chat_history"
    assert history.read_text() == "the seven seas\nthe seven seax\n"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


@pytest.mark.asyncio
async def test_a_prompt_too_long_is_one_failed_turn(stack: ProcessStack, environ: dict[str, str]) -> None:
    """The error says what to do, the next question is answered, and the exit code tells that one was not."""
    done = await asyncio.to_thread(run, environ, "chat", *BRIEF, stdin=f"{'xy' * 16384}\nhi\n", code=1)
    assert re.match(r"octavo: error: .*tokens.*\nhint: shorten the input", done.stderr)
    async with octavo.AsyncClient(stack.gateway_address) as client:
        alone = await client.complete([{"role": "user", "content": "hi"}], temperature=0, max_tokens=6)
    assert done.stdout == f"{alone.text}\n"


@pytest.mark.asyncio
async def test_complete_writes_the_text_alone_and_is_quiet_when_nobody_reads_on(
    stack: ProcessStack, environ: dict[str, str]
) -> None:
    """Byte for byte the client's text; `| head` ends it without a word, and its request with it."""
    done = await asyncio.to_thread(run, environ, "complete", "-", *BRIEF, "--stats", stdin="once upon\n")
    async with octavo.AsyncClient(stack.gateway_address) as client:
        expected = await client.complete("once upon", temperature=0, max_tokens=6)
    assert done.stdout == expected.text
    assert re.match(r"6 tokens written, prompt \d+, .*seed \d+\n$", done.stderr)
    with started(environ, "complete", "once", *FOREVER, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.read, 1)
        process.stdout.close()
        assert await end_of(process) == (141, "")


@pytest.mark.asyncio
async def test_requests_load_and_cancel_see_the_same_live_request(stack: ProcessStack, environ: dict[str, str]) -> None:
    """A running completion is listed and counted; cancelled by the beginning of its id, its client says who did it."""
    with started(environ, "complete", "once", *FOREVER) as process:
        (live,) = await live_requests(stack, 1)
        (listed,) = json.loads((await asyncio.to_thread(run, environ, "requests", "--json")).stdout)
        assert (listed["request_id"], listed["state"], listed["model"]) == (
            live.request_id,
            "running",
            stack.model.name,
        )
        assert listed["completion_tokens"] >= live.completion_tokens
        assert short_id(live.request_id) in (await asyncio.to_thread(run, environ, "requests")).stdout
        load = json.loads((await asyncio.to_thread(run, environ, "load", "--json")).stdout)
        (executor,) = load["executors"]
        assert (load["live_requests"], executor["running_sequences"]) == (1, 1)
        assert executor["owned_blocks"] > 0
        done = await asyncio.to_thread(run, environ, "cancel", live.request_id[:-1])
        assert done.stdout == f"cancelled {live.request_id}\n"
        code, errors = await end_of(process)
        assert code == 1
        assert re.match("octavo: error: .*\nhint: somebody cancelled it by `octavo cancel`\n$", errors)
        gone = await asyncio.to_thread(run, environ, "cancel", live.request_id, code=1)
        assert "no live request has the id" in gone.stderr


@pytest.mark.asyncio
async def test_ctrl_c_ends_complete_with_130_and_its_request(stack: ProcessStack, environ: dict[str, str]) -> None:
    """An interrupted completion leaves nothing running in the cell."""
    with started(environ, "complete", "once", *FOREVER) as process:
        await live_requests(stack, 1)
        process.send_signal(signal.SIGINT)
        assert await end_of(process) == (130, "octavo: interrupted\n")
