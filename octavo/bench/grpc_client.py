"""Octavo's own API as a target: raw stubs, since every layer between costs time that the server is charged with."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio

from octavo.bench.records import BenchError, BenchRequest, Record, RequestFailed
from octavo.bench.target import Clock, GenerationOptions, TargetInfo
from octavo.client.errors import START_HINT
from octavo.rpc.channel import open_channel
from octavo.rpc.errors import ServiceError, from_rpc_error
from octavo.terminal.api_key import API_KEY_HINT
from octavo.v1 import inference_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc

_ASK_SECONDS = 20.0


def message_of(request: BenchRequest, options: GenerationOptions, model: str = "") -> inference_pb2.GenerateRequest:
    """Return the message that asks for `request`. `model` may stay empty where a gateway serves one."""
    message = inference_pb2.GenerateRequest(
        model=model,
        sampling=inference_pb2.SamplingConfig(temperature=options.temperature),
        stopping=inference_pb2.StoppingConfig(max_tokens=request.max_tokens, ignore_eos=options.ignore_eos),
    )
    if not isinstance(request.prompt, str):
        message.token_ids.ids.extend(request.prompt)
    elif options.is_chat:
        message.chat.messages.add(role=inference_pb2.CHAT_ROLE_USER, content=request.prompt)
    else:
        message.text = request.prompt
    return message


class GrpcTarget:
    """One or more gateways; requests go to them in turn, each over one connection."""

    def __init__(
        self,
        addresses: Sequence[str],
        options: GenerationOptions,
        clock: Clock,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        """`addresses` are host:port; `metadata` goes with each call, for a key. Make it on the event loop."""
        self._metadata = tuple(metadata)
        self._addresses = tuple(addresses)
        self._options = options
        self._clock = clock
        self._channels = [open_channel(address) for address in addresses]
        self._stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in self._channels]
        self._model = options.model

    async def describe(self) -> TargetInfo:
        """Return the model. Raises BenchError where a gateway is not there or serves another."""
        found = [
            await self._find_model(address, channel)
            for address, channel in zip(self._addresses, self._channels, strict=True)
        ]
        model = found[0]
        self._model = model.name
        for address, other in zip(self._addresses, found, strict=True):
            if (other.name, other.revision) != (model.name, model.revision):
                raise BenchError(f"--address: {address} serves another model or revision than {self._addresses[0]}")
        return TargetInfo(
            protocol="grpc",
            address=",".join(self._addresses),
            api="chat" if self._options.is_chat else "completions",
            model=model.name,
            revision=model.revision,
            max_model_len=model.max_model_len,
        )

    async def encode(self, text: str) -> Sequence[int] | None:
        """Return token ids; None for a chat, whose template takes text."""
        if self._options.is_chat:
            return None
        return list((await self._tokenize(text)).token_ids)

    async def count_tokens(self, text: str) -> int | None:
        """Return the tokens of the prompt, template included."""
        return len((await self._tokenize(text)).token_ids)

    async def stream(self, request: BenchRequest, record: Record) -> None:
        """Generate. Raises RequestFailed with the gRPC code as status."""
        message = message_of(request, self._options, self._model)
        stub = self._stubs[record.index % len(self._stubs)]
        clock, stamps, delta_tokens = self._clock, record.stamps, record.delta_tokens
        is_whole = False
        call = stub.Generate(message, timeout=self._options.timeout, metadata=self._metadata)
        try:
            # read() costs less than iteration, which puts a generator of its own between.
            while (event := await call.read()) is not grpc.aio.EOF:
                now = clock()
                if num_tokens := len(event.delta.token_ids):
                    stamps.append(now)
                    delta_tokens.append(num_tokens)
                elif event.HasField("usage"):
                    record.output_tokens = event.usage.completion_tokens
                    record.is_counted_by_server = is_whole = True
                elif event.HasField("started"):
                    record.prompt_tokens = event.started.prompt_tokens
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc_error(rpc_error)
            raise RequestFailed(error.code.name, f"{error.reason}: {error.message}") from None
        finally:
            if not is_whole:
                record.output_tokens = sum(delta_tokens)
                record.is_counted_by_server = True
            # A cancelled reader leaves the call alive, and the server at work.
            call.cancel()
        if not is_whole:
            raise RequestFailed("BROKEN_STREAM", "the stream ended well but without Usage")

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels:
            await channel.close()

    async def _tokenize(self, text: str) -> inference_pb2.TokenizeResponse:
        # A pool of text must not carry the BOS that a prompt would get by itself.
        request = inference_pb2.TokenizeRequest(model=self._model)
        if self._options.is_chat:
            request.chat.messages.add(role=inference_pb2.CHAT_ROLE_USER, content=text)
        else:
            request.text = text
            request.add_special_tokens = False
        try:
            answer: inference_pb2.TokenizeResponse = await self._stubs[0].Tokenize(
                request, timeout=_ASK_SECONDS, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise _unusable(self._addresses[0], from_rpc_error(error)) from None
        return answer

    async def _find_model(self, address: str, channel: grpc.aio.Channel) -> model_pb2.Model:
        request = model_pb2.ListModelsRequest(page_size=1000)
        try:
            answer = await model_pb2_grpc.ModelServiceStub(channel).ListModels(
                request, timeout=_ASK_SECONDS, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise _unusable(address, from_rpc_error(error)) from None
        models = {model.name: model for model in answer.models}
        wanted = self._options.model or (next(iter(models)) if len(models) == 1 else "")
        if wanted not in models:
            raise BenchError(f"--model: {address} serves {', '.join(models) or 'nothing'}: name one of these")
        model: model_pb2.Model = models[wanted]
        if not model.ready_executors:
            raise BenchError(
                f"{address} has no executor ready for {model.name}", "it may be starting: wait for it, then repeat"
            )
        if self._options.is_chat and not model.supports_chat:
            raise BenchError(f"--api chat: {model.name} has no chat template; use --api completions")
        return model


def _unusable(address: str, error: ServiceError) -> BenchError:
    if error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return BenchError(
            f"no gateway answers at {address} ({error.code.name})",
            f"{START_HINT}, --address HOST:PORT names another place",
        )
    hint = API_KEY_HINT if error.code is grpc.StatusCode.UNAUTHENTICATED else None
    return BenchError(f"{address} cannot be measured: {error.code.name}: {error.message}", hint)
