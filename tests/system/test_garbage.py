"""The garbage collector rests while a service starts, and only then."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from stack import processes

from octavo.models.prepared import PreparedModel

# Python runs a module of this name by itself, before a service's first line.
_AT_EXIT = """
import atexit, gc, sys

atexit.register(
    lambda: print("collects:", gc.isenabled(), "left out:", gc.get_freeze_count() > 10_000, file=sys.stderr)
)
"""


@pytest.mark.asyncio
async def test_every_service_collects_garbage_once_it_serves(
    tiny_model: PreparedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the imports made is left out of it: it would be walked through in each pause."""
    (tmp_path / "sitecustomize.py").write_text(_AT_EXIT)
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    async with processes(tiny_model, tmp_path) as stack:
        assert set(stack.stop_all().values()) == {0}
        for name in stack.processes:
            assert "collects: True left out: True" in stack.log_of(name)
