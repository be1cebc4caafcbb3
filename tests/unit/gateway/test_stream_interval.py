"""Several tokens in one message: what is told when, and that nothing else about an answer changes."""

from __future__ import annotations

import asyncio
import random

import pytest
from gateway_fakes import FakeScheduler, running_stack, text_of, tokens_of
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_samples import EOS_ID, byte_level

from gateway.live_request import LiveRequest
from gateway.live_requests import LiveRequests
from gateway.metrics import GatewayMetrics
from gateway.requests import ChoiceEnd, FinishReason, SamplingParams, StoppingParams
from octavo.models.prepared import PreparedModel
from octavo.v1 import inference_pb2

STOP = ChoiceEnd(FinishReason.STOP, stop_token_id=1)
TEXT = "one two three four five"


def make_live(stream_interval: int) -> LiveRequests:
    """Return an empty gateway."""
    return LiveRequests("ab" * 16, lambda: 100.0, GatewayMetrics(["tiny"]), stream_interval=stream_interval)


def add(live: LiveRequests, *, num_choices: int = 1, top_logprobs: int | None = None) -> LiveRequest:
    """Start a request."""
    return live.add(
        label="",
        model="tiny",
        model_revision="r",
        tenant="default",
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(1.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, seed=7, top_logprobs=top_logprobs),
        stopping=StoppingParams(100, 0, (1,)),
        num_choices=num_choices,
        deadline=None,
        traceparent="",
    )


def told_at(live: LiveRequests, request: LiveRequest, num_tokens: int) -> list[int]:
    """Apply tokens one by one; return the indexes of those at which the reader was told, who reads at once."""
    told = []
    for index in range(num_tokens):
        live.apply_tokens([request.counter], [0], [index], [70])
        if request.changed.is_set():
            told.append(index)
            request.changed.clear()
            request.news.clear()
    return told


def test_the_first_at_once_then_so_many() -> None:
    """The first token is told at once, then every fourth; what is left at the end comes with it."""
    live = make_live(4)
    request = add(live)
    assert told_at(live, request, 12) == [0, 4, 8]
    live.apply(request.counter, 0, 12, [1], None, STOP)
    assert request.changed.is_set()
    assert request.news == {0}
    assert request.choices[0].token_ids == [70] * 12 + [1]


def test_by_default_each_token_is_told() -> None:
    """Without the flag nothing waits."""
    live = make_live(1)
    assert told_at(live, add(live), 5) == [0, 1, 2, 3, 4]


def test_choices_are_counted_apart() -> None:
    """The tokens of one choice hurry none of another's."""
    live = make_live(3)
    request = add(live, num_choices=2)
    live.apply_tokens([request.counter] * 2, [0, 1], [0, 0], [70, 71])
    request.news.clear()
    for index in (1, 2):
        live.apply_tokens([request.counter], [0], [index], [70])
    live.apply_tokens([request.counter], [1], [1], [71])
    assert request.news == set()
    live.apply_tokens([request.counter], [0], [3], [70])
    assert request.news == {0}


@given(data=st.data())
def test_columns_are_as_good_as_single_outputs(data: st.DataObject) -> None:
    """Rows in any order and repetition leave the records that applying each by itself leaves, faults included."""
    seed = data.draw(st.integers(0, 2**32))
    rng = random.Random(seed)
    interval = data.draw(st.integers(1, 4))
    one, other = make_live(interval), make_live(interval)
    pairs = [(add(live, num_choices=2), add(live, top_logprobs=0)) for live in (one, other)]
    counters = [request.counter for request in pairs[0]]
    for _ in range(data.draw(st.integers(1, 25))):
        counter, choice = rng.choice([*counters, 99]), rng.randrange(3)
        index, token_id = rng.randrange(4), rng.choice([70, 71])
        one.apply_tokens([counter], [choice], [index], [token_id])
        other.apply(counter, choice, index, (token_id,), None, None)
        if rng.random() < 0.1:
            for live in (one, other):
                live.apply(counter, choice, index, (1,), None, STOP)
        for mine, its in zip(*pairs, strict=True):
            assert [each.token_ids for each in mine.choices] == [each.token_ids for each in its.choices]
            assert [each.end for each in mine.choices] == [each.end for each in its.choices]
            assert (mine.news, mine.changed.is_set()) == (its.news, its.changed.is_set())
            assert (mine.error is None) == (its.error is None)
            assert mine.confirmed == its.confirmed
    for live in (one, other):
        live.check_invariants()


async def answer(
    prepared: PreparedModel, request: inference_pb2.GenerateRequest, stream_interval: int
) -> list[inference_pb2.GenerateResponse]:
    """Run a request of a model that writes TEXT, its reader always in time; return its events."""
    ids = list(byte_level().tokenizer.encode(TEXT).ids)
    scheduler = FakeScheduler(auto=False, script=lambda submit, choice: [*ids, EOS_ID])
    async with running_stack(prepared, scheduler, stream_interval=stream_interval) as stack:
        reading = asyncio.create_task(stack.generate(request))
        await scheduler.wait_received("submit")
        while not reading.done():
            scheduler.step()
            await asyncio.wait([reading], timeout=0.01)
        return await reading


@pytest.mark.asyncio
@pytest.mark.parametrize("fields", [{}, {"stop": ["three f"]}, {"stop": ["our"], "include_stop": True}])
async def test_the_answer_is_the_same(prepared: PreparedModel, fields: dict[str, object]) -> None:
    """Text, tokens, end and usage do not depend on the interval, stop strings that are met in between included."""
    stopping = inference_pb2.StoppingConfig(**fields)  # type: ignore[arg-type]
    request = inference_pb2.GenerateRequest(text="x", stopping=stopping)
    plain, grouped = await answer(prepared, request, 1), await answer(prepared, request, 5)
    assert text_of(plain) == text_of(grouped) != ""
    assert tokens_of(plain) == tokens_of(grouped)
    for kind in ("choice_finished", "usage"):
        ends = [[getattr(each, kind) for each in events if each.HasField(kind)] for events in (plain, grouped)]
        assert len(ends[0]) == 1
        assert ends[0] == ends[1]
    sizes = [len(each.delta.token_ids) for each in grouped if each.HasField("delta")]
    assert sizes[0] == 1
    assert max(sizes) == 5
    assert sum(each.HasField("delta") for each in plain) > 2 * len(sizes)
