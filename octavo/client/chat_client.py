"""A small client of the public API, for programs on the command line."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from octavo.rpc.channel import open_channel
from octavo.rpc.errors import from_rpc_error
from octavo.v1 import inference_pb2, inference_pb2_grpc


@dataclass(frozen=True)
class ChatText:
    """New text, and how many tokens came with it."""

    text: str
    num_tokens: int


@dataclass(frozen=True)
class ChatEnd:
    """The end: "STOP" or "LENGTH", and the totals."""

    reason: str
    prompt_tokens: int
    completion_tokens: int


async def stream_chat(
    address: str, question: str, *, temperature: float | None = None, max_tokens: int | None = None
) -> AsyncIterator[ChatText | ChatEnd]:
    """Ask the only model at `address` (host:port) one question and yield its answer as it is generated.

    Ends with ChatEnd. None means the model's default. Raises ServiceError.
    """
    request = inference_pb2.GenerateRequest(
        chat=inference_pb2.ChatInput(
            messages=[inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_USER, content=question)]
        ),
        sampling=inference_pb2.SamplingConfig(temperature=temperature),
        stopping=inference_pb2.StoppingConfig(max_tokens=max_tokens),
    )
    reason = inference_pb2.FINISH_REASON_UNSPECIFIED
    async with open_channel(address) as channel:
        try:
            async for event in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request):
                match event.WhichOneof("event"):
                    case "delta":
                        yield ChatText(event.delta.text, len(event.delta.token_ids))
                    case "choice_finished":
                        reason = event.choice_finished.reason
                    case "usage":
                        name = inference_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_")
                        yield ChatEnd(name, event.usage.prompt_tokens, event.usage.completion_tokens)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
