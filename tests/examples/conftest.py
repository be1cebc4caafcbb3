"""A cell of a tiny model with a chat template, and the answer that every example must print."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from example_programs import CONTEXT
from factories import make_llama
from stack import InProcessStack, in_process, wait_idle

from octavo.models.prepare import prepare
from octavo.models.prepared import PreparedModel, open_prepared


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    """A small random model with a chat template and a long context, prepared."""
    folder = make_llama(tmp_path_factory.mktemp("models") / "tiny", seed=1, max_position_embeddings=CONTEXT)
    prepare(str(folder))
    return open_prepared(str(folder))


@pytest_asyncio.fixture
async def cell(long_model: PreparedModel) -> AsyncIterator[InProcessStack]:
    """A serving cell; idle again when the test is done."""
    async with in_process(long_model) as running:
        yield running
        await wait_idle(running)
