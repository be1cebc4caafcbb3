"""What a client gets from a whole cell, in one process and in several."""

from __future__ import annotations

import asyncio
import random

import grpc
import grpc.aio
import pytest
from reference import Reference
from stack import TIMEOUT, Stack, get_load, wait_idle, wait_serving
from stack_client import generate, generate_all, request_for

from octavo.rpc.channel import open_channel
from octavo.rpc.errors import from_rpc_error
from octavo.v1 import inference_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc


def prompts_of(count: int, *, seed: int = 0, longest: int = 120) -> list[list[int]]:
    """Random prompts of every length up to `longest`, special tokens left out."""
    draw = random.Random(seed)
    return [[draw.randrange(3, 270) for _ in range(draw.randint(1, longest))] for _ in range(count)]


@pytest.mark.asyncio
async def test_stream_equals_transformers(stack: Stack, reference: Reference) -> None:
    """Greedy tokens of several prompts at once are those of transformers, one by one."""
    prompts = prompts_of(6)
    outputs = await generate_all(stack, [request_for(prompt, 20) for prompt in prompts])
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.choices[0].token_ids == reference.greedy(prompt, 20)
        assert output.usage.prompt_tokens == len(prompt)


@pytest.mark.asyncio
async def test_unary_equals_stream(stack: Stack) -> None:
    """GenerateOnce gives what the stream gives: tokens, text, end and totals."""
    request = request_for("the sea and the land", 24, n=2, seed=5, sampling=inference_pb2.SamplingConfig(temperature=1))
    streamed = await generate(stack, request)
    async with open_channel(stack.gateway_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        once = await stub.GenerateOnce(inference_pb2.GenerateOnceRequest(request=request))
    assert once.usage == streamed.usage
    for choice, wanted in zip(once.choices, streamed.choices, strict=True):
        assert (list(choice.token_ids), choice.text) == (wanted.token_ids, wanted.text)
        assert choice.finished == wanted.finished


@pytest.mark.asyncio
async def test_chat_runs_on_the_rendered_template(stack: Stack) -> None:
    """A chat gives the same output as its own tokens, and these are the template's."""
    chat = inference_pb2.ChatInput(
        messages=[inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_USER, content="and then?")]
    )
    async with open_channel(stack.gateway_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        tokens = await stub.Tokenize(inference_pb2.TokenizeRequest(chat=chat))
        request = request_for([], 12)
        request.chat.CopyFrom(chat)
        by_chat = await generate(stack, request)
        by_tokens = await generate(stack, request_for(tokens.token_ids, 12))
        text = await stub.Detokenize(
            inference_pb2.DetokenizeRequest(token_ids=tokens.token_ids, skip_special_tokens=False)
        )
    assert by_chat.choices[0].token_ids == by_tokens.choices[0].token_ids
    assert text.text == "<|im_start|>user\nand then?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.asyncio
async def test_models_are_listed_with_their_limits(stack: Stack) -> None:
    """ListModels and GetModel tell name, revision, limits and how many executors are ready."""
    async with open_channel(stack.gateway_address) as channel:
        stub = model_pb2_grpc.ModelServiceStub(channel)
        listed = (await stub.ListModels(model_pb2.ListModelsRequest())).models
        got = (await stub.GetModel(model_pb2.GetModelRequest(name=stack.model.name))).model
    assert list(listed) == [got]
    assert (got.revision, got.vocab_size, got.ready_executors) == (stack.model.revision, 320, 1)
    assert got.max_model_len > 0


@pytest.mark.asyncio
async def test_64_streams_at_once_get_exact_lengths(stack: Stack) -> None:
    """64 requests in one moment each get every token they asked for, and the ledgers are empty again."""
    prompts = prompts_of(64, seed=2)
    lengths = [1 + 7 * index % 50 for index in range(64)]
    requests = [request_for(prompt, length, ignore_eos=True) for prompt, length in zip(prompts, lengths, strict=True)]
    outputs = await generate_all(stack, requests)
    assert [len(output.choices[0].token_ids) for output in outputs] == lengths
    load = await wait_idle(stack)
    assert load.num_desyncs == 0


@pytest.mark.asyncio
async def test_killing_any_client_changes_nobody_else(stack: Stack) -> None:
    """Half of the clients go away at random moments; the others' tokens are what they are alone."""
    draw = random.Random(3)
    prompts = prompts_of(24, seed=3, longest=60)
    survivors = [request_for(prompt, 40, ignore_eos=True) for prompt in prompts[:8]]
    alone = [(await generate(stack, request)).choices[0].token_ids for request in survivors]

    async def leave_early(prompt: list[int], num_events: int) -> None:
        async with open_channel(stack.gateway_address) as channel:
            call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request_for(prompt, 200, ignore_eos=True))
            for _ in range(num_events):
                await call.read()
            call.cancel()

    async with asyncio.timeout(TIMEOUT):
        leavers = [asyncio.create_task(leave_early(prompt, draw.randint(0, 20))) for prompt in prompts[8:]]
        together = await generate_all(stack, survivors)
        await asyncio.gather(*leavers)
    assert [output.choices[0].token_ids for output in together] == alone
    await wait_idle(stack)


@pytest.mark.asyncio
async def test_a_bad_request_names_its_fields_and_disturbs_nobody(stack: Stack) -> None:
    """Every bad field is listed; the running stream beside it is untouched."""
    good = asyncio.create_task(generate(stack, request_for([5, 6, 7], 50, ignore_eos=True)))
    bad = request_for([5, 320, 2**31], 10, n=0, sampling=inference_pb2.SamplingConfig(top_p=float("nan"), min_p=2))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await generate(stack, bad)
    error = from_rpc_error(raised.value)
    assert error.code == grpc.StatusCode.INVALID_ARGUMENT
    fields = {violation.field for violation in error.violations}
    assert fields >= {"n", "sampling.top_p", "sampling.min_p"}
    assert any(field.startswith("token_ids") for field in fields)
    assert len((await good).choices[0].token_ids) == 50


@pytest.mark.asyncio
async def test_a_prompt_at_the_limit_runs_and_one_beyond_is_refused(stack: Stack) -> None:
    """C2: limit - 1 tokens run and get one; limit and limit + 1 are refused with the numbers; the cell lives on."""
    async with open_channel(stack.gateway_address) as channel:
        name = model_pb2.GetModelRequest(name=stack.model.name)
        limit = (await model_pb2_grpc.ModelServiceStub(channel).GetModel(name)).model.max_model_len
    output = await generate(stack, request_for([7] * (limit - 1), ignore_eos=True))
    assert len(output.choices[0].token_ids) == 1
    assert output.choices[0].finished.reason == inference_pb2.FINISH_REASON_LENGTH  # type: ignore[union-attr]
    for length in (limit, limit + 1):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await generate(stack, request_for([7] * length))
        error = from_rpc_error(raised.value)
        assert error.code == grpc.StatusCode.INVALID_ARGUMENT
        assert str(limit) in error.message
    assert (await generate(stack, request_for([7], 1))).usage.completion_tokens == 1


@pytest.mark.asyncio
async def test_n_choices_of_one_seed_differ_and_repeat(stack: Stack) -> None:
    """E10: choices of one request draw different noise; the reported seed repeats all of them."""
    sampling = inference_pb2.SamplingConfig(temperature=1.5)
    first = await generate(stack, request_for([9, 8, 7], 16, n=4, sampling=sampling, ignore_eos=True))
    tokens = [tuple(choice.token_ids) for choice in first.choices]
    assert len(set(tokens)) == 4
    request = request_for([9, 8, 7], 16, n=4, seed=first.started.seed, sampling=sampling, ignore_eos=True)
    noise = [request_for(prompt, 16, ignore_eos=True) for prompt in prompts_of(5, seed=8)]
    again, *_ = await generate_all(stack, [request, *noise])
    assert [tuple(choice.token_ids) for choice in again.choices] == tokens


@pytest.mark.asyncio
@pytest.mark.parametrize("num_top", [0, 1, 20])
async def test_logprobs_are_transformers(stack: Stack, reference: Reference, num_top: int) -> None:
    """E11: each token has its logprob under the model and as many alternatives as were asked for, best first."""
    request = request_for([11, 12, 13], 8, ignore_eos=True)
    request.output.top_logprobs = num_top
    choice = (await generate(stack, request)).choices[0]
    wanted = reference.logprobs([11, 12, 13, *choice.token_ids])[2:-1]
    assert len(choice.logprobs) == len(choice.token_ids)
    for token, given, row in zip(choice.token_ids, choice.logprobs, wanted, strict=True):
        assert given.logprob == pytest.approx(row[token].item(), abs=1e-3)
        assert [top.token_id for top in given.top] == row.topk(num_top).indices.tolist()


@pytest.mark.asyncio
async def test_a_deadline_ends_the_request_everywhere(stack: Stack) -> None:
    """A passed deadline is DEADLINE_EXCEEDED for the client and frees the blocks."""
    async with open_channel(stack.gateway_address) as channel:
        request = request_for([5] * 20, 100_000, n=8, ignore_eos=True)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=0.3):
                pass
    assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await wait_idle(stack)


@pytest.mark.asyncio
async def test_a_unary_client_that_leaves_frees_its_blocks(stack: Stack) -> None:
    """B2: cancelling GenerateOnce mid-way ends the request in the scheduler."""
    async with open_channel(stack.gateway_address) as channel:
        request = request_for([5] * 20, 100_000, n=8, ignore_eos=True)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.GenerateOnce(inference_pb2.GenerateOnceRequest(request=request))
        async with asyncio.timeout(TIMEOUT):
            while not (await get_load(stack)).num_running:
                await asyncio.sleep(0.01)
        call.cancel()
        await wait_idle(stack)


@pytest.mark.asyncio
async def test_health_names_services_and_model(stack: Stack) -> None:
    """The gateway says SERVING for itself, each service and the model."""
    for service in ("", "octavo.v1.InferenceService", "octavo.v1.ModelService", f"model/{stack.model.name}"):
        await wait_serving(stack.gateway_address, service)
    await wait_serving(stack.scheduler_address)


@pytest.mark.asyncio
async def test_token_ids_above_the_default_message_limit_get_a_clear_answer(stack: Stack) -> None:
    """E16: five MiB of token ids cross the hop and are refused for their number, not by the transport."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await generate(stack, request_for([300] * (5 * 2**19)))
    error = from_rpc_error(raised.value)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
