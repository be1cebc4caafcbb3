"""How a client goes on: what it asks where it was interrupted, and when it gives up."""

from __future__ import annotations

import grpc
import pytest

from octavo.client.client_resume import SETTLING, ResumePoint, ask_for_grace
from octavo.client.patience import FIRST_PAUSE, LAST_PAUSE
from octavo.client.types import Delta, Started
from octavo.rpc.errors import ServiceError
from octavo.v1 import inference_pb2

GONE = ServiceError(grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE", "connection reset")
STARTED = Started("r", "m", "v", 7, 1, 100, 0, "token")


class Clock:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def point(clock: Clock, *, grace: int = 30, num_addresses: int = 2, timeout: float | None = None) -> ResumePoint:
    """A request with a grace."""
    request = inference_pb2.GenerateRequest(text="x", request_id="label")
    request.resume_grace.seconds = grace
    return ResumePoint(request, timeout, lambda: num_addresses, clock)


def test_the_rest_is_asked_for_from_what_was_read() -> None:
    """Tokens and bytes of text, choice by choice; nothing else of the request is sent again but its label."""
    resumed = point(Clock())
    assert resumed.request().text == "x"
    for event in (STARTED, Delta(0, 0, "ä", (5,), ()), Delta(1, 0, "", (6,), ()), Delta(0, 1, "b", (7, 8), ())):
        resumed.take(event)
    expected = inference_pb2.GenerateRequest(request_id="label")
    expected.resume.token = "token"
    expected.resume.positions.add(choice=0, num_tokens=3, text_bytes=3)
    expected.resume.positions.add(choice=1, num_tokens=1)
    assert resumed.request() == expected


def test_it_tries_for_the_grace_and_then_gives_up() -> None:
    """At the next address at once, then with pauses that grow to a bound, until the grace since the loss is over."""
    clock = Clock()
    resumed = point(clock)
    resumed.take(STARTED)
    assert resumed.pause_after(GONE) == 0.0
    for _ in range(20):
        pause = resumed.pause_after(GONE)
        assert pause is not None
        assert FIRST_PAUSE / 2 <= pause <= LAST_PAUSE
        clock.now += 1.4
    clock.now += 2.1
    assert resumed.pause_after(GONE) is None


def test_what_is_read_begins_the_grace_anew() -> None:
    """A stream that is lost now and then for hours is taken up each time."""
    clock = Clock()
    resumed = point(clock)
    resumed.take(STARTED)
    for index in range(10):
        assert resumed.pause_after(GONE) == 0.0
        clock.now += 29
        assert resumed.pause_after(GONE) is not None
        resumed.take(Delta(0, index, "", (1,), ()))


@pytest.mark.parametrize(
    "error",
    [
        ServiceError(grpc.StatusCode.ABORTED, "TAKEN_UP", ""),
        ServiceError(grpc.StatusCode.INTERNAL, "POISON", ""),
        ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE", ""),
        ServiceError(grpc.StatusCode.CANCELLED, "CANCELLED_BY_OPERATOR", ""),
    ],
    ids=lambda error: error.reason,
)
def test_decisions_about_the_request_are_final(error: ServiceError) -> None:
    """What somebody decided is not asked again."""
    resumed = point(Clock())
    resumed.take(STARTED)
    assert resumed.pause_after(error) is None


def lost_for_good(clock: Clock) -> ResumePoint:
    """A request of which some was read, that no one in the cell holds any more."""
    resumed = point(clock)
    for event in (STARTED, Delta(0, 0, "aä", (5, 6), ()), Delta(0, 2, "b", (7,), ())):
        assert resumed.take(event) == event
    error = ServiceError(grpc.StatusCode.NOT_FOUND, "NOTHING_TO_RESUME", "")
    assert resumed.pause_after(GONE) is not None
    assert resumed.pause_after(error) is not None
    assert resumed.request().resume.token == "token"
    clock.now += SETTLING + 0.1
    assert resumed.pause_after(error) is not None
    return resumed


def test_what_nobody_holds_any_more_is_run_again() -> None:
    """After a moment, in which gateways may tell a new scheduler: with its seed, and only what is new is told."""
    resumed = lost_for_good(Clock())
    again = resumed.request()
    assert (again.text, again.seed, again.WhichOneof("input")) == ("x", 7, "text")
    assert resumed.take(STARTED) == STARTED
    assert resumed.take(Delta(0, 0, "a", (5,), ())) is None
    assert resumed.pause_after(GONE) is not None
    position = resumed.request().resume.positions[0]
    assert (position.num_tokens, position.text_bytes) == (1, 1)
    assert resumed.take(Delta(0, 1, "äbc", (6, 7, 8), ())) == Delta(0, 3, "c", (8,), ())
    assert resumed.take(Delta(0, 4, "d", (9,), ())) == Delta(0, 4, "d", (9,), ())


def test_a_second_run_that_writes_something_else_is_an_error() -> None:
    """No token that was given is ever changed: where results depend on the batch the request cannot go on."""
    resumed = lost_for_good(Clock())
    resumed.take(STARTED)
    with pytest.raises(ServiceError) as raised:
        resumed.take(Delta(0, 0, "aä", (5, 99), ()))
    assert (raised.value.code, raised.value.reason) == (grpc.StatusCode.ABORTED, "OUTPUT_CHANGED")


def test_without_a_token_each_address_is_asked_once() -> None:
    """Nothing has begun that could be found again: the request itself is sent to the next. For longer than that only a
    cell is asked that was there; and once anything was told, nobody.
    """
    away = ServiceError(grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE", "cannot connect to the gateway at h:1: refused")
    resumed = point(Clock(), num_addresses=3)
    assert [resumed.pause_after(away) for _ in range(3)] == [0.0, 0.0, None]
    assert point(Clock(), num_addresses=1).pause_after(away) is None
    assert point(Clock(), num_addresses=1).pause_after(GONE) is not None
    assert point(Clock(), num_addresses=1, grace=0).pause_after(GONE) is None
    begun = point(Clock())
    begun.take(Started("r", "m", "v", 7, 1, 100, 0, ""))
    assert begun.pause_after(GONE) is None


def test_a_timeout_is_for_all_of_it() -> None:
    """Each further call gets what is left."""
    clock = Clock()
    resumed = point(clock, timeout=10.0)
    clock.now += 4
    assert resumed.timeout() == 6.0
    clock.now += 40
    assert resumed.timeout() == 0.0


def test_who_asks_for_grace_by_default() -> None:
    """Every stream but one with logprobs of the prompt, and what its caller gave stands."""
    request = inference_pb2.GenerateRequest(text="x")
    ask_for_grace(request)
    assert request.resume_grace.seconds == 30
    request = inference_pb2.GenerateRequest(text="x", output=inference_pb2.OutputConfig(prompt_logprobs=1))
    ask_for_grace(request)
    assert not request.HasField("resume_grace")
    request = inference_pb2.GenerateRequest(text="x")
    request.resume_grace.SetInParent()
    ask_for_grace(request)
    assert request.resume_grace.seconds == 0
