"""When a sequence ends, and what a policy may see of it."""

from __future__ import annotations

import pytest
from fakes import make_record

from scheduler_svc.request_record import ChoiceEnd, ChoiceRecord, FinishReason
from scheduler_svc.sequence import LiveRequest, Sequence

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def make_sequence(max_num_tokens: int = 100, **fields: object) -> Sequence:
    """Return the only choice of a request."""
    return LiveRequest(make_record(**fields), max_num_tokens, 10.0).sequences[0]  # type: ignore[arg-type]


def test_a_stop_token_beats_the_length() -> None:
    """A stop token as the last that max_tokens allows ends the choice with STOP."""
    sequence = make_sequence(prompt=[1, 2, 3], max_num_tokens=5, max_tokens=2, stop_token_ids=[7])
    assert sequence.commit(6) is None
    assert sequence.commit(7) == ChoiceEnd(STOP, 7)


def test_the_length_counts_prompt_and_output() -> None:
    """The limit is on the whole sequence: max_tokens and the model's length have both been put into it."""
    sequence = make_sequence(prompt=[1, 2, 3], max_num_tokens=5)
    assert sequence.commit(7) is None
    assert sequence.commit(7) == ChoiceEnd(LENGTH)


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
def test_min_tokens_are_followed_by_the_first_stop(min_tokens: int) -> None:
    """A stop token ends the choice only after at least min_tokens other tokens."""
    sequence = make_sequence(min_tokens=min_tokens, stop_token_ids=[7])
    ends = [sequence.commit(7) for _ in range(min_tokens + 1)]
    assert ends == [None] * min_tokens + [ChoiceEnd(STOP, 7)]


def test_a_resumed_choice_is_searched_from_its_start() -> None:
    """find_end tells the first end among the committed tokens, wherever it is."""
    record = ChoiceRecord(token_ids=(5, 7, 6))
    assert make_sequence(choices=[record], stop_token_ids=[7]).find_end() == ChoiceEnd(STOP, 7)
    assert make_sequence(choices=[record], stop_token_ids=[9]).find_end() is None
    assert make_sequence(choices=[record], max_num_tokens=6).find_end() == ChoiceEnd(LENGTH)
    assert make_sequence().find_end() is None


def test_age_and_deadline_become_times() -> None:
    """A request arrived `age` seconds ago and is overdue in `remaining_deadline` seconds."""
    view = make_sequence(age=4.0, remaining_deadline=2.5).view
    assert (view.arrival, view.deadline) == (6.0, 12.5)
    assert make_sequence().view.deadline is None


def test_the_view_is_live_and_read_only() -> None:
    """A policy sees the counters as they are, and can set none."""
    sequence = make_sequence(prompt=[1, 2, 3])
    view = sequence.view
    sequence.commit(5)
    assert (view.num_prompt_tokens, view.num_output_tokens) == (3, 1)
    for name in ("num_output_tokens", "arrival", "status", "anything"):
        with pytest.raises(AttributeError):
            setattr(view, name, 0)
