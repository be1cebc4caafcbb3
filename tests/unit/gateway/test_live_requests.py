"""The records of live requests: what is applied, what is dropped, what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.ending import CANCELLED
from gateway.live_request import ChoiceRecord, LiveRequest
from gateway.live_requests import LiveRequests
from gateway.logprob_record import RecordError
from gateway.metrics import GatewayMetrics
from gateway.requests import CancelReason, ChoiceEnd, FinishReason, LogprobColumns, SamplingParams, StoppingParams
from octavo.rpc.errors import ServiceError
from octavo.rpc.logprobs import pack_floats, pack_ids, unpack_floats

STOP = ChoiceEnd(FinishReason.STOP, stop_token_id=1)
LENGTH = ChoiceEnd(FinishReason.LENGTH)
FAILURE = ServiceError(grpc.StatusCode.UNAVAILABLE, "GONE", "gone")


def make_live(clock: Callable[[], float] = lambda: 100.0) -> LiveRequests:
    """Return an empty gateway."""
    return LiveRequests("ab" * 16, clock, GatewayMetrics(["tiny"]))


def add(
    live: LiveRequests, *, num_choices: int = 1, max_tokens: int = 100, top_logprobs: int | None = None
) -> LiveRequest:
    """Start a request."""
    sampling = SamplingParams(1.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, seed=7, top_logprobs=top_logprobs)
    return live.add(
        label="same",
        model="tiny",
        model_revision="r",
        tenant="default",
        prompt_token_ids=[1, 2, 3],
        sampling=sampling,
        stopping=StoppingParams(max_tokens, 0, (1,)),
        num_choices=num_choices,
        deadline=None,
        traceparent="",
    )


def apply(live: LiveRequests, request: LiveRequest, first: int, tokens: list[int], **more: Any) -> None:
    """Apply what choice 0 got."""
    choice = more.get("choice", 0)
    live.apply(request.counter, choice, first, tokens, more.get("logprobs"), more.get("end"))
    live.check_invariants()


def columns_of(tokens: list[int], num_top: int) -> LogprobColumns:
    """Return logprobs that tell of what token they are."""
    top = [token + each for token in tokens for each in range(num_top)]
    return LogprobColumns(num_top, pack_floats([-token for token in tokens]), pack_ids(top), pack_floats(top))


def test_counters_are_never_used_twice() -> None:
    """Ids stay unique after requests have ended, whatever the clients call them (B5, E12)."""
    live = make_live()
    seen = set()
    for _ in range(100):
        request = add(live)
        seen.add(request.id)
        live.remove(request, CANCELLED[CancelReason.CLIENT])
        live.remove(request, CANCELLED[CancelReason.CLIENT])
    assert len(seen) == 100
    assert len(live) == 0


def test_known_tokens_are_dropped() -> None:
    """Tokens that come again change nothing; those behind them are taken."""
    live = make_live()
    request = add(live)
    apply(live, request, 0, [5, 6])
    request.changed.clear()
    request.news.clear()
    apply(live, request, 0, [5, 6])
    apply(live, request, 1, [6])
    apply(live, request, 1, [])
    assert not request.changed.is_set()
    assert not request.news
    apply(live, request, 1, [6, 7, 1], end=STOP)
    assert request.choices[0].token_ids == [5, 6, 7, 1]
    assert request.is_complete
    assert request.is_released


@pytest.mark.parametrize(
    ("first", "tokens", "words"),
    [(3, [9], "a gap"), (1, [9], "not those known"), (0, [5, 6, 7, 8, 9], "behind the end")],
)
def test_what_cannot_follow_is_refused(first: int, tokens: list[int], words: str) -> None:
    """A gap, a changed token and a token behind the end are told apart and refused."""
    record = ChoiceRecord(None)
    record.apply(0, [5, 6], None, None)
    if words == "behind the end":
        record.apply(2, [7, 8], None, LENGTH)
    with pytest.raises(RecordError, match=words):
        record.apply(first, tokens, None, None)


def test_end_that_comes_again() -> None:
    """A repeated end is the same end."""
    live = make_live()
    request = add(live, num_choices=2)
    for _ in range(3):
        apply(live, request, 0, [5, 1], end=STOP)
    assert not request.is_complete
    apply(live, request, 0, [5], choice=1, end=LENGTH)
    assert request.is_complete


def test_logprobs_follow_their_tokens() -> None:
    """Logprobs are kept for the tokens that are new, and any slice of them can be read."""
    live = make_live()
    request = add(live, top_logprobs=2)
    apply(live, request, 0, [5, 6], logprobs=columns_of([5, 6], 2))
    apply(live, request, 1, [6, 7, 8], logprobs=columns_of([6, 7, 8], 2))
    logprobs = request.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.slice(0, 4) == columns_of([5, 6, 7, 8], 2)
    assert logprobs.slice(1, 3) == columns_of([6, 7], 2)
    assert unpack_floats(logprobs.slice(3, 4).sampled) == (-8.0,)


@pytest.mark.parametrize(
    "logprobs",
    [None, columns_of([5], 1), columns_of([5, 6], 2), LogprobColumns(2, pack_floats([-5]), b"", pack_floats([5, 6]))],
)
def test_logprobs_of_the_wrong_size(logprobs: LogprobColumns | None) -> None:
    """Logprobs that are missing or do not fit their tokens fail the request rather than shift all behind them."""
    live = make_live()
    request = add(live, top_logprobs=2)
    apply(live, request, 0, [5], logprobs=logprobs)
    assert request.error is not None
    assert request.error.code is grpc.StatusCode.INTERNAL
    assert request.choices[0].token_ids == []


def test_first_token_time_is_kept() -> None:
    """The time of the first token of any choice is noted once."""
    now = [100.0]
    live = make_live(lambda: now[0])
    request = add(live, num_choices=2)
    now[0] = 101.5
    apply(live, request, 0, [5], choice=1)
    now[0] = 103.0
    apply(live, request, 0, [5])
    assert (request.accepted_at, request.first_token_at) == (100.0, 101.5)


def test_frames_after_the_end_change_nothing() -> None:
    """An ended or forgotten request takes no token, error or end any more (B10)."""
    live = make_live()
    request = add(live)
    live.fail(request.counter, FAILURE)
    assert request.is_released
    apply(live, request, 0, [5], end=LENGTH)
    live.finish(request.counter)
    live.confirm(request.counter, 0)
    assert (request.error, request.choices[0].token_ids, request.confirmed) == (FAILURE, [], False)
    live.remove(request, CANCELLED[CancelReason.CLIENT])
    apply(live, request, 0, [5])
    live.fail(request.counter, FAILURE)
    live.fault(request.counter, "nonsense")


def test_finished_and_failed_race() -> None:
    """Of ten thousand pairs of end and error in random order each request ends once, by what came first (B5)."""
    live = make_live()
    draw = random.Random(1)
    for _ in range(10_000):
        request = add(live)
        acts = [
            lambda request=request: live.apply(request.counter, 0, 0, [5, 1], None, STOP),
            lambda request=request: live.fail(request.counter, FAILURE),
            lambda request=request: live.finish(request.counter),
        ]
        ended_by_error = draw.random() < 0.5
        acts = [acts[1], acts[0], acts[2]] if ended_by_error else [acts[0], acts[2], acts[1]]
        for act in acts:
            act()
        assert (request.error is FAILURE) == ended_by_error == (not request.is_complete)
        assert live.find_unended(request.counter) is None
        live.remove(request, CANCELLED[CancelReason.CLIENT])
    live.check_invariants()
    assert live.unended() == []


def test_close_ends_all_and_takes_no_more() -> None:
    """Closed, every live request fails with UNAVAILABLE, a complete one stays complete, and no new one begins."""
    live = make_live()
    running, complete = add(live), add(live)
    apply(live, complete, 0, [1], end=STOP)
    live.close()
    live.check_invariants()
    assert running.error is not None
    assert (running.error.code, running.error.retry_delay) == (grpc.StatusCode.UNAVAILABLE, 1.0)
    assert not running.is_released
    assert complete.error is None
    with pytest.raises(ServiceError, match="shutting down"):
        add(live)


def test_invariants_notice_damage() -> None:
    """check_invariants fails on records that contradict themselves."""

    def too_many(request: LiveRequest) -> None:
        request.choices[0].token_ids = [5] * 101

    def wrong_stop(request: LiveRequest) -> None:
        apply_end(request, [5], STOP)

    def no_token(request: LiveRequest) -> None:
        apply_end(request, [], LENGTH)

    def uncounted(request: LiveRequest) -> None:
        request.choices[0].end = LENGTH

    def apply_end(request: LiveRequest, tokens: list[int], end: ChoiceEnd) -> None:
        request.apply(0, 0, tokens, None, end, 0.0)

    for damage in (too_many, wrong_stop, no_token, uncounted):
        live = make_live()
        damage(add(live))
        with pytest.raises(AssertionError):
            live.check_invariants()


@given(
    output=st.lists(st.integers(2, 50), max_size=30),
    frames=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), max_size=20),
)
def test_any_redelivery_gives_the_same_record(output: list[int], frames: list[tuple[int, int]]) -> None:
    """However frames overlap and repeat, as long as none leaves a gap, the record is the whole output."""
    output = [*output, 1]
    live = make_live()
    request = add(live, top_logprobs=1)
    known = 0
    for back, length in [*frames, (3, len(output) + 3)]:
        start = max(0, known - back)
        stop = min(len(output), start + length)
        end = STOP if stop == len(output) else None
        apply(live, request, start, output[start:stop], logprobs=columns_of(output[start:stop], 1), end=end)
        assert request.error is None
        known = max(known, stop)
    record = request.choices[0]
    assert record.token_ids == output
    assert record.logprobs is not None
    assert record.logprobs.slice(0, len(output)) == columns_of(output, 1)
