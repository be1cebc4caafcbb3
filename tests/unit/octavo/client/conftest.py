"""Both clients, for tests of what they have in common."""

from __future__ import annotations

import pytest
from client_fakes import AsyncFace, Face, SyncFace


@pytest.fixture(params=[SyncFace, AsyncFace], ids=["Client", "AsyncClient"])
def face(request: pytest.FixtureRequest) -> Face:
    """One of the two clients."""
    made: Face = request.param()
    return made
