"""Answers that come whole, sealed where their request was: a byte that changes on the way is found at either end."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest
from gateway_fakes import TIMEOUT, FakeScheduler, running_stack

from octavo.models.prepared import PreparedModel
from octavo.rpc.errors import from_rpc_error
from octavo.rpc.seal import Damaged, SealedAnswers, sealed_request
from octavo.v1 import inference_pb2 as pb


def request_of(method: str) -> Any:
    """A request with one answer."""
    if method == "GenerateOnce":
        return pb.GenerateOnceRequest(
            request=pb.GenerateRequest(text="the cat", stopping=pb.StoppingConfig(max_tokens=4))
        )
    return pb.ScoreRequest(text="the cat", continuations=[pb.Continuation(text="sat")])


@pytest.mark.parametrize("method", ["GenerateOnce", "Score"])
@pytest.mark.asyncio
async def test_a_sealed_request_has_a_sealed_answer(prepared: PreparedModel, method: str) -> None:
    """As it was sent it is whole; with any byte changed, or as another request's answer, it is not. A request that is
    changed on the way is refused, to be sent again; one without a seal has an answer without.
    """
    scheduler = FakeScheduler()
    response_type = pb.GenerateOnceResponse if method == "GenerateOnce" else pb.ScoreResponse
    async with running_stack(prepared, scheduler) as stack:
        ask = stack.channel.unary_unary(f"/octavo.v1.InferenceService/{method}", None, None)
        data = sealed_request(request_of(method))
        answer = await ask(data, timeout=TIMEOUT)

        def read(received: bytes, asked: bytes = data) -> Any:
            return SealedAnswers.to(asked).opened(response_type.FromString)(received)

        assert read(answer).HasField("checksum")
        for place in range(len(answer)):
            changed = read(answer[:place] + bytes([answer[place] ^ 0x10]) + answer[place + 1 :])
            # Where the seal's own tag is another, the rest is what was sent.
            assert isinstance(changed, Damaged) or not changed.HasField("checksum")
        assert isinstance(read(answer, sealed_request(type(request_of(method))())), Damaged)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await ask(data.replace(b"cat", b"car"), timeout=TIMEOUT)
        error = from_rpc_error(raised.value)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DAMAGED_REQUEST")
        assert error.retry_delay
        plain = await ask(request_of(method).SerializeToString(), timeout=TIMEOUT)
        assert not response_type.FromString(plain).HasField("checksum")
