"""Tokens, models and the operator's API, with either client."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from client_fakes import Face, answer, fail, model, reply, request_info, serving

from octavo.client import (
    AdminClient,
    AsyncAdminClient,
    AsyncClient,
    Client,
    ContinuationScore,
    DefaultSampling,
    ExecutorInfo,
    InvalidArgumentError,
    Load,
    Model,
    NotFoundError,
    RequestInfo,
    RequestState,
    Scores,
    TokenCount,
    Usage,
    WaitReason,
)
from octavo.client.client_rpcs import ALL_RPCS
from octavo.v1 import admin_pb2, inference_pb2, model_pb2
from octavo.v1 import inference_pb2 as pb


@pytest.fixture(params=[AdminClient, AsyncAdminClient])
def admin(request: pytest.FixtureRequest) -> Any:
    """Make one call of the operator's API, with either client."""

    def call(address: str, method: str, *args: Any) -> Any:
        if request.param is AdminClient:
            with AdminClient(address) as client:
                return getattr(client, method)(*args)

        async def call_async() -> Any:
            async with AsyncAdminClient(address) as client:
                return await getattr(client, method)(*args)

        return asyncio.run(call_async())

    return call


def test_rpcs_are_those_of_the_contracts() -> None:
    """Path and messages of each rpc are the descriptors', and no rpc of the public contracts is left out."""
    services = [
        service
        for file in (inference_pb2.DESCRIPTOR, model_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR)
        for service in file.services_by_name.values()
    ]
    wanted = {
        (f"/{service.full_name}/{method.name}", method.input_type.full_name, method.output_type.full_name)
        for service in services
        for method in service.methods
    }
    assert wanted == {
        (rpc.path, rpc.request_type.DESCRIPTOR.full_name, rpc.response_type.DESCRIPTOR.full_name) for rpc in ALL_RPCS
    }


def test_tokenize_takes_text_and_chats(face: Face) -> None:
    """The ids come back; what the caller leaves out is unset on the wire, false is a value."""
    with serving(reply(pb.TokenizeResponse(token_ids=[4, 5]))) as gateway:
        assert face.call(gateway.address, "tokenize", "") == [4, 5]
        face.call(gateway.address, "tokenize", [{"role": "user", "content": "x"}], model="m", add_special_tokens=False)
    chat = pb.ChatInput(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="x")])
    assert gateway.requests == [
        pb.TokenizeRequest(text=""),
        pb.TokenizeRequest(model="m", chat=chat, add_special_tokens=False),
    ]
    assert gateway.requests[0].WhichOneof("input") == "text"


def test_scores_come_in_order(face: Face) -> None:
    """Text and token ids go as they are; what comes back has the sum, each token's part, and the totals."""
    answer = pb.ScoreResponse(
        scores=[
            pb.ContinuationScore(logprob=-1.5, token_ids=[4, 5], logprobs=[-1, -0.5], is_greedy=True),
            pb.ContinuationScore(logprob=-2, token_ids=[6], logprobs=[-2]),
        ],
        usage=pb.Usage(prompt_tokens=7),
    )
    with serving(reply(answer)) as gateway:
        scores = face.call(gateway.address, "score", "x", ["ab", [6]], model="m", request_id="mine")
        with pytest.raises(TypeError, match="into a list"):
            face.call(gateway.address, "score", "x", "ab")
        with pytest.raises(InvalidArgumentError) as raised:
            face.call(gateway.address, "score", "x", ["ab", [-1]])
    assert raised.value.violations[0].field == "continuations[1].token_ids.ids"
    assert scores == Scores(
        (ContinuationScore(-1.5, (4, 5), (-1.0, -0.5), True), ContinuationScore(-2.0, (6,), (-2.0,), False)),
        Usage(7, 0),
    )
    parts = [pb.Continuation(text="ab"), pb.Continuation(token_ids=pb.TokenIds(ids=[6]))]
    assert gateway.requests == [pb.ScoreRequest(model="m", text="x", continuations=parts, request_id="mine")]


def test_tokens_are_counted(face: Face) -> None:
    """The number comes with the room there is."""
    with serving(reply(pb.CountTokensResponse(tokens=3, max_model_len=64))) as gateway:
        assert face.call(gateway.address, "count_tokens", "x") == TokenCount(3, 64)
        face.call(gateway.address, "count_tokens", [{"role": "user", "content": "x"}], model="m")
    chat = pb.ChatInput(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="x")])
    assert gateway.requests == [pb.CountTokensRequest(text="x"), pb.CountTokensRequest(model="m", chat=chat)]


@pytest.mark.parametrize("variable", [None, "sk-variable"])
def test_a_key_goes_with_every_call(monkeypatch: pytest.MonkeyPatch, variable: str | None) -> None:
    """The argument wins over OCTAVO_API_KEY; without either nothing is sent; operators' clients send none."""
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    if variable:
        monkeypatch.setenv("OCTAVO_API_KEY", variable)

    async def call_async(address: str, api_key: str | None) -> None:
        async with AsyncClient(address, api_key=api_key) as client:
            await client.detokenize([1])
            async for _ in client.generate("x"):
                pass

    with serving(reply(pb.DetokenizeResponse()), lambda call: iter(())) as gateway:
        for api_key in (None, "sk-argument"):
            gateway.metadata.clear()
            for client_of in (Client, AsyncClient):
                gateway.requests.clear()
                if client_of is AsyncClient:
                    asyncio.run(call_async(gateway.address, api_key))
                else:
                    with Client(gateway.address, api_key=api_key) as client:
                        client.detokenize([1])
                        list(client.generate("x"))
            key = api_key or variable
            sent = [metadata.get("authorization") for metadata in gateway.metadata]
            assert sent == [f"Bearer {key}" if key else None] * 4
        gateway.metadata.clear()
        gateway.requests.clear()
        gateway.behaviours = (reply(admin_pb2.GetLoadResponse()),)
        with AdminClient(gateway.address) as admin:
            admin.get_load()
        assert "authorization" not in gateway.metadata[0]


@pytest.mark.parametrize("api_key", ["", "two words", "schlüssel", "line\n"])
@pytest.mark.parametrize("make", [Client, AsyncClient])
def test_what_is_no_key(make: type[Client | AsyncClient], api_key: str) -> None:
    """A key that metadata cannot carry is refused before anything is sent, and not printed."""
    with pytest.raises(InvalidArgumentError, match="api_key: must be printable") as raised:
        make("127.0.0.1:1", api_key=api_key)
    assert not api_key or api_key not in str(raised.value)


def test_detokenize_gives_the_text(face: Face) -> None:
    """Ids go, text comes; false is a value."""
    with serving(reply(pb.DetokenizeResponse(text="ab"))) as gateway:
        assert face.call(gateway.address, "detokenize", [1, 2], skip_special_tokens=False) == "ab"
    assert gateway.requests == [pb.DetokenizeRequest(token_ids=[1, 2], skip_special_tokens=False)]


def test_list_models_reads_every_page(face: Face) -> None:
    """The next page is asked for by its token until there is none."""
    pages = (
        model_pb2.ListModelsResponse(models=[model("a"), model("b")], next_page_token="b"),
        model_pb2.ListModelsResponse(models=[model("c")]),
    )
    with serving(reply(*pages)) as gateway:
        models = face.call(gateway.address, "list_models")
    assert [each.name for each in models] == ["a", "b", "c"]
    assert [request.page_token for request in gateway.requests] == ["", "b"]


def test_get_model_tells_all_of_it(face: Face) -> None:
    """Every field of the description comes across."""
    with serving(reply(model_pb2.GetModelResponse(model=model("a")))) as gateway:
        got = face.call(gateway.address, "get_model", "a")
    assert got == Model("a", "abc", 64, 320, (2, 3), True, 1, DefaultSampling(0.5, 0.25, 4, 0.125, 1.5))
    assert gateway.requests == [model_pb2.GetModelRequest(name="a")]


def test_list_requests_reads_every_page(admin: Any) -> None:
    """All pages, with times in seconds; a request without a deadline has None."""
    without = request_info("r-2")
    without.ClearField("remaining_deadline")
    pages = (
        admin_pb2.ListRequestsResponse(requests=[request_info("r-1")], next_page_token="t"),
        admin_pb2.ListRequestsResponse(requests=[without]),
    )
    with serving(reply(*pages)) as gateway:
        first, second = admin(gateway.address, "list_requests")
    running = RequestState.RUNNING
    why = WaitReason.NO_FREE_ROW
    assert first == RequestInfo("r-1", "mine", "m", "t", running, 3, 4, 1, 5, ("a:1", "b:2"), 1.5, 0.25, why, 2, -6, 7)
    assert (second.request_id, second.remaining_deadline) == ("r-2", None)
    assert [request.page_token for request in gateway.requests] == ["", "t"]


def test_a_state_of_a_later_version_is_unknown(admin: Any) -> None:
    """A new state in the contract breaks no old client."""
    info = request_info("r")
    info.state = 77  # type: ignore[assignment]
    info.wait_reason = 78  # type: ignore[assignment]
    with serving(reply(admin_pb2.ListRequestsResponse(requests=[info]))) as gateway:
        (got,) = admin(gateway.address, "list_requests")
    assert (got.state, got.wait_reason) == (RequestState.UNKNOWN, WaitReason.UNKNOWN)


def test_get_load_tells_all_of_it(admin: Any) -> None:
    """Every field of the load comes across."""
    executor = admin_pb2.ExecutorInfo(
        address="e:1",
        incarnation="ff",
        model="m",
        running_sequences=1,
        steps_in_flight=2,
        steps=3,
        total_blocks=4,
        free_blocks=5,
        owned_blocks=6,
        cached_blocks=7,
        pinned_blocks=8,
        reserved_blocks=9,
        waiting_sequences=10,
    )
    load = admin_pb2.GetLoadResponse(
        term=1,
        live_requests=2,
        waiting_sequences=3,
        running_sequences=4,
        preemptions=5,
        gateways=6,
        executors=[executor],
    )
    with serving(reply(load)) as gateway:
        assert admin(gateway.address, "get_load") == Load(
            1, 2, 3, 4, 5, 6, (ExecutorInfo("e:1", "ff", "m", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10),)
        )


def test_cancel_request_names_the_request(admin: Any) -> None:
    """The id travels; a request that is not live is NotFoundError."""
    with serving(reply(admin_pb2.CancelRequestResponse())) as gateway:
        assert admin(gateway.address, "cancel_request", "g-1") is None
    assert gateway.requests == [admin_pb2.CancelRequestRequest(request_id="g-1")]
    refuse = fail(grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND", "no live request g-1")
    with serving(refuse) as gateway, pytest.raises(NotFoundError, match="no live request g-1"):
        admin(gateway.address, "cancel_request", "g-1")


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: Client("127.0.0.1:1").tokenize("\ud800"), "text"),
        (lambda: Client("127.0.0.1:1").tokenize("x", model="\ud800"), "model"),
        (lambda: Client("127.0.0.1:1").detokenize([1], model="\ud800"), "model"),
        (lambda: Client("127.0.0.1:1").get_model("\ud800"), "name"),
        (lambda: AdminClient("127.0.0.1:1").cancel_request("\ud800"), "request_id"),
        (lambda: Client("\ud800:1"), "address"),
        (lambda: Client("host\n:1"), "address"),
        (lambda: Client("127.0.0.1:1").complete("x", timeout=math.nan), "timeout"),
        (lambda: list(Client("127.0.0.1:1").generate("x", timeout=math.nan)), "timeout"),
        (lambda: asyncio.run(AsyncClient("127.0.0.1:1").complete("x", timeout=math.nan)), "timeout"),
    ],
)
def test_what_cannot_be_sent_is_named(call: Callable[[], object], field: str) -> None:
    """Text that is no Unicode, and a time that is no number, are typed errors with the argument's name."""
    with pytest.raises(InvalidArgumentError) as raised:
        call()
    assert [violation.field for violation in raised.value.violations] == [field]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Client("127.0.0.1:1").tokenize(b"x"), "a conversation is a list of messages, not bytes"),  # type: ignore[arg-type]
        (lambda: Client("127.0.0.1:1").tokenize([1]), r"messages\[0\] is no message but int"),  # type: ignore[list-item]
        (lambda: Client("127.0.0.1:1").detokenize(b"x"), "whole numbers, not bytes"),
        (lambda: Client("127.0.0.1:1").get_model(5), "name must be text, is int"),  # type: ignore[arg-type]
        (lambda: Client(5), "address must be host:port, is 5"),  # type: ignore[arg-type]
        (lambda: Client("127.0.0.1:1").complete("x", timeout="5"), "timeout takes seconds, is '5'"),  # type: ignore[arg-type]
        (lambda: list(Client("127.0.0.1:1").generate("x", timeout=[])), "timeout takes seconds"),  # type: ignore[arg-type]
    ],
)
def test_an_argument_of_a_wrong_type_is_named(call: Callable[[], object], words: str) -> None:
    """A mistake in the program is a TypeError that says which argument and what it takes."""
    with pytest.raises(TypeError, match=words):
        call()


@pytest.mark.parametrize("timeout", [math.inf, 1e300, 10**400])
def test_a_timeout_that_never_ends_is_none(face: Face, timeout: float) -> None:
    """gRPC would take it for a time that has passed, and answer DEADLINE_EXCEEDED at once."""
    with serving(answer("a")) as gateway:
        assert [delta.text for delta in face.read(gateway.address, "x", timeout=timeout)[0]] == ["a"]
