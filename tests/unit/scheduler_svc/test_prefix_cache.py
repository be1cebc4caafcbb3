"""Equal beginnings are computed once, and only those who may share them do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cells import Cell, make_cell
from fakes import make_record, make_spec, undisturbed

from scheduler_svc.batch import NewSequence, RowStatus, TokensOut
from scheduler_svc.batch_builder import MAX_SET_ASIDE
from scheduler_svc.kv_cache_manager import KVCacheManager
from scheduler_svc.request_record import RequestRecord
from scheduler_svc.sequence import LiveRequest, Sequence

PROMPT = tuple(range(1, 11)) * 2
"""20 tokens: five blocks of four."""


def roomy_cell(**spec: int) -> Cell:
    """A cell of one executor with blocks of 4 tokens and room for everything."""
    return make_cell(make_spec(**{"num_blocks": 65, "block_size": 4, "max_num_batched_tokens": 64} | spec))


def finish(cell: Cell, record: RequestRecord) -> NewSequence:
    """Run a request to its end, undisturbed in its output; return its first admission."""
    start = len(cell.batches)
    cell.submit(record)
    cell.settle()
    for choice in range(len(record.choices)):
        assert cell.gateway.tokens[record.id, choice] == undisturbed(record, choice)[0]
    return next(new for batch in cell.batches[start:] for new in batch.new_sequences if new.request == record.id)


def test_d6_cold_and_warm_output_are_equal_and_the_counter_moves() -> None:
    """D6: the second run of a prompt computes its last block alone, and writes the same."""
    cell = roomy_cell()
    assert finish(cell, make_record(1, PROMPT, seed=3)).num_cached_tokens == 0
    assert cell.engine.load().num_prefix_hit_tokens == 0
    assert finish(cell, make_record(2, PROMPT, seed=3)).num_cached_tokens == 16
    load = cell.engine.load()
    assert (load.num_prefix_query_tokens, load.num_prefix_hit_tokens) == (40, 16)
    assert cell.gateway.tokens[("gateway", 1), 0] == cell.gateway.tokens[("gateway", 2), 0]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    """Its row samples: of a prompt that is cached whole, to the end of a block, the last block is computed again."""
    cell = roomy_cell()
    finish(cell, make_record(1, PROMPT[:16]))
    assert finish(cell, make_record(2, PROMPT[:16])).num_cached_tokens == 12
    assert finish(cell, make_record(3, PROMPT[:17])).num_cached_tokens == 16


def test_a_prompt_shares_as_far_as_it_is_equal() -> None:
    """The first differing token ends the shared part, at a whole block."""
    cell = roomy_cell()
    finish(cell, make_record(1, PROMPT))
    assert finish(cell, make_record(2, (*PROMPT[:10], 50, *PROMPT[11:]))).num_cached_tokens == 8
    assert finish(cell, make_record(3, (50, *PROMPT[1:]))).num_cached_tokens == 0


def test_d1_nobody_reads_what_another_tenant_or_salt_has_left() -> None:
    """D1: tenant and salt are apart in the key, so no salt is another's tenant, and no two pairs spell one root."""
    pairs = [("", ""), ("a", ""), ("", "a"), ("a", "a"), ("a:1:b", ""), ("a", "1:b"), ("", "salt:1:a")]
    cell = roomy_cell()
    for counter, (tenant, salt) in enumerate(pairs):
        record = make_record(2 * counter, PROMPT, tenant=tenant, cache_salt=salt)
        assert finish(cell, record).num_cached_tokens == 0, f"{tenant!r}, {salt!r} reads what others left"
        assert finish(cell, replace(record, id=("gateway", 2 * counter + 1))).num_cached_tokens == 16


def test_a_request_that_bypasses_takes_nothing_and_leaves_nothing() -> None:
    """Neither those after it nor it itself share; what others left stays."""
    cell = roomy_cell()
    bypassing = make_record(1, PROMPT, reads_cache=False, writes_cache=False)
    finish(cell, bypassing)
    assert cell.engine.load().executors[0].cached_blocks == 0
    finish(cell, make_record(2, PROMPT))
    assert finish(cell, replace(bypassing, id=("gateway", 3))).num_cached_tokens == 0
    assert finish(cell, make_record(4, PROMPT)).num_cached_tokens == 16


def test_e8_a_request_that_computes_its_prompt_again_leaves_it_for_others() -> None:
    """E8: whoever needs each position of its prompt computed takes nothing, and what it computes is as good as any."""
    cell = roomy_cell()
    finish(cell, make_record(1, PROMPT))
    assert finish(cell, make_record(2, PROMPT, reads_cache=False)).num_cached_tokens == 0
    longer = (*PROMPT, 5, 6, 7, 8, 9)
    finish(cell, make_record(3, longer, reads_cache=False))
    assert finish(cell, make_record(4, longer)).num_cached_tokens == 24


def test_d5_what_a_bad_row_computed_is_shared_with_nobody() -> None:
    """D5: the next with the prefix has nothing cached of a row whose states were not finite."""
    cell = roomy_cell()
    cell.submit(make_record(1, PROMPT))
    batch = cell.schedule()
    assert batch is not None
    cell.run(row_statuses={batch.rows[0].handle: RowStatus.NAN})
    cell.settle()
    assert finish(cell, make_record(2, PROMPT)).num_cached_tokens == 0


def test_b9_what_was_complete_before_a_cancel_stays_cached() -> None:
    """B9: an interrupted answer, sent again with more behind it, finds its prompt and its whole blocks of output."""
    cell = roomy_cell()
    record = make_record(1, PROMPT, max_tokens=100)
    cell.submit(record)
    while len(cell.gateway.tokens[record.id, 0]) < 7:
        cell.round()
    cell.cancel(record.id)
    written = cell.gateway.tokens[record.id, 0]
    cell.settle()
    assert cell.engine.load().executors[0].owned_blocks == 0
    assert finish(cell, make_record(2, (*PROMPT, *written, 1, 2, 3))).num_cached_tokens >= 24


def test_choices_of_one_request_share_its_prompt() -> None:
    """The prompt is computed once: the others wait for it, hold its blocks, and differ from their first token on."""
    cell = roomy_cell()
    record = make_record(1, PROMPT, choices=make_record().choices * 3, max_tokens=4)
    cell.submit(record)
    cell.round()
    cell.schedule()
    load = cell.engine.load()
    assert load.num_running == 3
    # Four are shared; each has the prompt's last block for itself, and the first a block of output by now.
    assert load.executors[0].owned_blocks == 4 + 3 + 1
    first, *others = [new for batch in cell.batches for new in batch.new_sequences]
    assert first.num_cached_tokens == 0
    assert [new.num_cached_tokens for new in others] == [16, 16]
    cell.settle()
    for choice in range(3):
        assert cell.gateway.tokens[record.id, choice] == undisturbed(record, choice)[0]


def test_one_that_waits_for_a_prefix_holds_up_nobody_else() -> None:
    """While a long prompt is computed in chunks its twin steps aside, and a stranger behind them both is admitted."""
    cell = roomy_cell(max_num_batched_tokens=8)
    for counter, prompt in ((1, PROMPT), (2, PROMPT), (3, (7, 7))):
        cell.submit(make_record(counter, prompt, max_tokens=2))
    admitted = []
    while cell.round():
        admitted = [new.request[1] for batch in cell.batches for new in batch.new_sequences]
    assert admitted == [1, 3, 2]
    twin = next(new for batch in cell.batches for new in batch.new_sequences if new.request[1] == 2)
    assert twin.num_cached_tokens == 16


def test_a_wait_for_a_prefix_ends_with_the_one_that_computes_it() -> None:
    """Whoever was to compute it is cancelled halfway: its twin computes the rest and is not stuck."""
    cell = roomy_cell(max_num_batched_tokens=8)
    for counter in (1, 2):
        cell.submit(make_record(counter, PROMPT))
    cell.round()
    cell.cancel(("gateway", 1))
    cell.settle()
    assert cell.gateway.tokens[("gateway", 2), 0] == undisturbed(make_record(2, PROMPT), 0)[0]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_crowd_computes_its_common_beginning_once(depth: int) -> None:
    """However many come at once: one computes the prompt, and all others take it from the cache, in the next steps."""
    crowd = 3 * MAX_SET_ASIDE
    cell = make_cell(make_spec(num_blocks=513, block_size=4, max_num_seqs=64, max_num_batched_tokens=64), depth=depth)
    records = [make_record(counter, PROMPT, seed=counter, max_tokens=20) for counter in range(crowd)]
    for record in records:
        cell.submit(record)
    while cell.engine.load().num_running < crowd:
        assert len(cell.batches) <= depth + crowd * 4 // (64 - crowd) + 1
        cell.round()
    load = cell.engine.load()
    assert (load.num_prefix_query_tokens, load.num_prefix_hit_tokens) == (crowd * 20, (crowd - 1) * 16)
    cell.settle()
    for record in records:
        assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0)[0]


def test_a_short_common_beginning_is_not_waited_for() -> None:
    """Less than half of what a sequence lacks: it is admitted at once and computes it too."""
    cell = roomy_cell()
    for counter in (1, 2):
        cell.submit(make_record(counter, (*PROMPT[:8], *[40 + counter] * 12)))
    batch = cell.schedule()
    assert batch is not None
    assert [new.request[1] for new in batch.new_sequences] == [1, 2]


def test_what_nobody_holds_is_given_up_least_recently_held_first() -> None:
    """Room is made of cached blocks, never of held ones; what was used last stays longest."""
    cell = roomy_cell(num_blocks=13)
    old, kept = PROMPT[:16], tuple(30 + token for token in PROMPT[:16])
    finish(cell, make_record(1, old, max_tokens=1))
    finish(cell, make_record(2, kept, max_tokens=1))
    finish(cell, make_record(3, (*old, 1), max_tokens=1))
    finish(cell, make_record(4, (*[20] * 24,), max_tokens=1))
    assert finish(cell, make_record(5, (*old, 1), max_tokens=1)).num_cached_tokens > 0
    assert finish(cell, make_record(6, (*kept, 1), max_tokens=1)).num_cached_tokens < 16


def test_a_gateway_is_told_once_what_the_first_stay_took() -> None:
    """With the first output of the choice that ran first; never again, not even after a preemption."""
    cell = roomy_cell()
    finish(cell, make_record(1, PROMPT))
    told = []
    receive = cell.gateway.receive

    def noticing(events: list[TokensOut]) -> None:
        told.extend([event.num_cached_tokens for event in events if isinstance(event, TokensOut)])
        receive(events)

    cell.gateway.receive = noticing  # type: ignore[method-assign, assignment]
    cell.submit(make_record(2, PROMPT, max_tokens=5))
    assert cell.engine.num_cached_tokens(("gateway", 2)) == 16
    cell.settle()
    assert [number for number in told if number] == [16]
    assert cell.engine.num_cached_tokens(("gateway", 2)) == 0


def test_a_flush_forgets_what_is_held_too() -> None:
    """Nothing from before is shared; those that run go on."""
    cell = roomy_cell()
    finish(cell, make_record(1, PROMPT, max_tokens=1))
    running = make_record(2, tuple(reversed(PROMPT)), max_tokens=30)
    cell.submit(running)
    cell.round()
    assert cell.engine.flush_prefix_cache() == 5
    assert finish(cell, make_record(3, PROMPT)).num_cached_tokens == 0
    assert cell.gateway.tokens[running.id, 0] == undisturbed(running, 0)[0]
    load = cell.engine.load().executors[0]
    assert load.free_blocks + load.cached_blocks == load.total_blocks


@pytest.mark.parametrize("digest", [lambda data: b"", lambda data: bytes([len(data) % 2])])
def test_d4_a_hash_that_collides_finds_nothing(digest: object) -> None:
    """D4: under a hash that is the same for everything, the tokens themselves refuse what is not equal."""
    kv = KVCacheManager(20, 4, digest)  # type: ignore[arg-type]

    def sequence(counter: int, *prompt: int) -> Sequence:
        return LiveRequest(make_record(counter, prompt), 100, 0.0).sequences[0]

    first = sequence(1, *range(9))
    kv.allocate(first, 9)
    kv.publish(first, 9)
    kv.check_invariants()
    assert kv.find_prefix(sequence(2, *range(20, 29))) == []
    assert kv.find_prefix(sequence(3, 0, 1, 2, 3, 30, 31, 32, 33, 34)) in ([], first.block_table[:1])


def test_another_revision_of_a_model_shares_nothing() -> None:
    """The revision is part of the key."""
    kv = KVCacheManager(20, 4)
    first = LiveRequest(make_record(1, PROMPT), 100, 0.0).sequences[0]
    kv.allocate(first, len(PROMPT))
    kv.publish(first, len(PROMPT))
    twin = LiveRequest(make_record(2, PROMPT), 100, 0.0).sequences[0]
    other = LiveRequest(make_record(3, PROMPT, model_revision="r2"), 100, 0.0).sequences[0]
    assert len(kv.find_prefix(twin)) == 4
    assert kv.find_prefix(other) == []


def test_what_was_found_before_is_looked_at_again() -> None:
    """A head that is looked up in each step sees what was given up, published anew or added in between."""
    kv = KVCacheManager(20, 4)
    twin, asking, other = (LiveRequest(make_record(counter, PROMPT), 40, 0.0).sequences[0] for counter in (1, 2, 3))
    table = kv.allocate(twin, 20)
    kv.publish(twin, 8)
    assert kv.find_prefix(asking) == list(table[:2])
    kv.publish(twin, 20)
    assert kv.find_prefix(asking) == list(table[:4])
    assert kv.find_prefix(other) == list(table[:4])
    kv.release(twin)
    kv.find_prefix(asking)
    stranger = LiveRequest(make_record(4, [50] * 68), 80, 0.0).sequences[0]
    kv.allocate(stranger, 68)
    # Room was made of the tail.
    assert kv.find_prefix(asking) == list(table[:2])
    kv.flush()
    assert kv.find_prefix(asking) == []
    kv.release(stranger)
    table = kv.allocate(other, 20)
    kv.publish(other, 12)
    assert kv.find_prefix(asking) == list(table[:3])


@pytest.mark.parametrize("digest", [lambda _: b"", lambda data: data[-1:]])
def test_d4_what_was_found_before_and_is_another_now_is_refused(digest: object) -> None:
    """D4: a block that was found, given up, and published with other tokens under the same hash is found no more."""
    kv = KVCacheManager(3, 4, digest)  # type: ignore[arg-type]
    first, asking, other = (
        LiveRequest(make_record(counter, prompt), 20, 0.0).sequences[0]
        for counter, prompt in ((1, (1, 2, 3, 0, 5)), (2, (1, 2, 3, 0, 5)), (3, (4, 5, 6, 0, 5, 6, 7, 8)))
    )
    kv.allocate(first, 4)
    kv.publish(first, 4)
    kv.release(first)
    assert len(kv.find_prefix(asking)) == 1
    kv.allocate(other, 8)
    kv.publish(other, 8)
    assert kv.find_prefix(asking) == []
