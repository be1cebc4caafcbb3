"""What is in each batch, id by id: continuous batching, chunks, the pipeline, releases."""

from __future__ import annotations

from cells import Cell, make_cell
from fakes import make_record, make_spec, undisturbed

from scheduler_svc.batch import BatchResult, NewSequence, ResultColumns, RowStatus, ScheduledRow, TokensOut
from scheduler_svc.request_record import ChoiceEnd, ChoiceRecord, FinishReason


def rows_of(cell: Cell, session: int = 1) -> list[ScheduledRow]:
    """Build a step and return its rows; none is an error."""
    batch = cell.schedule(session)
    assert batch is not None
    return list(batch.rows)


def test_a_prompt_goes_in_whole_and_decodes_one_by_one() -> None:
    """The first batch carries record and blocks; later rows carry one token, and a block only when one is full."""
    cell = make_cell(make_spec(block_size=4), depth=1)
    record = make_record(prompt=[9, 8, 7], seed=5, max_tokens=4, stop_token_ids=[60])
    cell.submit(record)
    batch = cell.schedule()
    assert batch is not None
    assert batch.new_sequences == (NewSequence(record.id, 1, (9, 8, 7), 3, 0, 5, record.stopping, 0.0),)
    assert (batch.step, batch.released_handles, list(batch.rows)) == (1, (), [ScheduledRow(1, 3, 0, (1,))])
    cell.run()
    assert rows_of(cell) == [ScheduledRow(1, 1, 3, ())]
    cell.run()
    assert rows_of(cell) == [ScheduledRow(1, 1, 4, (2,))]
    cell.run()
    assert rows_of(cell) == [ScheduledRow(1, 1, 5, ())]
    cell.run()
    assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0)[0]


def test_the_next_decode_is_built_before_the_result_is_known() -> None:
    """With depth 2 a second step is in flight whose row starts where the first will end, and no third."""
    cell = make_cell(make_spec(), depth=2)
    cell.submit(make_record(prompt=[9, 8, 7], max_tokens=9))
    assert rows_of(cell) == [ScheduledRow(1, 3, 0, (1,))]
    assert rows_of(cell) == [ScheduledRow(1, 1, 3, ())]
    assert cell.schedule() is None
    cell.run()
    assert rows_of(cell) == [ScheduledRow(1, 1, 4, ())]
    assert cell.schedule() is None


def test_nothing_is_scheduled_past_max_tokens() -> None:
    """With max_tokens 2 exactly two rows sample, however deep the pipeline: the last token is never computed."""
    cell = make_cell(make_spec(), depth=3)
    cell.submit(make_record(prompt=[1, 2, 3], max_tokens=2, stop_token_ids=[]))
    assert rows_of(cell) == [ScheduledRow(1, 3, 0, (1,))]
    assert rows_of(cell) == [ScheduledRow(1, 1, 3, ())]
    assert cell.schedule() is None


def test_nothing_is_scheduled_past_the_model_length() -> None:
    """max_tokens beyond the model's length is cut there: the choice ends with LENGTH at the last position."""
    cell = make_cell(make_spec(max_model_len=6), depth=3)
    record = make_record(prompt=[1, 2, 3], max_tokens=50)
    cell.submit(record)
    cell.settle()
    assert len(cell.gateway.tokens[record.id, 0]) == 3
    assert cell.gateway.ends[record.id, 0] == ChoiceEnd(FinishReason.LENGTH)
    assert max(row.num_computed_tokens + row.num_scheduled_tokens for batch in cell.batches for row in batch.rows) == 5


def test_a_long_prompt_is_chunked_under_the_budget() -> None:
    """Chunks fill what the budget leaves, carry blocks once, sample only at the end, and give the same tokens."""
    cell = make_cell(make_spec(max_num_batched_tokens=7, block_size=4), depth=1)
    record = make_record(prompt=range(17), max_tokens=2)
    cell.submit(record)
    assert rows_of(cell) == [ScheduledRow(1, 7, 0, (1, 2, 3, 4, 5))]
    cell.run()
    assert cell.gateway.tokens[record.id, 0] == []
    assert rows_of(cell) == [ScheduledRow(1, 7, 7, ())]
    cell.run()
    assert rows_of(cell) == [ScheduledRow(1, 3, 14, ())]
    cell.run()
    assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0)[0][:1]


def test_decodes_come_first_and_prefills_share_the_rest() -> None:
    """One budget for all: a row for each decode, then chunks in order of admission, then who waits."""
    cell = make_cell(make_spec(max_num_batched_tokens=8), depth=1)
    cell.submit(make_record(1, prompt=[1] * 4, max_tokens=9))
    cell.schedule()
    cell.run()
    cell.submit(make_record(2, prompt=[2] * 10, max_tokens=9))
    cell.submit(make_record(3, prompt=[3] * 3, max_tokens=9))
    assert rows_of(cell) == [ScheduledRow(1, 1, 4, ()), ScheduledRow(2, 7, 0, (2,))]
    cell.run()
    assert rows_of(cell) == [ScheduledRow(1, 1, 5, ()), ScheduledRow(2, 3, 7, ()), ScheduledRow(3, 3, 0, (3,))]


def test_rows_are_limited_too() -> None:
    """No more than max_num_seqs sequences run; the next is admitted when one ends, with a handle of its own."""
    cell = make_cell(make_spec(max_num_seqs=2), depth=1)
    for counter in (1, 2, 3):
        cell.submit(make_record(counter, max_tokens=2))
    assert [row.handle for row in rows_of(cell)] == [1, 2]
    cell.run()
    assert [row.handle for row in rows_of(cell)] == [1, 2]
    cell.run()
    batch = cell.schedule()
    assert batch is not None
    assert sorted(batch.released_handles) == [1, 2]
    assert [row.handle for row in batch.rows] == [3]


def test_a_release_goes_out_even_without_rows() -> None:
    """When nothing else is to do, a batch without rows tells the executor to forget; then all is quiet."""
    cell = make_cell(make_spec(), depth=2)
    cell.submit(make_record(max_tokens=1))
    cell.schedule()
    cell.run()
    batch = cell.schedule()
    assert batch is not None
    assert (batch.released_handles, batch.rows) == ((1,), ())
    assert cell.schedule() is None
    cell.run()
    assert cell.schedule() is None
    assert cell.executors[1].handles == set()


def test_rows_behind_a_stop_token_are_skipped_and_ignored() -> None:
    """The step in flight behind a stop comes back SKIPPED; nothing of it reaches the client."""
    record = make_record(max_tokens=20)
    third = undisturbed(record, 0)[0][2]
    record = make_record(max_tokens=20, stop_token_ids=[third])
    expected, end = undisturbed(record, 0)
    cell = make_cell(make_spec(), depth=3)
    cell.submit(record)
    for _ in range(3):
        cell.schedule()
    statuses = []
    while cell.sent[1]:
        statuses += [row.status for row in cell.run().rows]
        cell.schedule()
    assert RowStatus.SKIPPED in statuses
    assert (cell.gateway.tokens[record.id, 0], cell.gateway.ends[record.id, 0]) == (expected, end)
    assert end == ChoiceEnd(FinishReason.STOP, third)
    assert cell.engine.load().num_desyncs == 0


def test_n_choices_are_sequences_of_one_request() -> None:
    """Each choice runs and ends by itself; the request is done once, when the last has ended."""
    cell = make_cell(make_spec(), depth=2)
    record = make_record(choices=[ChoiceRecord()] * 3, max_tokens=6, stop_token_ids=[1, 2, 3, 4, 5, 6, 7])
    cell.submit(record)
    batch = cell.schedule()
    assert batch is not None
    assert [new.choice for new in batch.new_sequences] == [0, 1, 2]
    cell.settle()
    for choice in range(3):
        expected = undisturbed(record, choice)
        assert (cell.gateway.tokens[record.id, choice], cell.gateway.ends[record.id, choice]) == expected
    assert cell.gateway.done[record.id].error is None
    assert len({tuple(cell.gateway.tokens[record.id, choice]) for choice in range(3)}) == 3


def test_logprobs_pass_through_unread() -> None:
    """Whatever object a row's logprobs are, the gateway gets that object with the row's token."""
    cell = make_cell(make_spec(), depth=1)
    record = make_record(max_tokens=1)
    cell.submit(record)
    batch = cell.schedule()
    assert batch is not None
    result = cell.executors[1].run(batch)
    logprobs = object()
    row = result.rows[0]._replace(logprobs=logprobs)
    events = cell.engine.update(1, BatchResult(1, batch.step, ResultColumns.of((row,))), cell.now)
    assert events[0] == TokensOut(record.id, 0, 0, row.token_ids, logprobs, ChoiceEnd(FinishReason.LENGTH))


def test_a_resumed_request_goes_on_where_it_was() -> None:
    """Committed tokens are recomputed, not sent again; ended choices stay ended; the boundary to the prompt stays."""
    fresh = make_record(max_tokens=6, choices=[ChoiceRecord()] * 2)
    first, end = undisturbed(fresh, 0)
    second, _ = undisturbed(fresh, 1)
    record = make_record(max_tokens=6, choices=[ChoiceRecord(tuple(first), end), ChoiceRecord(tuple(second[:2]))])
    cell = make_cell(make_spec(), depth=2)
    cell.submit(record)
    batch = cell.schedule()
    assert batch is not None
    assert batch.new_sequences == (NewSequence(record.id, 1, (1, 2, 3, *second[:2]), 3, 1, 0, record.stopping),)
    cell.settle()
    assert cell.gateway.tokens[record.id, 1] == second
    assert cell.gateway.done[record.id].error is None


def test_a_resumed_choice_that_is_complete_is_ended_at_once() -> None:
    """Tokens that already meet a finish condition are not run: the end is announced at their count."""
    fresh = make_record(max_tokens=3)
    tokens, end = undisturbed(fresh, 0)
    record = make_record(max_tokens=3, choices=[ChoiceRecord(tuple(tokens))])
    cell = make_cell(make_spec())
    cell.submit(record)
    assert cell.gateway.ends[record.id, 0] == end
    assert cell.gateway.done[record.id].error is None
    assert cell.schedule() is None


def test_a_request_whose_choices_have_all_ended_is_done_at_once() -> None:
    """The gateway knows each end already: it gets none again, only the request's."""
    ended = ChoiceRecord((5,), ChoiceEnd(FinishReason.STOP, 5))
    record = make_record(choices=[ended, ended])
    cell = make_cell(make_spec())
    cell.submit(record)
    assert cell.gateway.done[record.id].error is None
    assert cell.engine.load().num_requests == 0


def test_submitting_again_changes_nothing() -> None:
    """Submit is idempotent by id while the request lives."""
    cell = make_cell(make_spec())
    record = make_record(max_tokens=3)
    cell.submit(record)
    cell.schedule()
    before = cell.engine.load()
    assert cell.engine.submit(record, cell.now) == []
    assert cell.engine.load() == before
    cell.settle()
    assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0)[0]


def test_requests_are_known_by_gateway() -> None:
    """requests_of lists the live counters of one incarnation; two gateways may use the same counter."""
    cell = make_cell(make_spec())
    for incarnation, counter in (("a", 1), ("a", 2), ("b", 1)):
        cell.submit(make_record(counter, incarnation=incarnation))
    assert cell.engine.requests_of("a") == {1, 2}
    cell.cancel(("a", 1))
    assert cell.engine.requests_of("a") == {2}
    assert cell.engine.requests_of("b") == {1}
    assert cell.engine.requests_of("c") == set()


def test_load_tells_what_is_there() -> None:
    """The snapshot counts waiting, running, blocks and steps as they are."""
    cell = make_cell(make_spec(num_blocks=11, max_num_seqs=1), depth=2)
    cell.submit(make_record(1, prompt=[1] * 20))
    cell.submit(make_record(2))
    cell.schedule()
    load = cell.engine.load()
    assert (load.num_requests, load.num_waiting, load.num_running, load.kv_usage) == (2, 1, 1, 0.2)
    executor = load.executors[0]
    assert (executor.total_blocks, executor.free_blocks, executor.num_in_flight, executor.num_steps) == (10, 8, 1, 0)
    cell.run()
    assert cell.engine.load().executors[0].num_steps == 1


def test_pools_tell_what_can_run() -> None:
    """One entry per model with a ready executor, with the longest sequence that memory and model length allow."""
    cell = make_cell(make_spec(num_blocks=4, max_model_len=40), make_spec(num_blocks=3, max_model_len=64))
    cell.add_executor(make_spec(model="other", model_revision="r9", num_blocks=3, max_model_len=64))
    assert cell.engine.pools() == [("fake", "r1", 2, 40), ("other", "r9", 1, 33)]
    cell.remove_executor(1)
    assert cell.engine.pools() == [("fake", "r1", 1, 33), ("other", "r9", 1, 33)]
