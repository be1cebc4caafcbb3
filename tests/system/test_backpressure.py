"""A full queue, from the scheduler's bound to the client's retry delay."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from stack import in_process, wait_idle
from stack_client import read_stream, request_for

from octavo.models.prepared import PreparedModel
from octavo.rpc.channel import open_channel
from octavo.rpc.errors import ServiceError, from_rpc_error
from octavo.v1 import inference_pb2_grpc


@pytest.mark.asyncio
async def test_c14_clients_are_refused_with_a_time_to_come_again(tiny_model: PreparedModel) -> None:
    """C14: with one row taken and a bound of four, six of ten are refused, told when to try again; the four are served.

    The reserve is on, so the flags of both go through the settings to the engine.
    """
    flags = {"max_num_seqs": "1", "max_waiting": "4", "max_waiting_tokens": "1000", "reserve": "0.2"}
    async with in_process(tiny_model, flags=flags) as cell, open_channel(cell.gateway_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        running = stub.Generate(request_for([5, 6, 7], 1500, ignore_eos=True))
        # Started, and its first token: it has the row.
        while not (await running.read()).HasField("delta"):
            pass

        async def ask(first: int) -> ServiceError | None:
            try:
                output = await read_stream(stub.Generate(request_for([first, 9, 9], 3, ignore_eos=True)))
            except grpc.aio.AioRpcError as error:
                return from_rpc_error(error)
            assert len(output.choices[0].token_ids) == 3
            return None

        asked = [asyncio.create_task(ask(first)) for first in range(10, 20)]
        refused = 0
        for task in asyncio.as_completed(asked):
            error = await task
            if error is None:
                continue
            refused += 1
            assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
            assert error.metadata["max_waiting"] == error.metadata["waiting"] == "4"
            assert error.retry_delay is not None
            assert error.retry_delay > 0
            if refused == 6:
                running.cancel()
        assert refused == 6
        await wait_idle(cell)
