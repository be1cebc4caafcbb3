"""Sizes and shapes of the source tree."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("octavo", "gateway", "scheduler_svc", "executor_svc")
MAX_LINES = 400


def source_files() -> list[Path]:
    """Return every Python file of source, tests and scripts that a person wrote."""
    return [
        path
        for folder in (*PACKAGES, "tests", "scripts")
        for path in (ROOT / folder).rglob("*.py")
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    ]


def test_no_file_is_longer_than_a_person_reads_at_once() -> None:
    """A file past the ceiling is split by state, not by length."""
    sizes = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in source_files()}
    too_long = {name: size for name, size in sizes.items() if size > MAX_LINES}
    assert not too_long


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_of_a_package_is_a_package(package: str) -> None:
    """A folder without __init__.py would be found when run from here and missing once installed."""
    folders = {path.parent for path in (ROOT / package).rglob("*.py")}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]


def test_every_package_is_distributed() -> None:
    """pyproject.toml lists each package by name, and no other folder."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert sorted(listed) == sorted(f"{package}*" for package in PACKAGES)


def test_test_modules_have_names_of_their_own() -> None:
    """Without packages among the tests, two modules of one name would hide one another."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py")
    assert not [name for name, count in names.items() if count > 1]
