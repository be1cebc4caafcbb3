"""The commands that README and docs show, and running them as a reader would: pasted, at the root of the repository.

A fenced block marked `bash` is a set of commands. A block marked `text` right behind it is what they print: each of its
lines must appear, in order; `...` stands for anything, and numbers for any number. A block marked `python` is a
program. A block marked `js` is one too, which tests/examples run where Node's packages can be had. Other blocks are not
run.

Commands that serve until they are stopped go to the background, and the cell they make is waited for.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
GATEWAY = "127.0.0.1:50051"
"""Where the pages' cells serve."""
TIMEOUT = 240.0

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_SERVES = re.compile(r"^(octavo (up|serve) |make serve|python -m (gateway|scheduler_svc|executor_svc) )", re.MULTILINE)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_LEFT_OUT = {
    ".git",
    ".venv",
    ".bench",
    "build",
    "node_modules",
    "__pycache__",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
}


@dataclass(frozen=True)
class Block:
    """Commands (or a Python program) and what they print, empty where the page does not say."""

    line: int
    language: str
    source: str
    output: str

    @property
    def serves(self) -> bool:
        """Whether its commands run until they are stopped."""
        return self.language == "bash" and _SERVES.search(self.source) is not None

    @property
    def commands(self) -> list[list[str]]:
        """The words of its commands, a list for each line."""
        lines = re.sub(r"\\\n", " ", self.source).splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def pages() -> list[Path]:
    """Every page that has something to run."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("README.md"))]
    return [page for page in found if "node_modules" not in page.parts and list(blocks(page))]


def blocks(page: Path, languages: Collection[str] = ("bash", "python")) -> Iterator[Block]:
    """Yield a page's blocks in these languages."""
    text = page.read_text()
    fences = list(_FENCE.finditer(text))
    for index, fence in enumerate(fences):
        if fence[2] not in languages:
            continue
        following = fences[index + 1] if index + 1 < len(fences) else None
        output = ""
        if following and following[2] == "text" and not text[fence.end() : following.start()].strip():
            output = following[3]
        yield Block(text.count("\n", 0, fence.start()) + 1, fence[2], fence[3], output)


def check_output(expected: str, printed: str) -> None:
    """Raise AssertionError unless the expected lines appear in order."""
    rest = printed
    for line in filter(str.strip, expected.splitlines()):
        match = re.search(_pattern(line.strip()), rest)
        assert match, f"not printed (here): {line.strip()!r}\n--- printed:\n{printed}"
        rest = rest[match.end() :]


def _pattern(line: str) -> str:
    """Return the pattern of a line of output: spaces, numbers and `...` stand for any."""
    parts = []
    for word in line.split():
        pieces = [re.escape(piece) for piece in _NUMBER.sub("\0", word).split("...")]
        parts.append(".*".join(pieces).replace("\0", _NUMBER.pattern))
    return r"\s+".join(parts)


class Reader:
    """Someone who pastes: a copy of the repository, its environment on the path, one shell a block."""

    def __init__(self, folder: Path, home: Path) -> None:
        """`folder`: to work in, made here. `home`: OCTAVO_HOME."""
        self._folder = folder
        self._logs = folder.with_name(f"{folder.name}-logs")
        self._logs.mkdir()
        shutil.copytree(ROOT, folder, ignore=lambda _, names: _LEFT_OUT.intersection(names), symlinks=True)
        # The environment of this run, as `make env` would have left it.
        (folder / ".venv").mkdir()
        (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
        (folder / ".venv" / ".made").touch()
        # Nothing of who runs the tests, but the kernels that were compiled for them, and the cell's name.
        kept = {"OCTAVO_KERNELS_DIR", "OCTAVO_CELL"}
        environ = {name: value for name, value in os.environ.items() if name in kept or not name.startswith("OCTAVO_")}
        path = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
        self._environ = {**environ, "PATH": path, "OCTAVO_HOME": str(home), "NO_COLOR": "1"}
        self._serving = ""
        self._servers: list[subprocess.Popen[bytes]] = []

    def run(self, block: Block) -> None:
        """Run a block and hold it to what the page says. Raises AssertionError."""
        if block.serves:
            self._serve(block)
            return
        command = ["bash", "-euo", "pipefail", "-c", block.source]
        if block.language == "python":
            command = [sys.executable, "-c", block.source]
        done = subprocess.run(
            command,
            cwd=self._folder,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"exit code {done.returncode}:\n{block.source}\n--- printed:\n{done.stdout}"
        check_output(block.output, done.stdout)

    def stop(self) -> None:
        """Stop what serves, as Ctrl-C does, and see that it ends well."""
        for server in self._servers:
            server.send_signal(signal.SIGINT)
        codes = [server.wait(TIMEOUT) for server in self._servers]
        self._serving, self._servers = "", []
        assert set(codes) <= {0}, f"exit codes {codes}"

    def _serve(self, block: Block) -> None:
        """Start the block's commands, unless they run already; wait for the cell, then for what they print."""
        if block.source != self._serving:
            self.stop()
            self._serving = block.source
            lines = re.sub(r"\\\n", " ", block.source).splitlines()
            for index, line in enumerate(filter(None, lines)):
                with (self._logs / f"{index}.log").open("wb") as log:
                    server = subprocess.Popen(
                        ["bash", "-c", f"exec {line}"],
                        cwd=self._folder,
                        env=self._environ,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                self._servers.append(server)
        self._wait_for(block.output)

    def _wait_for(self, output: str) -> None:
        """Wait until the cell serves and the background commands have printed `output`."""
        give_up = time.monotonic() + TIMEOUT
        while True:
            printed = "".join(path.read_text() for path in sorted(self._logs.iterdir()))
            died = [server.returncode for server in self._servers if server.poll() is not None]
            assert not died, f"ended with {died}:\n{printed}"
            asked = subprocess.run(["octavo", "health", GATEWAY], env=self._environ, capture_output=True, check=False)
            if asked.returncode == 0:
                try:
                    check_output(output, printed)
                except AssertionError:
                    if time.monotonic() > give_up:
                        raise
                else:
                    return
            assert time.monotonic() < give_up, f"no cell serves at {GATEWAY}:\n{printed}"
            time.sleep(0.2)
