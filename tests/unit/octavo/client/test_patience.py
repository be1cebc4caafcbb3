"""A request that has not begun: who is asked again for it, and for how long."""

from __future__ import annotations

import threading

import grpc
import pytest
from client_fakes import NO_EXECUTOR, STARTED, TIMEOUT, Face, answer, deltas_of, fail, reply, serving

from octavo.client import Client, UnavailableError
from octavo.client.patience import LAST_PAUSE, Patience
from octavo.rpc.errors import ServiceError
from octavo.v1 import inference_pb2 as pb

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
AWAY = ServiceError(UNAVAILABLE, "UNAVAILABLE", "cannot connect to the gateway at h:1: connection refused")
LOST = ServiceError(UNAVAILABLE, "UNAVAILABLE", "the connection to the gateway at h:1 was lost: reset")
BUSY = ServiceError(UNAVAILABLE, "NO_EXECUTOR", "no executor is ready", retry_delay=1.5)


class Clock:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def patience(clock: Clock, num_addresses: int = 1, *, seconds: float = 30.0, is_known: bool = False) -> Patience:
    """Of a request to so many addresses."""
    return Patience(seconds, lambda: num_addresses, lambda: is_known, clock)


def test_who_was_never_there_is_asked_once_at_each_address() -> None:
    """A wrong address is told at once."""
    each = patience(Clock(), 3)
    assert [each.pause_after(AWAY) for _ in range(3)] == [0.0, 0.0, None]
    assert patience(Clock()).pause_after(AWAY) is None


@pytest.mark.parametrize("first", [LOST, BUSY], ids=["lost", "busy"])
def test_a_cell_that_was_there_is_waited_for(first: ServiceError) -> None:
    """Once it has answered, were it by a refusal, or a connection was lost: with pauses, until the time is over."""
    clock = Clock()
    each = patience(clock, 2)
    assert each.pause_after(first) == 0.0
    num_tries = 0
    while (pause := each.pause_after(AWAY)) is not None:
        assert 0 < pause <= LAST_PAUSE
        clock.now += pause
        num_tries += 1
    assert num_tries >= 30 / LAST_PAUSE
    assert 79 <= clock.now <= 80


def test_a_known_cell_may_be_away_for_a_while() -> None:
    """A client that has had an answer before waits for a gateway that is not there at the moment."""
    assert patience(Clock(), is_known=True).pause_after(AWAY) is not None


def test_a_delay_that_is_told_is_kept() -> None:
    """Who says when to come again is asked then and not before; what would be too late is not waited for."""
    clock = Clock()
    each = patience(clock, seconds=4.0)
    assert [each.pause_after(BUSY), each.pause_after(BUSY)] == [1.5, 1.5]
    clock.now += 3.0
    assert each.pause_after(BUSY) is None


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL])
def test_other_errors_are_final(code: grpc.StatusCode) -> None:
    """A full cell is its caller's to deal with, and a fault stays one."""
    assert patience(Clock(), 3, is_known=True).pause_after(ServiceError(code, "R", "no", retry_delay=1.0)) is None


def test_a_stream_waits_until_somebody_can_run_it(face: Face) -> None:
    """More refusals than gRPC tries by itself, then a stream: its reader sees a pause."""
    refuse = fail(UNAVAILABLE, *NO_EXECUTOR, retry_delay=0.05)
    with serving(*[refuse] * 8, answer("a", "b")) as gateway:
        deltas, _ = face.read(gateway.address, "x")
    assert [delta.text for delta in deltas] == ["a", "b"]
    assert len(gateway.requests) == 9


def test_a_whole_answer_waits_too(face: Face) -> None:
    """GenerateOnce is asked again in the same way, within the caller's timeout."""
    refuse = fail(UNAVAILABLE, *NO_EXECUTOR, retry_delay=0.05)
    whole = reply(pb.GenerateOnceResponse(started=STARTED))
    with serving(*[refuse] * 8, whole) as gateway:
        assert face.call(gateway.address, "complete", "x").started.request_id == STARTED.request_id
    assert len(gateway.requests) == 9
    late = fail(UNAVAILABLE, *NO_EXECUTOR, retry_delay=60.0)
    with serving(late) as gateway, pytest.raises(UnavailableError, match="try again in 60 s"):
        face.call(gateway.address, "complete", "x", timeout=20)


def test_what_has_started_without_a_token_is_not_asked_again(face: Face) -> None:
    """A second request could repeat what was read: the error is its reader's."""
    lost = fail(UNAVAILABLE, *NO_EXECUTOR, after=list(deltas_of(["a"])), retry_delay=0.05)
    with serving(lost, answer("b")) as gateway, pytest.raises(UnavailableError):
        face.read(gateway.address, "x")
    assert len(gateway.requests) == 1


def test_closing_a_client_ends_the_wait() -> None:
    """A thread that waits for a cell to come back is not left behind."""
    with serving(fail(UNAVAILABLE, *NO_EXECUTOR, retry_delay=25.0)) as gateway:
        client = Client(gateway.address)
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                client.complete("x")
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        assert gateway.began.wait(TIMEOUT)
        client.close()
        thread.join(TIMEOUT)
    assert not thread.is_alive()
    assert errors
