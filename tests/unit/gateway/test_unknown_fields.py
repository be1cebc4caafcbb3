"""Fields that this version does not know are refused by number, wherever they stand."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest
from gateway_fakes import TIMEOUT, running_stack
from google.protobuf import wrappers_pb2
from google.protobuf.message import Message
from test_auth import finish, rpcs_of

from gateway.unknown_fields import refuse_unknown_fields
from octavo.models.prepared import PreparedModel
from octavo.rpc.errors import ServiceError, from_rpc_error
from octavo.v1 import admin_pb2, inference_pb2

FIELD_99 = b"\x98\x06\x01"
"""Field 99, a varint: 1."""


def with_unknown(message: Message) -> Any:
    """Return a message with a field that its type does not have, as a newer client would send it."""
    return type(message).FromString(message.SerializeToString() + FIELD_99)


def named_by(message: Message) -> list[str]:
    """Return the fields that are refused."""
    try:
        refuse_unknown_fields(message)
    except ServiceError as error:
        return [violation.field for violation in error.violations]
    return []


def test_the_path_of_an_unknown_field() -> None:
    """The number is named with the message it stands in, in messages, in lists of them, and beside good fields."""
    request = inference_pb2.GenerateRequest(text="a", n=2)
    request.sampling.top_p = 0.5
    assert named_by(request) == []
    assert named_by(with_unknown(request)) == ["99"]
    request.sampling.CopyFrom(with_unknown(request.sampling))
    assert named_by(request) == ["sampling.99"]
    request.sampling.logit_bias.append(inference_pb2.LogitBias(token_id=5))
    request.sampling.logit_bias.append(with_unknown(inference_pb2.LogitBias(token_id=6)))
    request.chat.messages.append(with_unknown(inference_pb2.ChatMessage(content="a")))
    wrapped = inference_pb2.GenerateOnceRequest(request=request)
    assert named_by(wrapped) == [
        "request.chat.messages[0].99",
        "request.sampling.99",
        "request.sampling.logit_bias[1].99",
    ]


def test_only_the_first_few_are_named() -> None:
    """A message full of unknown fields makes an error that still fits into trailers."""
    request = inference_pb2.GenerateRequest()
    for _ in range(1000):
        request.chat.messages.append(with_unknown(inference_pb2.ChatMessage()))
    assert len(named_by(request)) == 8


def test_a_message_without_fields() -> None:
    """A message that has no fields at all refuses any."""
    assert named_by(wrappers_pb2.Int32Value(value=3)) == []
    assert named_by(with_unknown(admin_pb2.GetLoadRequest())) == ["99"]


@pytest.mark.asyncio
async def test_every_rpc_refuses_them(prepared: PreparedModel) -> None:
    """Every rpc, the operator's too, answers INVALID_ARGUMENT with the number, and nothing is run."""
    async with running_stack(prepared) as stack:
        rpcs = rpcs_of(stack) | {
            "ListRequests": (stack.admin.ListRequests, admin_pb2.ListRequestsRequest()),
            "CancelRequest": (stack.admin.CancelRequest, admin_pb2.CancelRequestRequest(request_id="a")),
            "GetLoad": (stack.admin.GetLoad, admin_pb2.GetLoadRequest()),
        }
        for name, (method, request) in rpcs.items():
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await finish(method(with_unknown(request), timeout=TIMEOUT))
            error = from_rpc_error(raised.value)
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT, name
            assert [violation.field for violation in error.violations] == ["99"], name
        assert stack.scheduler.of_kind("submit") == []
