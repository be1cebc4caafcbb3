"""Gateways that die or drain: streams that may be taken up go on at another, others end with an error."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from chaos_cell import EXECUTORS, GATEWAYS, ChaosCell, chaos_cell, leaked_blocks
from reference import Reference
from stack import TIMEOUT, wait_serving
from stack_client import read_stream, request_for
from tcp_proxy import DOWN

import octavo
from octavo.models.prepared import PreparedModel
from octavo.rpc.channel import open_channel
from octavo.rpc.errors import from_rpc_error
from octavo.v1 import inference_pb2_grpc

PROMPTS = [[5 + index, 6, 7] for index in range(8)]
LENGTH = 400
GENERATION: dict[str, Any] = {"max_tokens": LENGTH, "ignore_eos": True, "temperature": 0}


class Readers:
    """Streams of a blocking client, an asyncio client, plain gRPC and HTTP, each with a token already."""

    def __init__(self, cell: ChaosCell) -> None:
        self._cell = cell
        self._has_token = [threading.Event() for _ in PROMPTS]

    def _read_blocking(self, index: int) -> list[int]:
        tokens: list[int] = []
        with octavo.Client(self._cell.client_addresses) as client:
            for delta in client.generate(PROMPTS[index], **GENERATION):
                assert delta.first_token_index == len(tokens)
                tokens.extend(delta.token_ids)
                self._has_token[index].set()
        return tokens

    async def _read_async(self, index: int) -> list[int]:
        tokens: list[int] = []
        async with octavo.AsyncClient(self._cell.client_addresses) as client:
            async for delta in client.generate(PROMPTS[index], **GENERATION):
                assert delta.first_token_index == len(tokens)
                tokens.extend(delta.token_ids)
                self._has_token[index].set()
        return tokens

    async def _read_plain(self, index: int) -> Any:
        async with open_channel(self._cell.address(GATEWAYS[0])) as channel:
            call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
                request_for(PROMPTS[index], LENGTH, ignore_eos=True)
            )

            async def noticed() -> Any:
                async for response in call:
                    if response.HasField("delta"):
                        self._has_token[index].set()
                    yield response

            return await read_stream(noticed())  # type: ignore[arg-type]

    async def _read_http(self, index: int) -> Any:
        url = f"{self._cell.http_url(GATEWAYS[0])}/v1/completions"
        body = {"prompt": PROMPTS[index], "max_tokens": LENGTH, "temperature": 0, "stream": True, "ignore_eos": True}
        async with (
            httpx.AsyncClient(trust_env=False, timeout=TIMEOUT) as client,
            client.stream("POST", url, json=body) as response,
        ):
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._has_token[index].set()
                assert "[DONE]" not in line
                assert '"error"' not in line

    async def start(self) -> list[asyncio.Future[Any]]:
        """Start two of each kind; returns what they will have read, once each has a token."""
        read: list[asyncio.Future[Any]] = []
        for index in range(len(PROMPTS)):
            match index % 4:
                case 0:
                    read.append(asyncio.ensure_future(asyncio.to_thread(self._read_blocking, index)))
                case 1:
                    read.append(asyncio.ensure_future(self._read_async(index)))
                case 2:
                    read.append(asyncio.ensure_future(self._read_plain(index)))
                case _:
                    read.append(asyncio.ensure_future(self._read_http(index)))
        async with asyncio.timeout(TIMEOUT):
            for event in self._has_token:
                await asyncio.to_thread(event.wait, TIMEOUT)
        return read


@pytest.mark.asyncio
@pytest.mark.timeout(300)
async def test_gateways_die_and_drain(tiny_model: PreparedModel, reference: Reference, tmp_path: Path) -> None:
    """Bytes that are changed on the way to a client of octavo's change nothing for its reader. kill -9 on a gateway:
    these clients take their streams up at the other one, token for token, and ask again for what they want whole; a
    plain gRPC stream ends with UNAVAILABLE,
    one over HTTP with a broken connection. F4, SIGTERM of the other: ten streams end well, new ones are refused, exit
    code 0.
    """
    flags = {"gateway": {"drain-grace": "60"}}
    async with chaos_cell(tiny_model, tmp_path, flags=flags, num_executors=1) as cell:
        await _read_through_damage(cell, reference)
        async with octavo.AsyncClient(cell.client_addresses) as client:
            whole = asyncio.create_task(client.complete(PROMPTS[0], **GENERATION))
            read = await Readers(cell).start()
            cell.signal(GATEWAYS[0], signal.SIGKILL)
            async with asyncio.timeout(TIMEOUT):
                results = await asyncio.gather(*read, return_exceptions=True)
                reference.check_greedy(PROMPTS[0], list((await whole).choices[0].token_ids))
        for index, result in enumerate(results):
            match index % 4:
                case 0 | 1:
                    assert isinstance(result, list), result
                    assert len(result) == LENGTH
                    reference.check_greedy(PROMPTS[index], result)
                case 2:
                    assert isinstance(result, grpc.aio.AioRpcError), result
                    assert result.code() is grpc.StatusCode.UNAVAILABLE
                case _:
                    assert isinstance(result, httpx.RemoteProtocolError | httpx.ReadError), result
        await _drain_under_load(cell, reference)
        load = await cell.wait_idle(TIMEOUT)
        assert (load.num_requests, leaked_blocks(load)) == (0, 0)


async def _read_through_damage(cell: ChaosCell, reference: Reference) -> None:
    """Read streams some of whose bytes are changed on the way."""
    proxies = [cell.proxies[name] for name in GATEWAYS]
    async with octavo.AsyncClient(cell.client_addresses) as client, asyncio.timeout(TIMEOUT):
        for index in range(3):
            tokens: list[int] = []
            async for delta in client.generate(PROMPTS[index], **GENERATION):
                assert delta.first_token_index == len(tokens)
                if not tokens:
                    for proxy in proxies:
                        proxy.corrupt(DOWN, 2)
                tokens.extend(delta.token_ids)
            assert len(tokens) == LENGTH
            reference.check_greedy(PROMPTS[index], tokens)
    assert sum(proxy.num_corrupted for proxy in proxies) >= 3


async def _drain_under_load(cell: ChaosCell, reference: Reference) -> None:
    address = cell.address(GATEWAYS[1])
    async with open_channel(address) as channel, open_channel(cell.address(GATEWAYS[1])) as late_channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        prompts = [PROMPTS[index % len(PROMPTS)] for index in range(10)]
        calls = [stub.Generate(request_for(prompt, LENGTH, ignore_eos=True)) for prompt in prompts]
        await asyncio.gather(*(call.read() for call in calls))
        await inference_pb2_grpc.InferenceServiceStub(late_channel).Generate(request_for([3], 1)).read()
        cell.signal(GATEWAYS[1], signal.SIGTERM)
        await wait_serving(address, serving=False)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await read_stream(inference_pb2_grpc.InferenceServiceStub(late_channel).Generate(request_for([3], 1)))
        error = from_rpc_error(raised.value)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
        assert error.retry_delay
        async with asyncio.timeout(TIMEOUT):
            outputs = await asyncio.gather(*(_rest(call) for call in calls))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert len(output) == LENGTH
            reference.check_greedy(prompt, output)
    assert await cell.wait_exit(GATEWAYS[1]) == 0


async def _rest(call: Any) -> list[int]:
    tokens: list[int] = []
    while (response := await call.read()) is not grpc.aio.EOF:
        tokens.extend(response.delta.token_ids)
    return tokens


@pytest.mark.full
@pytest.mark.asyncio
@pytest.mark.timeout(600)
async def test_a_rolling_restart_of_every_service_fails_nothing(
    tiny_model: PreparedModel, reference: Reference, tmp_path: Path
) -> None:
    """SIGTERM to one service after the other, each started again before the next: under load all requests end equal,
    and every exit code is 0.
    """
    stopped = asyncio.Event()
    num_done = 0

    async def load(cell: ChaosCell, prompt: list[int]) -> None:
        nonlocal num_done
        async with octavo.AsyncClient(cell.client_addresses) as client:
            while not stopped.is_set():
                tokens: list[int] = []
                async for delta in client.generate(prompt, **GENERATION):
                    tokens.extend(delta.token_ids)
                assert len(tokens) == LENGTH
                reference.check_greedy(prompt, tokens)
                num_done += 1

    async with chaos_cell(tiny_model, tmp_path) as cell:
        loads = [asyncio.create_task(load(cell, prompt)) for prompt in PROMPTS]
        for name in (*EXECUTORS, cell.scheduler, *GATEWAYS):
            cell.signal(name, signal.SIGTERM)
            assert await cell.wait_exit(name) == 0
            await cell.wait_whole()
        stopped.set()
        async with asyncio.timeout(2 * TIMEOUT):
            await asyncio.gather(*loads)
        assert num_done > len(PROMPTS)
