"""Streams that are taken up in the middle: what is told then is what was missing, wherever the stream was lost."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_samples import EOS_ID, byte_level

from gateway.generation import Generation
from gateway.live_request import LiveRequest
from gateway.live_requests import LiveRequests
from gateway.metrics import GatewayMetrics
from gateway.requests import (
    ChoiceEnd,
    ChoiceFinished,
    Delta,
    Event,
    FinishReason,
    OutputParams,
    ResumePosition,
    SamplingParams,
    Started,
    StoppingParams,
    Usage,
)
from gateway.vocabulary import Vocabulary
from octavo.rpc.errors import ServiceError

TOKENIZER = byte_level().tokenizer
VOCABULARY = Vocabulary(
    {index: token for token, index in TOKENIZER.get_vocab(with_added_tokens=True).items()},
    frozenset(index for index, token in TOKENIZER.get_added_tokens_decoder().items() if token.special),
    json.loads(TOKENIZER.to_str())["decoder"],
    TOKENIZER.get_vocab_size(with_added_tokens=True),
)
TEXTS = ("the cat sat 😀 on the mat", "so it goes. STOP and more", "ä" * 9, "a", "tail of a ST")
_counters = itertools.count(1)


def make_request(text: str, output: OutputParams, stop: tuple[str, ...], *, has_end: bool) -> LiveRequest:
    """A request whose one choice has all its tokens, and its end where `has_end`."""
    live = LiveRequests(f"{next(_counters):032x}", lambda: 100.0, GatewayMetrics(["tiny"]))
    tokens = [*TOKENIZER.encode(text).ids, EOS_ID]
    request = live.add(
        label="",
        model="tiny",
        model_revision="r",
        tenant="default",
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(1.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, seed=7, top_logprobs=None),
        stopping=StoppingParams(1000, 0, (EOS_ID,), stop),
        num_choices=1,
        deadline=None,
        traceparent="",
        output=output,
        resume_grace=10.0,
    )
    end = ChoiceEnd(FinishReason.STOP, stop_token_id=EOS_ID)
    request.take_over(0, tokens if has_end else tokens[:-1], None, end if has_end else None)
    return request


def read(request: LiveRequest, position: ResumePosition | None = None) -> list[Event]:
    """All events that a request has now, from a position on."""
    generation = Generation(
        request, VOCABULARY, request.output, lambda choice, kept, found: request.stop_choice(choice, kept, found)
    )
    if position is not None:
        generation.resume_at({0: position})
    events: list[Event] = []
    while batch := generation._take_events():
        events += batch
        if isinstance(batch[-1], Usage):
            break
    return events


def told(events: Sequence[Event]) -> tuple[list[int], str]:
    """The tokens and the text of deltas."""
    deltas = [event for event in events if isinstance(event, Delta)]
    return [token_id for delta in deltas for token_id in delta.token_ids], "".join(delta.text for delta in deltas)


@given(
    st.sampled_from(TEXTS),
    st.sampled_from([(), ("STOP",), ("mat", "ä" * 4)]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_a_stream_lost_anywhere_is_taken_up_there(
    text: str, stop: tuple[str, ...], include_stop: bool, was_whole: bool, seed: int
) -> None:
    """Lost behind any number of tokens, and read in pieces of any size before: both parts together are the whole."""
    output = OutputParams(include_stop=include_stop)
    whole = read(make_request(text, output, stop, has_end=True))
    tokens, full_text = told(whole)
    draw = random.Random(seed)
    # The reader of the lost stream: it had some tokens, and the text that these gave then.
    earlier = make_request(text, output, stop, has_end=False)
    num_tokens = draw.randint(0, len(tokens))
    if was_whole:
        position = ResumePosition(len(tokens), len(full_text.encode()))
        had_tokens, had_text = tokens, full_text
    else:
        record = earlier.choices[0]
        del record.token_ids[num_tokens:]
        had_tokens, had_text = told(read(earlier))
        position = ResumePosition(len(had_tokens), len(had_text.encode()))
    rest = read(make_request(text, output, stop, has_end=True), position)
    rest_tokens, rest_text = told(rest)
    assert [*had_tokens, *rest_tokens] == tokens
    assert had_text + rest_text == full_text
    assert isinstance(rest[0], Started)
    assert [event for event in rest if isinstance(event, ChoiceFinished)] == [
        event for event in whole if isinstance(event, ChoiceFinished)
    ]
    assert rest[-1] == whole[-1]
    for delta in rest:
        if isinstance(delta, Delta):
            assert delta.first_token_index >= len(had_tokens)


@pytest.mark.parametrize(
    "positions",
    [
        {0: ResumePosition(1000, 0)},
        {0: ResumePosition(2, 1000)},
        {0: ResumePosition(len(TOKENIZER.encode("the cat sat 😀").ids), 13)},
        {1: ResumePosition(0, 0)},
    ],
    ids=["tokens", "bytes", "inside a character", "no such choice"],
)
def test_positions_that_cannot_be_are_refused(positions: dict[int, ResumePosition]) -> None:
    """More tokens or text than there are, half a character, a choice that is not there: FAILED_PRECONDITION."""
    request = make_request(TEXTS[0], OutputParams(), (), has_end=True)
    generation = Generation(request, VOCABULARY, request.output, lambda *_: None)

    def resume() -> None:
        generation.resume_at(positions)
        generation._take_events()

    with pytest.raises(ServiceError) as raised:
        resume()
    assert (raised.value.code, raised.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "BAD_POSITION")
