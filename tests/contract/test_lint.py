"""The rules on contracts and imports hold, and the tools that check them would notice if they did not."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PACKAGES = ("octavo", "gateway", "scheduler_svc", "executor_svc")
INFERENCE = Path("octavo/v1/inference.proto")


def buf(*arguments: str) -> tuple[int, str]:
    """Run buf; return exit code and output."""
    done = subprocess.run([BIN / "buf", *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def protos(tmp_path: Path) -> Path:
    """A copy of the contracts, to break."""
    return Path(shutil.copytree(ROOT / "protos", tmp_path / "protos"))


def test_contracts_are_lint_clean() -> None:
    """STANDARD and COMMENTS, over the whole module."""
    assert buf("lint", str(ROOT / "protos")) == (0, "")


@pytest.mark.parametrize(
    ("text", "by", "complaint"),
    [
        ("  // The messages, oldest first. 1 to 4096.\n", "", "comment"),
        ("CHAT_ROLE_UNSPECIFIED", "CHAT_ROLE_NONE", "suffixed"),
        ("rpc Tokenize(TokenizeRequest)", "rpc Tokenize(DetokenizeRequest)", "request"),
    ],
)
def test_the_linter_notices(protos: Path, text: str, by: str, complaint: str) -> None:
    """A field without a comment, a zero value that is one, a request type used twice: each fails the lint."""
    path = protos / INFERENCE
    original = path.read_text()
    assert text in original
    path.write_text(original.replace(text, by))
    code, output = buf("lint", str(protos))
    assert code != 0
    assert complaint in output


def test_contracts_break_no_client_of_the_baseline() -> None:
    """What worked with the committed baseline still works, on the wire and in source."""
    assert buf("breaking", str(ROOT / "protos"), "--against", str(ROOT / "protos" / "baseline.binpb")) == (0, "")


@pytest.mark.parametrize(
    ("text", "by"),
    [
        ("optional uint64 seed = 9;", "optional uint64 seed = 99;"),
        ("string request_id = 10;", "bytes request_id = 10;"),
        ("  rpc Detokenize(DetokenizeRequest) returns (DetokenizeResponse);\n", ""),
    ],
)
def test_a_breaking_change_is_noticed(protos: Path, text: str, by: str) -> None:
    """A renumbered field, another type, a removed rpc: each breaks a client and is refused."""
    path = protos / INFERENCE
    original = path.read_text()
    assert text in original
    path.write_text(original.replace(text, by))
    code, output = buf("breaking", str(protos), "--against", str(ROOT / "protos" / "baseline.binpb"))
    assert code != 0
    assert "inference.proto" in output


def test_protos_import_only_their_own_and_googles() -> None:
    """A client needs nothing but these files and protoc's own."""
    for path in (ROOT / "protos").rglob("*.proto"):
        imported = re.findall(r'^import "([^"]+)";', path.read_text(), re.MULTILINE)
        assert all(name.startswith(("google/protobuf/", "octavo/")) for name in imported), path


def lint_imports(folder: Path) -> tuple[int, str]:
    """Run import-linter on the packages in `folder`."""
    command = [
        sys.executable,
        "-c",
        "import sys; sys.path.insert(0, ''); from importlinter.cli import lint_imports_command as c; c()",
    ]
    done = subprocess.run([*command, "--no-cache"], cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_import_rules_hold() -> None:
    """Every contract of .importlinter is kept."""
    code, output = lint_imports(ROOT)
    assert code == 0, output


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("gateway/cell.py", "import scheduler_svc.sequence", "Services know one another by their contracts only"),
        ("octavo/home.py", "import gateway.cell", "The common library knows no service"),
        ("scheduler_svc/sequence.py", "import torch", "Only the executor computes"),
        ("executor_svc/sampler.py", "import triton", "Triton is imported by Triton kernels alone"),
        ("gateway/vocabulary.py", "import gateway.server", "gateway: one way"),
        ("scheduler_svc/sequence.py", "import scheduler_svc.engine", "scheduler_svc: one way"),
        ("executor_svc/kernels/noise/reference.py", "import executor_svc.worker", "executor_svc: one way"),
    ],
)
def test_the_import_linter_notices(tmp_path: Path, file: str, line: str, broken: str) -> None:
    """Each rule, broken by one line in one file, is reported by its name."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".importlinter", tmp_path)
    with (tmp_path / file).open("a") as source:
        source.write(f"\n{line}\n")
    code, output = lint_imports(tmp_path)
    assert code != 0
    assert re.search(rf"^{re.escape(broken)}.* BROKEN( \(\d+ ignored imports\))?$", output, re.MULTILINE), output


def test_generated_messages_stay_at_the_edges() -> None:
    """Only servicers, converters and clients import octavo's stubs; a server also registers its servicers."""
    wrong = []
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "_pb2" not in path.name):
        allowed = re.search(r"servicer|convert|client", path.stem)
        for name in imported_names(path):
            is_registration = path.stem == "server" and name.endswith("_pb2_grpc")
            if name.startswith("octavo.") and "_pb2" in name and not allowed and not is_registration:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def imported_names(path: Path) -> list[str]:
    """Return the full names of what a file imports."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [re.sub(r"(_pb2(_grpc)?)\..*", r"\1", name) for name in names]
