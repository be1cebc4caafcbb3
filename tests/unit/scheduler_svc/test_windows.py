"""Models whose every layer has a window: blocks that it has passed go to others, prompts may outgrow the pool."""

from __future__ import annotations

import pytest
from cells import Cell, make_cell
from fakes import make_record, make_spec, undisturbed

from octavo.rpc.errors import ServiceError
from scheduler_svc.kv_cache_manager import KVCacheManager
from scheduler_svc.request_record import RequestRecord
from scheduler_svc.sequence import LiveRequest, Sequence

BLOCK, WINDOW, BUDGET = 4, 10, 8
MOST_HELD = -(-(WINDOW - 1 + 2 * BUDGET) // BLOCK) + 1
"""Blocks: the window, and the tokens of two steps."""


def windowed_cell(num_blocks: int, *, depth: int = 2, window: int = WINDOW) -> Cell:
    """A cell of one executor with so many blocks beside the null block."""
    spec = make_spec(
        num_blocks=num_blocks + 1,
        block_size=BLOCK,
        max_num_batched_tokens=BUDGET,
        max_model_len=400,
        window=window,
    )
    return make_cell(spec, depth=depth)


def run(cell: Cell, *records: RequestRecord) -> int:
    """Run requests to their ends, undisturbed in their output; return the most blocks owned on the way."""
    most = 0
    for record in records:
        cell.submit(record)
    while cell.round():
        most = max(most, cell.engine.load().executors[0].owned_blocks)
    for record in records:
        assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0)[0]
    return most


def sequence_of(num_tokens: int, counter: int = 1) -> Sequence:
    """A sequence with a prompt of so many tokens."""
    return LiveRequest(make_record(counter, [token % 50 for token in range(num_tokens)]), 1000, 0.0).sequences[0]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_long_output_holds_its_window(depth: int) -> None:
    """However far it gets, a sequence that writes holds its window, the block it grows into and what is in flight."""
    cell = windowed_cell(60, depth=depth)
    assert run(cell, make_record(1, range(1, 6), max_tokens=150)) <= -(-(WINDOW + depth) // BLOCK) + 1
    whole = windowed_cell(60, depth=depth, window=0)
    assert run(whole, make_record(1, range(1, 6), max_tokens=150)) == -(-154 // BLOCK)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_a_prompt_longer_than_the_pool(depth: int) -> None:
    """It is computed chunk by chunk in the blocks that it was admitted with, and nobody is preempted for it."""
    cell = windowed_cell(MOST_HELD, depth=depth)
    prompt = [token % 50 for token in range(200)]
    assert len(prompt) > 5 * MOST_HELD * BLOCK
    assert run(cell, make_record(1, prompt, max_tokens=30)) <= MOST_HELD
    assert cell.engine.load().num_preemptions == 0


def test_without_a_window_such_a_prompt_is_refused() -> None:
    """It could never run."""
    with pytest.raises(ServiceError, match="need 51 KV blocks"):
        windowed_cell(MOST_HELD, window=0).submit(make_record(1, [token % 50 for token in range(200)], max_tokens=5))


def test_long_prompts_side_by_side() -> None:
    """As many are admitted as can hold their most at once; what is promised to one is taken by no other."""
    cell = windowed_cell(2 * MOST_HELD + 3)
    records = [make_record(n, [(token * n) % 50 for token in range(90)], max_tokens=20) for n in range(1, 6)]
    assert run(cell, *records) <= 2 * MOST_HELD + 3
    assert cell.engine.load().num_preemptions == 0


def test_the_cost_of_an_admission() -> None:
    """At most what a sequence ever holds, less what others hold of its prefix and what the window has passed of it."""
    kv = KVCacheManager(41, BLOCK, window=WINDOW, step_tokens=BUDGET)
    first = sequence_of(120)
    assert kv.blocks_needed(first, 8) == 2
    assert kv.blocks_needed(first, 120) == MOST_HELD
    assert not kv.can_fit(first, 120, reserve=41 - MOST_HELD)
    assert kv.can_fit(first, 120, reserve=40 - MOST_HELD)
    assert len(kv.allocate(first, 120, num_first_tokens=8)) == 2
    assert (kv.num_available_blocks, kv.num_promised_blocks(first)) == (40 - MOST_HELD, MOST_HELD - 2)
    assert kv.num_growable_tokens(first) == 40 * BLOCK
    for computed in range(8, 121, 8):
        first.num_computed_tokens = computed
        kv.publish(first, computed)
        kv.check_invariants()
        assert kv.num_available_blocks >= 40 - MOST_HELD
        if computed < 120:
            kv.append(first, computed + 8)
    # The window of the token at position 120 begins within the block of 111 to 114.
    assert first.block_table[:27] == [0] * 27
    assert (first.num_held_blocks, kv.is_growing(first)) == (3, False)
    kv.release(first)
    second = sequence_of(120, counter=2)
    prefix = kv.find_prefix(second)
    assert prefix[:26] == [0] * 26
    assert len(prefix) == 29
    assert kv.blocks_taken(second, 120, prefix) == 4


def test_a_prefix_needs_the_blocks_of_its_window_alone() -> None:
    """The longest prefix whose last blocks, as far as the window reaches, are there, whatever became of the others."""
    kv = KVCacheManager(40, BLOCK, window=WINDOW)
    first = sequence_of(60)
    kv.allocate(first, 60)
    blocks = list(first.block_table)
    first.num_computed_tokens = 60
    kv.publish(first, 60)
    kv.release(first)
    assert kv.find_prefix(sequence_of(60, 2)) == [0] * 11 + blocks[11:14]
    # A window of 10 before position 56 begins at 47: block 11 is needed.
    for gone, length, num_null in ((5, 14, 11), (13, 13, 10), (11, 11, 8), (9, 9, 6), (7, 5, 2)):
        kv._cache.forget(blocks[gone])
        kv._pool.unkeep(blocks[gone])
        assert kv.find_prefix(sequence_of(60, 3)) == [0] * num_null + blocks[num_null:length], gone
    kv.check_invariants()


def test_what_does_not_write_to_the_cache_gives_its_blocks_back_too() -> None:
    """Publishing and passing have one rhythm; a request that opts out of the first takes part in the second."""
    cell = windowed_cell(60)
    record = make_record(1, [token % 50 for token in range(100)], max_tokens=100, writes_cache=False)
    assert run(cell, record) <= MOST_HELD
    assert cell.engine.load().executors[0].cached_blocks == 0
    assert run(cell, make_record(2, record.prompt_token_ids, max_tokens=2)) <= MOST_HELD
    assert cell.engine.load().num_prefix_hit_tokens == 0


def test_preemption_begins_behind_what_is_cached() -> None:
    """A sequence that must give way comes back with its window from the cache, and goes on as if undisturbed."""
    cell = windowed_cell(MOST_HELD, depth=1)
    records = [make_record(n, [(token + n) % 50 for token in range(30)], max_tokens=60) for n in range(1, 5)]
    assert run(cell, *records) <= MOST_HELD
