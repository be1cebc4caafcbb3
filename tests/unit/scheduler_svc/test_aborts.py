"""B3: whatever is aborted, in whatever state, no block is lost and none is given twice."""

from __future__ import annotations

import random

import grpc
import pytest
from cells import make_cell
from fakes import make_record, make_spec, undisturbed

from octavo.rpc.errors import ServiceError
from scheduler_svc.request_record import ChoiceRecord


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_b3_the_ledger_holds_after_each_of_random_aborts(seed: int, depth: int) -> None:
    """Free, owned and cached blocks make the total after each cancel of a request or choice and each operator's abort.

    The pool is small, so there are preemptions too, and prompts share beginnings, so blocks have several holders. Who
    is not aborted gets the undisturbed output.
    """
    chance = random.Random(seed)
    cell = make_cell(make_spec(num_blocks=21, block_size=4, max_num_seqs=8, max_num_batched_tokens=16), depth=depth)
    error = ServiceError(grpc.StatusCode.CANCELLED, "CANCELLED_BY_OPERATOR", "by the test")
    records = []
    aborted = set()
    num_shared = 0

    def check() -> None:
        load = cell.engine.load().executors[0]
        assert load.free_blocks + load.owned_blocks + load.cached_blocks == load.total_blocks == 20

    for counter in range(120):
        prompt = [*range(chance.randrange(1, 17)), counter % 50]
        choices = [ChoiceRecord()] * chance.choice((1, 1, 3))
        record = make_record(counter, prompt, seed=counter, max_tokens=chance.randrange(1, 20), choices=choices)
        records.append(record)
        cell.submit(record)
        for _ in range(chance.randrange(3)):
            cell.round()
        tables = [block for sequence in cell.engine.live_sequences() for block in sequence.block_table]
        num_shared += len(tables) - len(set(tables))
        victim = chance.choice(records).id
        match chance.randrange(4):
            case 0:
                cell.cancel(victim)
            case 1:
                cell.cancel(victim, 0, chance.randrange(3))
            case 2:
                cell.abort(victim, error)
            case _:
                continue
        aborted.add(victim)
        check()
    cell.settle()
    check()
    load = cell.engine.load()
    assert load.executors[0].owned_blocks == load.num_requests == 0
    assert num_shared, "nothing was shared"
    assert load.num_preemptions, "nobody gave way"
    untouched = [record for record in records if record.id not in aborted]
    assert 10 < len(untouched) < len(records)
    for record in untouched:
        for choice in range(len(record.choices)):
            assert cell.gateway.tokens[record.id, choice] == undisturbed(record, choice)[0]
