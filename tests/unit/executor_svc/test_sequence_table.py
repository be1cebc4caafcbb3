"""The sequence table: slots, ends, growth, and that its invariants notice what breaks them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from fakes_executor import make_limits, make_sequence
from hypothesis import given
from hypothesis import strategies as st

from executor_svc.batch import NewSequence, SamplingParams
from executor_svc.sampler_state import BadWords, SamplerState, WantedPrompt
from executor_svc.sequence_state import ENDED, UNKNOWN, SequenceTable

PENALIZED = SamplingParams(temperature=1.0, repetition_penalty=1.5, presence_penalty=0.1)
OPTIONED = replace(
    PENALIZED, bias_token_ids=(4, 2), bias_values=(1.0, -1.0), bad_words=((3,), (7, 9, 8), (9, 1)), prompt_logprobs=2
)


def _append(table: SequenceTable, handle: int, token_id: int) -> None:
    table.append_tokens(table.slots([handle]), np.array([token_id]))


def test_life_of_a_stay() -> None:
    """A handle is unknown, then has a slot, then has ended, and is unknown again once released; its slot is used
    again.
    """
    table = SequenceTable(make_limits(max_num_seqs=1))
    assert table.slots([1]).tolist() == [UNKNOWN]
    table.add(make_sequence(1, [5], max_tokens=1))
    assert table.slots([1, 2]).tolist() == [0, UNKNOWN]
    _append(table, 1, 9)
    assert table.slots([1, 2]).tolist() == [ENDED, UNKNOWN]
    assert (len(table), 1 in table) == (0, True)
    table.add(make_sequence(2, [5]))
    assert table.slots([2]).tolist() == [0]
    table.release([1, 2, 3])
    assert (table.slots([1, 2]).tolist(), 1 in table) == ([UNKNOWN, UNKNOWN], False)
    table.check_invariants()


def test_a_slot_brings_nothing_from_its_last_stay() -> None:
    """A sequence in a used slot has no blocks, computed tokens, counts or masks but its own."""
    table = SequenceTable(make_limits(max_num_seqs=1))
    table.add(make_sequence(1, [5, 6, 7], sampling=OPTIONED, min_tokens=5, stop_token_ids=(1,)))
    assert table.sampler.slots_with_more == {0}
    assert table.append_blocks(0, np.array([3, 4]))
    table.num_computed_tokens[0] = 2
    table.check_invariants()
    table.end(1)
    table.add(make_sequence(2, [9]))
    assert (table.num_computed_tokens[0], table.num_blocks[0], table.block_tables[0].any()) == (0, 0, False)
    assert not table.sampler.slots_with_more
    table.check_invariants()


def test_block_table_bound() -> None:
    """A table takes as many blocks as max_model_len needs and not one more."""
    table = SequenceTable(make_limits(block_size=4, max_model_len=10))
    table.add(make_sequence(1, [5]))
    assert table.append_blocks(0, np.array([1, 2, 3]))
    assert not table.append_blocks(0, np.array([4]))
    assert table.num_blocks[0] == 3


def test_record_follows_the_tokens() -> None:
    """record gives what a NewSequence would carry now: the prompt's boundary stays, sampled tokens are output."""
    table = SequenceTable(make_limits())
    first = make_sequence(1, [5, 6], choice=2, sampling=PENALIZED)
    table.add(first)
    _append(table, 1, 9)
    _append(table, 1, 8)
    assert table.record(1) == replace(first, token_ids=(5, 6, 9, 8))
    table.check_invariants()


def test_growth_keeps_everything() -> None:
    """When more stays come than there are slots, the table doubles and every stay keeps its state."""
    table = SequenceTable(make_limits(max_num_seqs=2))
    for handle in range(1, 6):
        table.add(make_sequence(handle, [handle, handle], sampling=OPTIONED, min_tokens=3, stop_token_ids=(handle,)))
        table.append_blocks(int(table.slots([handle])[0]), np.array([handle]))
        _append(table, handle, 30 + handle)
    assert len(table) == 5
    for handle in range(1, 6):
        assert table.record(handle).token_ids == (handle, handle, 30 + handle)
    table.check_invariants()


@pytest.mark.parametrize(
    ("sampling", "penalized"),
    [
        (SamplingParams(temperature=0), set()),
        (SamplingParams(temperature=0, repetition_penalty=1.1), {0}),
        (SamplingParams(temperature=0, presence_penalty=0.5), {0}),
        (SamplingParams(temperature=0, frequency_penalty=-0.5), {0}),
    ],
)
def test_only_who_uses_penalties_is_penalized(sampling: SamplingParams, penalized: set[int]) -> None:
    """Any one penalty marks its slot, until the sequence is gone."""
    state = SamplerState(1)
    state.add(0, make_sequence(1, [1, 2, 2, 3], num_prompt_tokens=2, sampling=sampling))
    assert state.penalized == penalized
    state.remove(0)
    assert not state.penalized


def test_min_tokens_is_a_length() -> None:
    """Stop tokens are kept with the length, prompt included, from which on they may be sampled, however much of the
    output is there.
    """
    state = SamplerState(2)
    state.add(0, make_sequence(1, [9, 9, 9], num_prompt_tokens=1, min_tokens=4, stop_token_ids=(1,)))
    state.add(1, make_sequence(2, [9] * 7, num_prompt_tokens=3, min_tokens=4, stop_token_ids=(1,)))
    assert state.parameters["min_length"].tolist() == [5, 7]
    assert state.stops.slots == {0, 1}


words = st.lists(st.integers(0, 3), min_size=2, max_size=4).map(tuple)


@given(
    bad_words=st.lists(words, min_size=1, max_size=8).map(tuple),
    known=st.lists(st.integers(0, 3), max_size=10),
    added=st.lists(st.integers(0, 3), max_size=20),
)
def test_bad_words_are_those_that_the_output_goes_on_to(
    bad_words: tuple[tuple[int, ...], ...], known: list[int], added: list[int]
) -> None:
    """After every token, grown or built anew, the forbidden tokens are the last ones of the words whose others stand
    at the end of the output.
    """
    grown, output = BadWords(bad_words, known), list(known)
    for token in [None, *added]:
        if token is not None:
            grown.add(token)
            output.append(token)
        completed = {word[-1] for word in bad_words if tuple(output[1 - len(word) :]) == word[:-1]}
        assert grown.completing.tolist() == sorted(completed)
        assert grown.progress == BadWords(bad_words, output).progress


def test_bad_words_of_one_token_are_a_list() -> None:
    """Words of one token are forbidden for good; longer ones alone are followed."""
    state = SamplerState(2)
    state.add(0, make_sequence(1, [7], sampling=SamplingParams(temperature=0, bad_words=((8,), (3,), (8,), (1, 2)))))
    state.add(1, make_sequence(2, [7], sampling=SamplingParams(temperature=0, bad_words=((8,),))))
    assert [state.forbidden.token_ids_of(slot).tolist() for slot in range(2)] == [[3, 8], [8]]
    assert list(state.bad_words) == [0]


def test_bad_words_do_not_begin_in_the_prompt() -> None:
    """A word whose beginning stands at the prompt's end is not looked for there; in the output it is."""
    state = SamplerState(2)
    params = SamplingParams(temperature=0, bad_words=((8, 9),))
    state.add(0, make_sequence(1, [7, 8], sampling=params))
    state.add(1, make_sequence(2, [7, 8], num_prompt_tokens=1, sampling=params))
    assert state.bad_words[0].completing.tolist() == []
    assert state.bad_words[1].completing.tolist() == [9]


def test_an_option_keeps_nothing_where_it_is_not_used() -> None:
    """A plain record leaves its parameters and nothing else."""
    state = SamplerState(1)
    state.add(0, make_sequence(1, [7, 8], sampling=SamplingParams(temperature=1, typical_p=0.5, top_logprobs=3)))
    assert not state.slots_with_more


def _drift_bias(table: SequenceTable) -> None:
    table.sampler.biases.put(0, (4, 2), (1.0, 2.0))


def _drift_words(table: SequenceTable) -> None:
    table.sampler.bad_words[0].add(9)


def _drift_lost_words(table: SequenceTable) -> None:
    del table.sampler.bad_words[0]


def _drift_wanted(table: SequenceTable) -> None:
    table.sampler.wanted_prompts[0] = WantedPrompt(4, 2, 1)


def _drift_typical(table: SequenceTable) -> None:
    table.sampler.parameters["typical_p"][0] = 0.5


def _drift_bias_slot(table: SequenceTable) -> None:
    table.sampler.biases.put(1, (4, 2), (1.0, -1.0))


def _drift_penalties(table: SequenceTable) -> None:
    table.sampler.penalized.remove(0)


def _drift_mask(table: SequenceTable) -> None:
    table.sampler.parameters["min_length"][0] -= 1


def _drift_stops(table: SequenceTable) -> None:
    table.sampler.stops.drop(0)


def _drift_forbidden(table: SequenceTable) -> None:
    table.sampler.forbidden.put(0, (3, 4))


def _drift_parameters(table: SequenceTable) -> None:
    table.sampler.parameters["temperature"][0] = 0.5


def _drift_computed(table: SequenceTable) -> None:
    table.num_computed_tokens[0] = 4


def _drift_blocks(table: SequenceTable) -> None:
    table.block_tables[0, 0] = 0


def _drift_free(table: SequenceTable) -> None:
    table.num_computed_tokens[1] = 1


def _drift_slot(table: SequenceTable) -> None:
    table.sampler.penalized.add(1)


@pytest.mark.parametrize(
    "drift",
    [
        _drift_penalties,
        _drift_stops,
        _drift_forbidden,
        _drift_mask,
        _drift_parameters,
        _drift_computed,
        _drift_blocks,
        _drift_free,
        _drift_slot,
        _drift_bias,
        _drift_words,
        _drift_lost_words,
        _drift_wanted,
        _drift_typical,
        _drift_bias_slot,
    ],
)
def test_invariants_notice_drift(drift: Callable[[SequenceTable], None]) -> None:
    """State that is not the rebuild from the record, or counters that do not fit together, fail the check (invariant
    5).
    """
    table = SequenceTable(make_limits())
    sequence: NewSequence = make_sequence(1, [5, 6, 7], sampling=OPTIONED, min_tokens=5, stop_token_ids=(1,))
    table.add(sequence)
    table.append_blocks(0, np.array([3]))
    table.num_computed_tokens[0] = 3
    _append(table, 1, 9)
    table.check_invariants()
    drift(table)
    with pytest.raises(AssertionError):
        table.check_invariants()
