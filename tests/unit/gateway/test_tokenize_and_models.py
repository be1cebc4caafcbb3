"""Tokenize, Detokenize, ListModels and GetModel over real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from gateway_fakes import MAX_MODEL_LEN, FakeScheduler, Stack, running_stack, text_of
from prepared_samples import MakePrepared
from tokenizer_samples import BOS_ID, END_OF_TURN_ID, EOS_ID, byte_level

from gateway.auth import ApiKeys
from gateway.cell import Cell, Pool
from gateway.model_servicer import ModelServicer
from gateway.served_models import ServedModel, ServedModels
from octavo.models.manifest import GenerationConfig
from octavo.models.prepared import PreparedModel
from octavo.rpc.errors import ServiceError, from_rpc_error
from octavo.v1 import inference_pb2, model_pb2


@pytest_asyncio.fixture
async def stack(make_prepared: MakePrepared) -> AsyncIterator[Stack]:
    """A gateway whose tokenizer adds a BOS."""
    async with running_stack(make_prepared(sample=byte_level(add_bos=True)), FakeScheduler(auto=False)) as running:
        yield running


async def failure_of(call: Any) -> ServiceError:
    """Return the error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return from_rpc_error(raised.value)


@pytest.mark.asyncio
async def test_tokenize(stack: Stack) -> None:
    """Text has the tokens that Generate runs on, chats too; the BOS is left out on request; empty text has none."""
    tokenizer = byte_level(add_bos=True).tokenizer
    for text in ("the cat 😀", "", "a" * 5000):
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        answer = await stack.inference.Tokenize(inference_pb2.TokenizeRequest(text=text))
        assert list(answer.token_ids) == [BOS_ID, *plain]
        request = inference_pb2.TokenizeRequest(text=text, add_special_tokens=False)
        assert list((await stack.inference.Tokenize(request)).token_ids) == plain
    chat = inference_pb2.ChatInput(
        messages=[inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_USER, content="hi")]
    )
    answer = await stack.inference.Tokenize(inference_pb2.TokenizeRequest(chat=chat))
    rendered = "<s>user\nhi</s><s>assistant\n"
    assert list(answer.token_ids) == tokenizer.encode(rendered, add_special_tokens=False).ids


@pytest.mark.asyncio
async def test_tokenize_errors(stack: Stack) -> None:
    """No input, no messages, a template's refusal and an option that is for texts only name their field."""
    system = inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_SYSTEM, content="a")
    for request, field in (
        (inference_pb2.TokenizeRequest(), "input"),
        (inference_pb2.TokenizeRequest(chat=inference_pb2.ChatInput()), "chat.messages"),
        (inference_pb2.TokenizeRequest(chat=inference_pb2.ChatInput(messages=[system, system])), "chat.messages"),
        *(
            (
                inference_pb2.TokenizeRequest(
                    chat=inference_pb2.ChatInput(messages=[system]), add_special_tokens=add_special_tokens
                ),
                "add_special_tokens",
            )
            for add_special_tokens in (False, True)
        ),
    ):
        error = await failure_of(stack.inference.Tokenize(request))
        assert [violation.field for violation in error.violations] == [field]


@pytest.mark.asyncio
async def test_detokenize(stack: Stack) -> None:
    """Tokens become the text that Generate would stream; broken bytes are marks; specials are shown on request."""
    tokenizer = byte_level().tokenizer
    for token_ids in ([], tokenizer.encode("the 😀").ids, tokenizer.encode("a€").ids[:-1], [BOS_ID, 5, EOS_ID]):
        answer = await stack.inference.Detokenize(inference_pb2.DetokenizeRequest(token_ids=token_ids))
        assert answer.text == tokenizer.decode(token_ids)
        request = inference_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=False)
        answer = await stack.inference.Detokenize(request)
        assert answer.text == tokenizer.decode(token_ids, skip_special_tokens=False)
    error = await failure_of(stack.inference.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[5, 320])))
    assert [violation.field for violation in error.violations] == ["token_ids"]


@pytest.mark.asyncio
async def test_detokenize_equals_the_stream(prepared: PreparedModel) -> None:
    """What Detokenize makes of an output's tokens is what its deltas said."""
    async with running_stack(prepared) as stack:
        events = await stack.generate(inference_pb2.GenerateRequest(text="the cat 😀"))
        token_ids = [each for event in events for each in event.delta.token_ids]
        answer = await stack.inference.Detokenize(inference_pb2.DetokenizeRequest(token_ids=token_ids))
        assert answer.text == text_of(events)


@pytest.mark.asyncio
async def test_get_model(make_prepared: MakePrepared) -> None:
    """A model is described whole; what depends on executors is zero while there is none."""
    generation = GenerationConfig(
        eos_token_ids=(END_OF_TURN_ID, EOS_ID), temperature=0.5, top_p=0.25, top_k=3, min_p=0.125
    )
    prepared = make_prepared(generation=generation)
    async with running_stack(prepared, FakeScheduler(auto=False)) as stack:
        model = (await stack.models.GetModel(model_pb2.GetModelRequest(name="tiny"))).model
        assert (model.name, model.revision) == ("tiny", prepared.revision)
        assert (model.max_model_len, model.vocab_size, model.ready_executors) == (MAX_MODEL_LEN, 320, 1)
        assert (list(model.eos_token_ids), model.supports_chat) == ([END_OF_TURN_ID, EOS_ID], True)
        defaults = model.default_sampling
        assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.min_p) == (0.5, 0.25, 3, 0.125)
        assert defaults.repetition_penalty == 1
        stack.scheduler.send_pools([])
        await stack.wait_health(False)
        model = (await stack.models.GetModel(model_pb2.GetModelRequest(name="tiny"))).model
        assert (model.max_model_len, model.ready_executors) == (0, 0)
        error = await failure_of(stack.models.GetModel(model_pb2.GetModelRequest(name="other")))
        assert (error.code, error.metadata) == (grpc.StatusCode.NOT_FOUND, {"served": "tiny"})
        error = await failure_of(stack.models.GetModel(model_pb2.GetModelRequest()))
        assert [violation.field for violation in error.violations] == ["name"]


@pytest.mark.asyncio
async def test_list_models_over_the_wire(stack: Stack) -> None:
    """The one served model is the one page."""
    answer = await stack.models.ListModels(model_pb2.ListModelsRequest())
    assert [model.name for model in answer.models] == ["tiny"]
    assert answer.next_page_token == ""


@pytest.mark.asyncio
async def test_pages_of_models(make_prepared: MakePrepared) -> None:
    """Pages of any size, joined, are all the models by name; a bad size and a bad token are named together."""
    names = [f"model-{index:02d}" for index in range(7)]
    with ThreadPoolExecutor(1) as executor:
        opened = [ServedModel.open(make_prepared(name, chat_template=None), executor) for name in reversed(names)]
        cell = Cell()
        cell.attach()
        revision = opened[0].prepared.revision
        cell.set_pools({names[-1]: Pool(names[-1], revision, 2, 64)})
        servicer = ModelServicer(ServedModels(opened), cell, ApiKeys(None))
        context: Any = SimpleNamespace(invocation_metadata=lambda: ())
        for page_size in (1, 3, 7, 1000, 0):
            listed: list[model_pb2.Model] = []
            token = ""
            while True:
                request = model_pb2.ListModelsRequest(page_size=page_size, page_token=token)
                answer = await servicer.ListModels(request, context)
                assert len(answer.models) <= (page_size or 100)
                listed += answer.models
                token = answer.next_page_token
                if not token:
                    break
            assert [model.name for model in listed] == names
            assert [model.ready_executors for model in listed] == [0] * 6 + [2]
            assert not any(model.supports_chat for model in listed)
        for token in ("é", "!!!!", "abc", "_w=="):
            with pytest.raises(ServiceError) as raised:
                await servicer.ListModels(model_pb2.ListModelsRequest(page_size=1001, page_token=token), context)
            assert [violation.field for violation in raised.value.violations] == ["page_size", "page_token"]


@pytest.mark.asyncio
async def test_one_of_several_models_must_be_named(make_prepared: MakePrepared) -> None:
    """With several models a request without a name is told which there are; with one it means that."""
    with ThreadPoolExecutor(1) as executor:
        first, second = (ServedModel.open(make_prepared(name, chat_template=None), executor) for name in ("b", "a"))
        assert ServedModels([first]).resolve("") is first
        both = ServedModels([first, second])
        assert both.resolve("a") is second
        with pytest.raises(ServiceError, match="several models are served: a, b"):
            both.resolve("")
