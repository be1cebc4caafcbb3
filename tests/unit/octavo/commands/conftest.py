"""Fixtures of the commands' tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_gateway import FakeGateway, running


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own for every test, and no variable of the one who runs them."""
    for name in ("OCTAVO_ADDRESS", "OCTAVO_ADMIN_ADDRESS", "OCTAVO_MODEL", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    """A scripted gateway that runs."""
    with running(FakeGateway()) as fake:
        yield fake
