"""Requests that kill executors: found by halves, alone in the end, and never by cuts, hangs and farewells."""

from __future__ import annotations

import itertools

import pytest
from cells import Cell, make_cell
from fakes import make_record, make_spec, undisturbed

from scheduler_svc.request_record import RequestRecord
from scheduler_svc.suspects import MAX_DEATHS_ALONE, Loss

POISON = 40
NUM_REQUESTS = 64
MAX_TOKENS = 12
_incarnations = itertools.count(1)


def new_spec() -> object:
    """An executor's process that was not there before, with room for everybody."""
    return make_spec(
        num_blocks=400, max_num_seqs=80, max_num_batched_tokens=256, incarnation=f"{next(_incarnations):032x}"
    )


def submit_all(cell: Cell) -> list[RequestRecord]:
    """64 requests of which one is poisonous: its prompt, and only its, holds the token POISON."""
    records = []
    for counter in range(1, NUM_REQUESTS + 1):
        prompt = [1 + counter % 30, 2, POISON if counter == 17 else 3]
        records.append(make_record(counter, prompt, seed=counter, max_tokens=MAX_TOKENS, was_accepted=True))
        cell.submit(records[-1])
    return records


def poisonous_handles(cell: Cell, session: int, seen: dict[int, set[int]]) -> set[int]:
    """Handles of the session's stays that hold the poison."""
    handles = seen.setdefault(session, set())
    for batch in cell.sent[session]:
        handles.update(new.handle for new in batch.new_sequences if POISON in new.token_ids[: new.num_prompt_tokens])
    return handles


def run_with_poison(cell: Cell, loss: Loss, *, certain: bool, after_tokens: int = 0, max_deaths: int = 60) -> int:
    """Run until nothing is left; an executor with the poison in a step dies and another takes its place.

    `after_tokens`: steps of the poison that go well in each stay. Returns the number of deaths.
    """
    seen: dict[int, set[int]] = {}
    lived: dict[int, int] = {}
    num_deaths = 0
    for _ in range(5000):
        is_busy = False
        for session in list(cell.executors):
            while cell.schedule(session) is not None:
                is_busy = True
        for session in list(cell.executors):
            if not cell.sent[session]:
                continue
            is_busy = True
            poison = poisonous_handles(cell, session, seen)
            if poison & set(cell.sent[session][0].columns.handles):
                lived[session] = lived.get(session, 0) + 1
                if lived[session] > after_tokens:
                    incarnation = cell.engine.load().executors[0].incarnation
                    cell.remove_executor(session, loss)
                    if certain:
                        cell.receive(cell.engine.death_is_certain(incarnation))
                    num_deaths += 1
                    assert num_deaths < max_deaths, "the poison is not found"
                    cell.add_executor(new_spec())  # type: ignore[arg-type]
                    continue
            cell.run(session)
        if not is_busy:
            return num_deaths
    raise AssertionError("still at work")


@pytest.mark.parametrize("after_tokens", [0, 1])
@pytest.mark.parametrize(("loss", "certain"), [(Loss.DIED, False), (Loss.LOST, True)])
def test_one_poisonous_request_among_63_innocents_fails_alone(loss: Loss, certain: bool, after_tokens: int) -> None:
    """It ends with POISON after as many deaths as halving takes; all others get what they would have got without it."""
    cell = make_cell(new_spec())  # type: ignore[arg-type]
    records = submit_all(cell)
    num_deaths = run_with_poison(cell, loss, certain=certain, after_tokens=after_tokens)
    assert num_deaths <= 2 + 6 + MAX_DEATHS_ALONE
    for record in records:
        done = cell.gateway.done[record.id]
        if record.id[1] == 17:
            assert done.error is not None
            assert done.error.reason == "POISON"
            continue
        assert done.error is None
        assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0)[0]


@pytest.mark.parametrize("loss", [Loss.LEFT, Loss.HUNG])
def test_hangs_and_farewells_never_count(loss: Loss) -> None:
    """Twenty of them cost nobody a request, and nobody runs apart."""
    cell = make_cell(new_spec())  # type: ignore[arg-type]
    submit_all(cell)
    for _ in range(20):
        (session,) = cell.executors
        while cell.schedule(session) is not None:
            pass
        cell.remove_executor(session, loss)
        cell.add_executor(new_spec())  # type: ignore[arg-type]
    assert not [each for each in cell.engine.live_sequences() if each.group is not None]
    cell.settle()
    assert all(done.error is None for done in cell.gateway.done.values())


def test_a_cut_that_looked_like_a_death_is_taken_back() -> None:
    """While it is not certain nobody fails, however often; once the process answers again nobody is suspect."""
    spec = new_spec()
    cell = make_cell(spec)  # type: ignore[arg-type]
    cell.submit(make_record(1, [1, 2, 3], max_tokens=MAX_TOKENS, was_accepted=True))
    for _ in range(10):
        (session,) = cell.executors
        while cell.schedule(session) is not None:
            pass
        cell.remove_executor(session, Loss.LOST)
        cell.engine.was_cut_off(spec.incarnation)  # type: ignore[attr-defined]
        cell.add_executor(spec)  # type: ignore[arg-type]
        (sequence,) = cell.engine.live_sequences()
        assert (sequence.num_deaths, sequence.num_deaths_alone, sequence.group) == (0, 0, None)
    cell.settle()
    assert cell.gateway.done["gateway", 1].error is None


def test_an_innocent_that_gets_past_the_place_is_cleared() -> None:
    """After two deaths two sequences run apart; each goes on past where it died, and then anybody may join them."""
    cell = make_cell(new_spec())  # type: ignore[arg-type]
    records = [make_record(each, [each, 2, 3], seed=each, max_tokens=40, was_accepted=True) for each in (1, 2)]
    for record in records:
        cell.submit(record)
    for _ in range(2):
        (session,) = cell.executors
        while cell.schedule(session) is not None:
            pass
        cell.remove_executor(session, Loss.DIED)
        cell.add_executor(new_spec())  # type: ignore[arg-type]
    groups = {sequence.group for sequence in cell.engine.live_sequences()}
    assert None not in groups
    assert len(groups) == 2
    (session,) = cell.executors
    batch = cell.schedule(session)
    assert batch is not None
    assert len(batch.columns.handles) == 1
    for _ in range(60):
        cell.round()
    assert not [each for each in cell.engine.live_sequences() if each.group is not None]
    cell.settle()
    for record in records:
        assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0)[0]
