"""What gRPC sends again by itself, and what it never does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from client_fakes import (
    NO_EXECUTOR,
    STARTED,
    TIMEOUT,
    Behaviour,
    Call,
    Face,
    answer,
    deltas_of,
    fail,
    reply,
    serving,
)
from ports import take_port

from octavo.client import (
    AdminClient,
    Client,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from octavo.client.client_rpcs import SERVICE_CONFIG
from octavo.rpc.limits import MAX_MESSAGE_BYTES
from octavo.rpc.seal import SealedAnswers
from octavo.v1 import admin_pb2
from octavo.v1 import inference_pb2 as pb

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def test_two_refusals_then_a_stream(face: Face) -> None:
    """UNAVAILABLE before any headers is tried again; the caller sees one whole stream."""
    refuse = fail(UNAVAILABLE, *NO_EXECUTOR)
    with serving(refuse, refuse, answer("a", "b")) as gateway:
        deltas, stream = face.read(gateway.address, "x")
    assert [delta.text for delta in deltas] == ["a", "b"]
    assert stream.usage.completion_tokens == 2
    assert len(gateway.requests) == 3
    assert gateway.requests[0] == gateway.requests[2]


def test_two_refusals_then_a_completion(face: Face) -> None:
    """The same for a call with one answer."""
    refuse = fail(UNAVAILABLE, *NO_EXECUTOR)
    with serving(refuse, refuse, reply(pb.TokenizeResponse(token_ids=[3]))) as gateway:
        assert face.call(gateway.address, "tokenize", "x") == [3]
    assert len(gateway.requests) == 3


def test_no_second_call_once_accepted(face: Face) -> None:
    """After Started the request was accepted, so the failure is the caller's to judge."""
    started = [pb.GenerateResponse(started=STARTED)]
    refuse = fail(UNAVAILABLE, "SHUTTING_DOWN", "the gateway stops", after=started)
    with serving(refuse) as gateway, pytest.raises(UnavailableError, match="the gateway stops"):
        face.read(gateway.address, "x")
    assert len(gateway.requests) == 1


def test_no_second_call_after_a_token(face: Face) -> None:
    """After a delta a second call could repeat it: delta and error reach the caller, the server sees one call."""
    refuse = fail(UNAVAILABLE, "SHUTTING_DOWN", "the gateway stops", after=list(deltas_of(["a", "b"])))
    with serving(refuse) as gateway:
        texts = []
        with pytest.raises(UnavailableError, match="the gateway stops"):
            face.read(gateway.address, "x", into=texts)
    assert texts == ["a", "b"]
    assert len(gateway.requests) == 1


def test_a_call_that_a_closing_server_drops_is_asked_again(face: Face) -> None:
    """gRPC says CANCELLED of what it has not begun when it closes, and gives no reason, as services do. To who has
    cancelled nothing that is one more way of not being there, before the first token and behind it.
    """

    def drop(call: Call) -> Iterator[Any]:
        call.drop()
        yield from ()

    def drop_later(call: Call) -> Iterator[Any]:
        call.accept()
        started = pb.GenerateResponse()
        started.started.CopyFrom(STARTED)
        started.started.resume_token = "token"
        yield started
        yield from deltas_of(["a"])
        call.drop()

    with serving(drop, answer("a", "b")) as gateway:
        deltas, _ = face.read([gateway.address, gateway.address], "x")
        assert [delta.text for delta in deltas] == ["a", "b"]
    with serving(drop, reply(pb.TokenizeResponse(token_ids=[3]))) as gateway:
        assert face.call([gateway.address, gateway.address], "tokenize", "x") == [3]

    def rest(call: Call) -> Iterator[Any]:
        events = list(answer("a", "b")(call))
        yield from (event for event in events if event.delta.text != "a")

    with serving(drop_later, rest) as gateway:
        deltas, _ = face.read(gateway.address, "x")
        assert [delta.text for delta in deltas] == ["a", "b"]
        assert gateway.requests[1].resume.token == "token"
    with serving(drop) as gateway, pytest.raises(UnavailableError, match="is closing and has dropped Tokenize"):
        face.call(gateway.address, "tokenize", "x")


def sealed(message: Any) -> Behaviour:
    """Answer a unary call whole, as a gateway does whose request was sealed."""

    def behave(call: Call) -> Iterator[Any]:
        yield type(message).FromString(SealedAnswers(call.gateway.checksum).seal(message))

    return behave


@pytest.mark.parametrize("method", ["complete", "score"])
def test_a_whole_answer_that_was_changed_on_the_way_is_asked_for_again(face: Face, method: str) -> None:
    """A byte is another one than was sent, or it is another request's answer: nobody gets to see it. A gateway that
    seals nothing is believed.
    """
    arguments: tuple[Any, ...] = ("x",) if method == "complete" else ("x", ["y"])
    whole: Any = pb.GenerateOnceResponse(started=STARTED, choices=[pb.Choice(text="a")])
    damaged: Any = pb.GenerateOnceResponse(started=STARTED, choices=[pb.Choice(text="b")], checksum=1)
    if method == "score":
        whole = pb.ScoreResponse(scores=[pb.ContinuationScore(logprob=-1.0)])
        damaged = pb.ScoreResponse(scores=[pb.ContinuationScore(logprob=-2.0)], checksum=1)
    for last in (sealed(whole), reply(whole)):
        with serving(reply(damaged), reply(damaged), last) as gateway:
            got = face.call(gateway.address, method, *arguments)
        assert len(gateway.requests) == 3
        assert gateway.checksum
        assert got.text == "a" if method == "complete" else got.scores[0].logprob == -1.0


def test_refusals_end_with_the_last_error(face: Face) -> None:
    """A gateway that refuses for good is asked as often as the policy says, and its own words reach the caller."""
    # As a gateway of ours words it: the advice is not said twice.
    refuse = fail(UNAVAILABLE, NO_EXECUTOR[0], f"{NO_EXECUTOR[1]}: try again shortly", retry_delay=1.5)
    words = r"no executor is ready for the model \(try again in 1.5 s\)"
    with serving(refuse) as gateway, pytest.raises(UnavailableError, match=words) as raised:
        face.call(gateway.address, "tokenize", "x")
    assert (raised.value.reason, raised.value.retry_delay) == ("NO_EXECUTOR", 1.5)
    assert len(gateway.requests) == SERVICE_CONFIG["methodConfig"][0]["retryPolicy"]["maxAttempts"]


@pytest.mark.parametrize(
    ("code", "error_class"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidArgumentError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ResourceExhaustedError),
    ],
)
def test_other_errors_are_not_tried_again(face: Face, code: grpc.StatusCode, error_class: type[Exception]) -> None:
    """A wrong request stays wrong, and a full cell is not asked again at once."""
    with serving(fail(code, "R", "no")) as gateway, pytest.raises(error_class):
        face.call(gateway.address, "tokenize", "x")
    assert len(gateway.requests) == 1


def test_a_long_prompt_is_tried_again_too(face: Face) -> None:
    """gRPC's own buffer for retries would silently exclude prompts over 256 KiB."""
    prompt = "a" * (1 << 20)
    with serving(fail(UNAVAILABLE, *NO_EXECUTOR), answer("b")) as gateway:
        deltas, _ = face.read(gateway.address, prompt)
    assert [delta.text for delta in deltas] == ["b"]
    assert len(gateway.requests) == 2


def test_limits_are_those_of_every_hop(face: Face) -> None:
    """An answer beyond gRPC's own 4 MiB passes."""
    large = "a" * (8 << 20)
    assert len(large) < MAX_MESSAGE_BYTES
    with serving(reply(pb.DetokenizeResponse(text=large))) as gateway:
        assert face.call(gateway.address, "detokenize", [1]) == large


def test_a_cancel_is_never_sent_twice() -> None:
    """Sent again after a lost answer it would report that there is no such request; a load can be asked for again."""
    refuse = fail(UNAVAILABLE, "NO_SCHEDULER", "no scheduler is connected")
    with serving(refuse, reply(admin_pb2.CancelRequestResponse())) as gateway, AdminClient(gateway.address) as client:
        with pytest.raises(UnavailableError):
            client.cancel_request("g-1")
        assert len(gateway.requests) == 1
    with serving(refuse, reply(admin_pb2.GetLoadResponse(term=4))) as gateway, AdminClient(gateway.address) as client:
        assert client.get_load().term == 4


def test_a_gateway_that_comes_up_meanwhile_is_found() -> None:
    """A refused connection is tried again as well: the restart of a gateway is no error."""
    port = take_port()
    refused = threading.Event()
    got: list[list[int]] = []

    def ask() -> None:
        with Client(f"127.0.0.1:{port}") as client:
            refused.set()
            got.append(client.tokenize("x"))

    thread = threading.Thread(target=ask)
    thread.start()
    assert refused.wait(TIMEOUT)
    with serving(reply(pb.TokenizeResponse(token_ids=[3])), port=port):
        thread.join(TIMEOUT)
    assert got == [[3]]
