"""A test's client: asks, checks the shape of every stream it reads, and returns what came."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc.aio
from stack import TIMEOUT, Stack

from octavo.rpc.channel import open_channel
from octavo.v1 import inference_pb2, inference_pb2_grpc


@dataclass
class ChoiceOutput:
    """What one choice got."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    finished: inference_pb2.ChoiceFinished | None = None


@dataclass
class Output:
    """What one request got."""

    started: inference_pb2.Started
    choices: list[ChoiceOutput]
    usage: inference_pb2.Usage
    prompt: inference_pb2.Prompt = field(default_factory=inference_pb2.Prompt)


def request_for(
    prompt: Sequence[int] | str,
    max_tokens: int | None = None,
    *,
    n: int | None = None,
    seed: int | None = None,
    sampling: inference_pb2.SamplingConfig | None = None,
    **stopping: object,
) -> inference_pb2.GenerateRequest:
    """A request; greedy unless `sampling` says otherwise."""
    request = inference_pb2.GenerateRequest(
        sampling=sampling or inference_pb2.SamplingConfig(temperature=0),
        stopping=inference_pb2.StoppingConfig(max_tokens=max_tokens, **stopping),  # type: ignore[arg-type]
        n=n,
        seed=seed,
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


async def read_stream(
    call: grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse],
) -> Output:
    """Read a whole stream: Started first, the prompt if any, gapless deltas, one end a choice and nothing after it,
    Usage last.
    """
    output: Output | None = None
    text = ""
    async for response in call:
        kind = response.WhichOneof("event")
        if output is None:
            assert kind == "started", f"the stream began with {kind}"
            output = Output(response.started, [], inference_pb2.Usage())
            continue
        assert not output.usage.prompt_tokens, f"{kind} after usage"
        if kind == "delta":
            delta = response.delta
            choice = _choice_of(output, delta.choice)
            assert choice.finished is None, "a delta after the end of its choice"
            assert delta.first_token_index == len(choice.token_ids), "a gap or a repeat"
            choice.token_ids.extend(delta.token_ids)
            choice.text += delta.text
            choice.logprobs.extend(delta.logprobs)
        elif kind == "choice_finished":
            finished = response.choice_finished
            choice = _choice_of(output, finished.choice)
            assert choice.finished is None, "two ends of one choice"
            assert finished.completion_tokens == len(choice.token_ids)
            choice.finished = finished
        elif kind == "prompt":
            assert not output.choices, "the prompt after output"
            assert response.prompt.first_token_index == len(output.prompt.token_ids), "a gap or a repeat in the prompt"
            first = output.prompt.first_token_index
            output.prompt.MergeFrom(response.prompt)
            output.prompt.text = text = text + response.prompt.text
            output.prompt.first_token_index = first
        else:
            assert kind == "usage", f"unexpected {kind}"
            output.usage.CopyFrom(response.usage)
    assert output is not None
    assert output.usage.prompt_tokens, "the stream ended without usage"
    assert all(choice.finished for choice in output.choices), "a choice without an end"
    assert output.usage.completion_tokens == sum(len(choice.token_ids) for choice in output.choices)
    return output


def _choice_of(output: Output, index: int) -> ChoiceOutput:
    while index >= len(output.choices):
        output.choices.append(ChoiceOutput())
    return output.choices[index]


async def generate(stack: Stack, request: inference_pb2.GenerateRequest) -> Output:
    """Run one request on a connection of its own."""
    async with asyncio.timeout(TIMEOUT), open_channel(stack.gateway_address) as channel:
        return await read_stream(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request))


async def generate_all(stack: Stack, requests: Sequence[inference_pb2.GenerateRequest]) -> list[Output]:
    """Run requests at once over one connection."""
    async with asyncio.timeout(2 * TIMEOUT), open_channel(stack.gateway_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        return await asyncio.gather(*(read_stream(stub.Generate(request)) for request in requests))
