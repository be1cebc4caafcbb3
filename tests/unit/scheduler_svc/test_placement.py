"""Which executor gets what, and what is refused where no executor will do."""

from __future__ import annotations

import grpc
import pytest
from cells import Cell, make_cell
from fakes import make_record, make_spec, undisturbed

from octavo.rpc.errors import ServiceError
from scheduler_svc.request_record import ChoiceRecord


def placed(cell: Cell) -> list[int]:
    """Return how many sequences are at each executor, in order of session."""
    return [executor.num_waiting + executor.num_running for executor in cell.engine.load().executors]


def test_equal_work_is_spread_evenly() -> None:
    """Waiting work counts: requests that come at once do not all go to the executor that was idle first."""
    cell = make_cell(make_spec(), make_spec(), make_spec())
    for counter in range(1, 10):
        cell.submit(make_record(counter))
        counts = placed(cell)
        assert max(counts) - min(counts) <= 1
    assert placed(cell) == [3, 3, 3]


def test_load_is_a_share_of_the_memory() -> None:
    """An executor with three times the blocks gets three times the work."""
    cell = make_cell(make_spec(num_blocks=21), make_spec(num_blocks=61), placement="least-loaded")
    for counter in range(1, 41):
        cell.submit(make_record(counter))
    assert placed(cell) == [10, 30]


def test_long_prompts_weigh_by_their_blocks() -> None:
    """One prompt of ten blocks counts as much as ten of one block."""
    cell = make_cell(make_spec(), make_spec(), placement="least-loaded")
    cell.submit(make_record(1, prompt=[1] * 160))
    for counter in range(2, 12):
        cell.submit(make_record(counter))
    assert placed(cell) == [1, 10]


def test_running_sequences_weigh_what_they_hold() -> None:
    """Blocks that decoding took since are counted when the next request is placed."""
    cell = make_cell(make_spec(block_size=1), make_spec(block_size=1), placement="least-loaded")
    cell.submit(make_record(1, prompt=[1], max_tokens=30))
    for _ in range(10):
        cell.schedule(1)
        cell.run(1)
    for counter in range(2, 6):
        cell.submit(make_record(counter, prompt=[1], max_tokens=2))
    assert placed(cell) == [1, 4]


def test_a_sequence_goes_only_where_it_always_fits() -> None:
    """Worst-case length decides: an executor that it could outgrow is passed over, however idle."""
    cell = make_cell(make_spec(max_model_len=32), make_spec(max_model_len=200))
    for counter in range(1, 4):
        cell.submit(make_record(counter, max_tokens=100))
    assert placed(cell) == [0, 3]


def test_models_have_pools_of_their_own() -> None:
    """A request goes to executors of its model only."""
    cell = make_cell(make_spec(), make_spec(model="other"))
    for counter in range(1, 4):
        cell.submit(make_record(counter, model="other"))
    assert placed(cell) == [0, 3]


def test_an_idle_executor_takes_what_a_full_one_cannot_admit() -> None:
    """Work placed behind a long request moves to where there is room, once, and ends as if it had never moved."""
    cell = make_cell(make_spec(max_num_seqs=1), depth=2)
    records = [make_record(counter, max_tokens=30) for counter in range(1, 4)]
    for record in records:
        cell.submit(record)
    cell.schedule(1)
    cell.add_executor(make_spec(max_num_seqs=1))
    assert placed(cell) == [3, 0]
    assert cell.schedule(2) is not None
    assert placed(cell) == [2, 1]
    cell.settle()
    for record in records:
        assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0)[0]


def test_work_that_can_be_admitted_where_it_is_stays() -> None:
    """An idle executor does not take what its neighbour is about to start."""
    cell = make_cell(make_spec(), make_spec())
    for counter in range(1, 5):
        cell.submit(make_record(counter))
    cell.schedule(1)
    cell.schedule(1)
    assert placed(cell) == [2, 2]


def test_tokens_in_flight_keep_a_sequence_where_it_is() -> None:
    """A preempted sequence whose tokens are on their way is not taken over before they have arrived."""
    cell = make_cell(make_spec(num_blocks=5, block_size=4), depth=2)
    old = make_record(1, prompt=[1] * 4, max_tokens=9, age=10.0)
    young = make_record(2, prompt=[2] * 4, max_tokens=9)
    cell.submit(old)
    cell.submit(young)
    while cell.engine.load().num_preemptions == 0:
        if cell.schedule(1) is None:
            cell.run(1)
    session = cell.add_executor(make_spec())
    assert cell.schedule(session) is None
    while cell.engine.load().executors[0].num_in_flight:
        cell.run(1)
    assert cell.schedule(session) is not None
    assert placed(cell) == [1, 1]
    cell.settle()
    for record in (old, young):
        assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0)[0]


def refusal(cell: Cell, **fields: object) -> ServiceError:
    """Submit a request that must be refused, and return the error; nothing may be left of it."""
    before = cell.engine.load()
    with pytest.raises(ServiceError) as caught:
        cell.submit(make_record(**fields))  # type: ignore[arg-type]
    assert cell.engine.load() == before
    return caught.value


def test_an_unknown_model_is_not_found() -> None:
    """NOT_FOUND names the model; before any executor has come it is UNAVAILABLE, for nobody can know."""
    cell = make_cell()
    assert refusal(cell, model="other").code is grpc.StatusCode.UNAVAILABLE
    cell.add_executor(make_spec())
    error = refusal(cell, model="other")
    assert (error.code, error.metadata) == (grpc.StatusCode.NOT_FOUND, {"model": "other"})


def test_a_model_whose_executors_are_away_is_unavailable() -> None:
    """New requests are told when to try again; accepted ones wait."""
    cell = make_cell(make_spec())
    cell.remove_executor(1)
    error = refusal(cell)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_EXECUTOR")
    assert error.retry_delay is not None
    resumed = make_record(choices=[ChoiceRecord((1, 2))])
    cell.submit(resumed)
    assert cell.engine.load().num_waiting == 1


def test_another_revision_is_refused() -> None:
    """FAILED_PRECONDITION carries both hashes."""
    error = refusal(make_cell(make_spec()), model_revision="r2")
    assert error.code is grpc.StatusCode.FAILED_PRECONDITION
    assert error.metadata == {"running_revision": "r1", "revision": "r2"}


def test_a_record_without_sense_names_every_bad_field() -> None:
    """All violations come at once, before anything is queued."""
    error = refusal(make_cell(make_spec()), prompt=(), choices=(), max_tokens=0, min_tokens=3)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    fields = [violation.field for violation in error.violations]
    assert fields == ["input", "n", "stopping.max_tokens", "stopping.min_tokens"]
