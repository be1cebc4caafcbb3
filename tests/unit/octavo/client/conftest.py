"""Both clients, for tests of what they have in common, and a gateway to leave."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from client_fakes import AsyncFace, Face, FakeGateway, SyncFace, hang, serving


@pytest.fixture(params=[SyncFace, AsyncFace], ids=["Client", "AsyncClient"])
def face(request: pytest.FixtureRequest) -> Face:
    """One of the two clients."""
    made: Face = request.param()
    return made


@pytest.fixture
def hanging_gateway() -> Iterator[FakeGateway]:
    """A gateway whose streams give two tokens and then nothing, until they are cut."""
    with serving(hang("a", "b"), hang()) as fake:
        yield fake
