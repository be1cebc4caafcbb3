"""Models of every family, saved once."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where they lie."""
    return tmp_path_factory.mktemp("graphs")
