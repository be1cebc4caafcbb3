"""Cells for the system tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from factories import make_llama, prepared_from
from reference import Reference
from stack import ProcessStack, Stack, in_process, plan_processes, wait_idle, wait_serving

from octavo.models.prepared import PreparedModel


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    """A small random model, prepared."""
    return prepared_from(make_llama(tmp_path_factory.mktemp("models") / "tiny", seed=1))


@pytest.fixture(scope="session")
def reference(tiny_model: PreparedModel) -> Reference:
    """The tiny model in transformers."""
    return Reference.open(tiny_model.weights)


@pytest.fixture(scope="session")
def shared_processes(tiny_model: PreparedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessStack]:
    """One cell of processes for every test that leaves it as it found it; all must end well."""
    stack = plan_processes(tiny_model, tmp_path_factory.mktemp("logs"))
    stack.start_all()
    yield stack
    exit_codes = stack.stop_all()
    logs = {name: stack.log_of(name) for name in exit_codes}
    assert set(exit_codes.values()) == {0}, (exit_codes, logs)
    assert not any('"level": "error"' in log or '"level": "critical"' in log for log in logs.values()), logs


@pytest_asyncio.fixture(params=["in_process", "processes"])
async def stack(request: pytest.FixtureRequest, tiny_model: PreparedModel) -> AsyncIterator[Stack]:
    """A serving cell of the tiny model, in each form; idle again when the test is done."""
    if request.param == "in_process":
        async with in_process(tiny_model) as cell:
            yield cell
            await wait_idle(cell)
    else:
        cell = request.getfixturevalue("shared_processes")
        await wait_serving(cell.gateway_address)
        yield cell
        await wait_idle(cell)
