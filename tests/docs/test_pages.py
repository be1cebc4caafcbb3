"""Every command that README and docs show works as it is written and prints what the page says."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT, Block, Reader, blocks, check_output, pages

from octavo.home import octavo_home

PORTS = (8000, 50051, 50052, 50053, 50054, 9101, 9102, 9103)
"""The pages use the default ports, since readers do."""
ELSEWHERE = {
    "docker": "run against a container engine by tests/compose",
    "npm": "run by tests/examples, where Node's packages can be had",
    "node": "run by tests/examples, where Node's packages can be had",
    "cmake": "run by tests/examples, where Debian's packages are there",
    "build/cpp/client": "run by tests/examples, where Debian's packages are there",
}
"""Programs of blocks that other tests run, since these know what the machine has."""
READ_FIRST = ("README.md",)
"""The page that `make test` pastes; the others are left to `make test-full`."""
THIS_VERY_RUN = {"make test", "make check", "make test-full", "make env"}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Someone at the root of a copy of the repository, with the demo model fetched already."""
    for port in PORTS:
        with socket.socket() as claim:
            claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                claim.bind(("127.0.0.1", port))
            except OSError:
                pytest.skip(f"port {port}, which the pages use, is taken on this machine")
    folder = tmp_path_factory.mktemp("reader")
    home = folder / "home"
    home.mkdir()
    (home / "models").symlink_to(octavo_home() / "models")
    reader = Reader(folder / "repository", home)
    yield reader
    reader.stop()


def _page_param(page: Path) -> Any:
    name = str(page.relative_to(ROOT))
    return pytest.param(page, id=name, marks=() if name in READ_FIRST else pytest.mark.full)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [_page_param(page) for page in pages()])
def test_every_command_of_a_page_works(page: Path, reader: Reader) -> None:
    """Pasted one block after the other, each ends well and prints what stands below it."""
    for block in blocks(page):
        if block.language == "python" or ELSEWHERE.keys().isdisjoint(words[0] for words in block.commands):
            _paste(page, block, reader)


def _paste(page: Path, block: Block, reader: Reader) -> None:
    try:
        reader.run(_without_this_run(block))
    except AssertionError as error:
        pytest.fail(f"{page.relative_to(ROOT)}, line {block.line}: {error}", pytrace=False)


def _without_this_run(block: Block) -> Block:
    """Leave out the commands that CI is running at this moment: they would run themselves."""
    lines = block.source.splitlines(keepends=True)
    kept = [line for line in lines if line.partition("#")[0].strip() not in THIS_VERY_RUN]
    return Block(block.line, block.language, "".join(kept), block.output)


def test_what_is_run_elsewhere_has_tests() -> None:
    """The programs that are left out here are named by a test of their own folder."""
    for program, where in ELSEWHERE.items():
        folder = ROOT / next(word.strip(",") for word in where.split() if word.startswith("tests/"))
        name = "cpp" if program.startswith("build/") else program
        assert any(name in path.read_text() for path in folder.rglob("*.py")), f"{program}: {where}"


def test_targets_that_are_left_out_exist() -> None:
    """`make` knows every target that a page shows and that is not run here."""
    makefile = (ROOT / "Makefile").read_text()
    for command in THIS_VERY_RUN:
        assert f"\n{command.removeprefix('make ')}:" in makefile
    assert shutil.which("bash"), "the pages are read by bash"


def test_output_is_compared_line_by_line() -> None:
    """Numbers and `...` stand for any, order counts, and a missing line is named."""
    check_output("served after 1.5 s\nyou  ... France", "x\nserved after 12 s\nyou   the capital of France?\n")
    with pytest.raises(AssertionError, match="not printed"):
        check_output("b\na", "a\nb\n")
    with pytest.raises(AssertionError, match="0 problems"):
        check_output("0 problems", "no problems")
