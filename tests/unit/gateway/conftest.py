"""Fixtures of the gateway's tests."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from prepared_samples import MakePrepared, write_prepared

from octavo.models.prepared import PreparedModel


@pytest.fixture
def make_prepared(tmp_path: Path) -> MakePrepared:
    """Return what writes a prepared folder and opens it."""
    return partial(write_prepared, tmp_path)


@pytest.fixture
def prepared(make_prepared: MakePrepared) -> PreparedModel:
    """Return a model with a byte-level tokenizer and a chat template."""
    return make_prepared()
