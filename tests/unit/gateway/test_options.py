"""Options of requests over real gRPC, against a scripted scheduler: what each side is told of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from gateway_fakes import MAX_MODEL_LEN, QUICK, FakeScheduler, Stack, running_stack, text_of, tokens_of
from prepared_samples import MakePrepared
from tokenizer_samples import EOS_ID, all_samples, byte_level

from gateway.prompt_reader import MAX_PROMPT_TOKENS
from gateway.server import GatewayServer
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.models.errors import ModelError
from octavo.models.prepared import PreparedModel
from octavo.rpc.errors import ServiceError, from_rpc_error
from octavo.settings import GatewaySettings
from octavo.v1 import inference_pb2, model_pb2

TIMEOUT = 10.0
TEXT = "the cat sat on the mat"


def ids_of(text: str) -> list[int]:
    """Return the tokens of a text."""
    return list(byte_level().tokenizer.encode(text).ids)


def request_of(text: str = TEXT, **fields: Any) -> inference_pb2.GenerateRequest:
    """Return a request for plain text."""
    return inference_pb2.GenerateRequest(text=text, **fields)


async def once(stack: Stack, request: inference_pb2.GenerateRequest) -> inference_pb2.GenerateOnceResponse:
    """Ask for the whole output."""
    wrapped = inference_pb2.GenerateOnceRequest(request=request)
    response: inference_pb2.GenerateOnceResponse = await stack.inference.GenerateOnce(wrapped, timeout=TIMEOUT)
    return response


async def refusal_of(call: Any) -> ServiceError:
    """Return the error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return from_rpc_error(raised.value)


def check_prompt_logprobs(prompt: inference_pb2.Prompt, token_ids: list[int], num_top: int) -> None:
    """One entry per token: nothing of the first, of the others what the fake scheduler says of them."""
    assert len(prompt.logprobs) == len(token_ids)
    assert not prompt.logprobs[0].HasField("logprob")
    assert not prompt.logprobs[0].top
    for token_id, told in zip(token_ids[1:], prompt.logprobs[1:], strict=True):
        assert told.HasField("logprob")
        assert told.logprob == -token_id / 8
        assert [each.token_id for each in told.top] == [token_id + index for index in range(num_top)]


@pytest.mark.asyncio
@pytest.mark.parametrize("num_top", [None, 0, 1])
@pytest.mark.parametrize("echo", [False, True])
async def test_the_prompt_comes_before_the_output(prepared: PreparedModel, echo: bool, num_top: int | None) -> None:
    """E4: echo and prompt logprobs come in events of a bounded size, gapless, before any delta; once, whole."""
    text = TEXT * 30
    token_ids = ids_of(text)
    assert len(token_ids) > 2 * MAX_PROMPT_TOKENS
    request = request_of(text, output=inference_pb2.OutputConfig(echo=echo, prompt_logprobs=num_top), n=2)
    request.stopping.max_tokens = 3
    async with running_stack(prepared) as stack:
        events = await stack.generate(request)
        answer = await once(stack, request)
    kinds = [event.WhichOneof("event") for event in events]
    prompts = [event.prompt for event in events if event.HasField("prompt")]
    assert kinds[1 : 1 + len(prompts)] == ["prompt"] * len(prompts)
    assert tokens_of(events) == token_ids[:3]
    if not echo and num_top is None:
        assert not prompts
        assert not answer.HasField("prompt")
        return
    merged = inference_pb2.Prompt()
    for prompt in prompts:
        assert prompt.first_token_index == len(merged.token_ids)
        assert len(prompt.token_ids) <= MAX_PROMPT_TOKENS
        merged.token_ids.extend(prompt.token_ids)
        merged.logprobs.extend(prompt.logprobs)
        merged.text += prompt.text
    assert list(merged.token_ids) == token_ids
    assert merged.text == (text if echo else "")
    assert answer.prompt == merged
    if num_top is None:
        assert not merged.logprobs
    else:
        check_prompt_logprobs(merged, token_ids, num_top)


@pytest.mark.asyncio
async def test_the_prompt_is_told_as_it_is_computed(prepared: PreparedModel) -> None:
    """Prompt logprobs do not wait for the whole prompt, nor deltas of other choices come between them."""
    scheduler = FakeScheduler(auto=False, prompt_tokens_a_step=4)
    async with running_stack(prepared, scheduler) as stack:
        call = stack.inference.Generate(request_of(output=inference_pb2.OutputConfig(prompt_logprobs=0), n=2))
        await scheduler.wait_received("submit")
        async with asyncio.timeout(TIMEOUT):
            assert (await call.read()).HasField("started")
            scheduler.step()
            assert len((await call.read()).prompt.token_ids) == 5
            scheduler.step()
            assert (await call.read()).prompt.first_token_index == 5
            scheduler.step(40)
            events = []
            while (event := await call.read()) is not grpc.aio.EOF:
                events.append(event)
        assert text_of(events, 0) == TEXT
        assert text_of(events, 1) == TEXT[3:]


@pytest.mark.asyncio
async def test_a_prompt_of_one_token(prepared: PreparedModel) -> None:
    """Of a prompt's only token nothing is known: it has an empty entry, and the scheduler is not asked."""
    output = inference_pb2.OutputConfig(prompt_logprobs=3, echo=True)
    async with running_stack(prepared) as stack:
        answer = await once(stack, request_of("a", output=output))
        (submit,) = stack.scheduler.of_kind("submit")
        assert not submit.sampling.HasField("prompt_logprobs")
        assert answer.prompt.text == "a"
        check_prompt_logprobs(answer.prompt, ids_of("a"), 3)


@pytest.mark.asyncio
async def test_prompt_logprobs_survive_a_lost_scheduler(prepared: PreparedModel) -> None:
    """What is told twice is shown once; once all is told, a new scheduler is not asked for it again."""
    scheduler = FakeScheduler(auto=False, prompt_tokens_a_step=8)
    async with running_stack(prepared, scheduler) as stack:
        request = request_of(output=inference_pb2.OutputConfig(prompt_logprobs=1))
        task = asyncio.create_task(stack.generate(request))
        for counter, steps in ((1, 1), (2, 2), (3, 4)):
            submits = await scheduler.wait_received("submit", counter)
            assert submits[-1].sampling.HasField("prompt_logprobs")
            scheduler.step(steps)
            await scheduler.wait_until(lambda: scheduler.acknowledged == scheduler.sequence)
            await scheduler.stop()
            scheduler.forget()
            scheduler.acknowledged = 0
            await scheduler.start()
        (*_, last) = await scheduler.wait_received("submit", 4)
        assert not last.sampling.HasField("prompt_logprobs")
        scheduler.step(40)
        events = await task
        prompts = [event.prompt for event in events if event.HasField("prompt")]
        merged = inference_pb2.Prompt()
        for prompt in prompts:
            merged.MergeFrom(prompt)
        assert list(merged.token_ids) == ids_of(TEXT)
        check_prompt_logprobs(merged, ids_of(TEXT), 1)
        assert text_of(events) == TEXT


@pytest.mark.asyncio
async def test_output_without_the_prompts_logprobs_is_a_fault(prepared: PreparedModel) -> None:
    """E4: a scheduler that leaves them out does not make an answer with an empty list, and the call does not hang."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler) as stack:
        request = request_of(output=inference_pb2.OutputConfig(prompt_logprobs=1))
        task = asyncio.create_task(refusal_of(once(stack, request)))
        (submit,) = await scheduler.wait_received("submit")
        scheduler.send_outputs(scheduler_pb2.ChoiceOutput(request=submit.request, token_ids=[5]))
        error = await task
        assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "OUTPUT_FAULT")


@pytest.mark.asyncio
@pytest.mark.parametrize("first_token", [5, EOS_ID])
async def test_nothing_is_generated_where_nothing_is_asked_for(prepared: PreparedModel, first_token: int) -> None:
    """max_tokens 0: each choice ends by length without a token, whatever the model would have said first (E4)."""
    scheduler = FakeScheduler(script=lambda submit, choice: [first_token, EOS_ID])
    async with running_stack(prepared, scheduler) as stack:
        request = request_of(n=2, output=inference_pb2.OutputConfig(prompt_logprobs=0, top_logprobs=2, echo=True))
        request.stopping.max_tokens = 0
        events = await stack.generate(request)
        assert [event.WhichOneof("event") for event in events][-3:] == ["choice_finished", "choice_finished", "usage"]
        assert not any(event.HasField("delta") for event in events)
        for event in events[-3:-1]:
            assert event.choice_finished.reason == inference_pb2.FINISH_REASON_LENGTH
            assert event.choice_finished.completion_tokens == 0
        assert events[0].started.max_tokens == 0
        assert (events[-1].usage.prompt_tokens, events[-1].usage.completion_tokens) == (len(ids_of(TEXT)), 0)
        answer = await once(stack, request)
        assert [(choice.text, list(choice.token_ids)) for choice in answer.choices] == [("", [])] * 2
        check_prompt_logprobs(answer.prompt, ids_of(TEXT), 0)
        assert scheduler.of_kind("submit")[0].stopping.max_tokens == 1
        page = await stack.scrape()
        assert page['octavo_completion_tokens_total{model="tiny"}'] == 0


@pytest.mark.asyncio
async def test_the_likeliest_choices_are_returned(prepared: PreparedModel) -> None:
    """best_of ranks by the mean logprob, equals by their order; all tokens are counted, and logprobs are not shown."""
    # The fake scheduler's logprobs fall with the token: -token / 8.
    outputs = [[40, 40], [10], [30, 30, 30], [10, 10], [200]]
    scheduler = FakeScheduler(script=lambda submit, choice: outputs[choice])
    async with running_stack(prepared, scheduler) as stack:
        answer = await once(stack, request_of(n=3, best_of=5))
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert [list(choice.token_ids) for choice in answer.choices] == [[10], [10, 10], [30, 30, 30]]
        assert [choice.finished.choice for choice in answer.choices] == [0, 1, 2]
        assert [choice.text for choice in answer.choices] == [
            byte_level().tokenizer.decode(outputs[choice]) for choice in (1, 3, 2)
        ]
        assert not any(choice.logprobs for choice in answer.choices)
        assert answer.usage.completion_tokens == sum(map(len, outputs))
        request = request_of(best_of=5, output=inference_pb2.OutputConfig(top_logprobs=1))
        (choice,) = (await once(stack, request)).choices
        assert [each.logprob for each in choice.logprobs] == [-10 / 8]


@pytest.mark.asyncio
async def test_best_of_and_streams(prepared: PreparedModel) -> None:
    """A stream cannot know which are best; as many as are returned can be streamed; fewer than n make no sense."""
    async with running_stack(prepared) as stack:
        error = await refusal_of(stack.generate(request_of(best_of=2)))
        assert [violation.field for violation in error.violations] == ["best_of"]
        assert "GenerateOnce" in error.message
        events = await stack.generate(request_of(n=2, best_of=2))
        assert text_of(events, 0) == TEXT
        error = await refusal_of(once(stack, request_of(n=3, best_of=2)))
        assert [violation.field for violation in error.violations] == ["best_of"]


@pytest.mark.asyncio
async def test_stop_strings_among_ranked_choices(prepared: PreparedModel) -> None:
    """A choice that is ranked ends at its stop string, and only what it kept is counted in its mean."""
    outputs = [[5, 300], [6, 46 - 33 + 3, 300, 300]]
    stop = byte_level().tokenizer.decode([16])
    scheduler = FakeScheduler(script=lambda submit, choice: outputs[choice], auto=False)
    async with running_stack(prepared, scheduler) as stack:
        request = request_of(n=1, best_of=2, stopping=inference_pb2.StoppingConfig(stop=[stop]))
        task = asyncio.create_task(once(stack, request))
        await scheduler.wait_received("submit")
        scheduler.step(4)
        answer = await task
        assert list(answer.choices[0].token_ids) == [6, 16]
        assert answer.choices[0].finished.stop_string == stop
        assert answer.usage.completion_tokens == 4


@pytest.mark.asyncio
async def test_the_end_of_a_long_input_is_kept(prepared: PreparedModel) -> None:
    """truncate_prompt_tokens keeps the last tokens of any input, before its length is checked; less is left alone."""
    long = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5] * MAX_MODEL_LEN + [7, 8, 9]))
    async with running_stack(prepared) as stack:
        error = await refusal_of(stack.generate(long))
        assert [violation.field for violation in error.violations] == ["token_ids.ids"]
        long.truncate_prompt_tokens = 3
        long.output.echo = True
        answer = await once(stack, long)
        assert list(answer.prompt.token_ids) == [7, 8, 9]
        assert answer.usage.prompt_tokens == answer.started.prompt_tokens == 3
        await stack.generate(request_of(truncate_prompt_tokens=2))
        await stack.generate(request_of(truncate_prompt_tokens=2**32 - 1))
        prompts = [list(submit.prompt_token_ids) for submit in stack.scheduler.of_kind("submit")]
        assert prompts == [[7, 8, 9], ids_of(TEXT)[-2:], ids_of(TEXT)]


@pytest.mark.asyncio
async def test_an_assistants_message_is_continued(prepared: PreparedModel) -> None:
    """continue_final_message ends the prompt inside the last message; only an assistant's can be continued."""
    chat = inference_pb2.ChatInput(
        messages=[
            inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_USER, content="hi"),
            inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_ASSISTANT, content="the cat"),
        ],
        continue_final_message=True,
    )
    rendered = "<s>user\nhi</s><s>assistant\nthe cat"
    async with running_stack(prepared) as stack:
        await stack.generate(inference_pb2.GenerateRequest(chat=chat))
        (submit,) = stack.scheduler.of_kind("submit")
        wanted = byte_level().tokenizer.encode(rendered, add_special_tokens=False).ids
        assert list(submit.prompt_token_ids) == wanted
        tokens = await stack.inference.Tokenize(inference_pb2.TokenizeRequest(chat=chat))
        assert list(tokens.token_ids) == wanted
        chat.messages[-1].role = inference_pb2.CHAT_ROLE_USER
        error = await refusal_of(once(stack, inference_pb2.GenerateRequest(chat=chat)))
        assert [violation.field for violation in error.violations] == ["chat.continue_final_message"]


@pytest.mark.asyncio
async def test_special_tokens_written_out(prepared: PreparedModel) -> None:
    """skip_special_tokens False shows special tokens of the output and of an echoed input, as Detokenize does."""
    script = [*ids_of("a"), 2, *ids_of("b"), EOS_ID]
    async with running_stack(prepared, FakeScheduler(script=lambda submit, choice: script)) as stack:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=[0, *ids_of("x")]),
            output=inference_pb2.OutputConfig(echo=True),
            stopping=inference_pb2.StoppingConfig(stop_token_ids=[EOS_ID], ignore_eos=True),
        )
        answer = await once(stack, request)
        assert (answer.prompt.text, answer.choices[0].text) == ("x", "ab")
        request.output.skip_special_tokens = False
        answer = await once(stack, request)
        assert (answer.prompt.text, answer.choices[0].text) == ("<s>x", "a<|end|>b")


@pytest.mark.asyncio
async def test_sampling_options_reach_the_scheduler(prepared: PreparedModel) -> None:
    """typical_p, biases and bad words arrive as they take effect; a bias of -100 forbids, whatever the logits."""
    sampling = inference_pb2.SamplingConfig(
        typical_p=0.5,
        logit_bias=[
            inference_pb2.LogitBias(token_id=7, bias=-100),
            inference_pb2.LogitBias(token_id=5, bias=1.5),
            inference_pb2.LogitBias(token_id=6, bias=100),
        ],
        bad_words=["the", "cat", "the"],
    )
    async with running_stack(prepared) as stack:
        await stack.generate(request_of(sampling=sampling))
        await stack.generate(request_of())
        given, unset = (submit.sampling for submit in stack.scheduler.of_kind("submit"))
        assert given.typical_p == 0.5
        assert list(given.bias_token_ids) == [7, 5, 6]
        assert given.bias_values[0] < -1e29
        assert list(given.bias_values[1:]) == [1.5, 100]
        runs = [tuple(each.token_ids) for each in given.bad_words]
        wanted = [tuple(ids_of(word)) for word in ("the", " the", "cat", " cat")]
        assert runs == wanted
        assert (unset.typical_p, len(unset.bias_values), len(unset.bad_words)) == (1, 0, 0)


@pytest.mark.asyncio
@pytest.mark.parametrize("sample", all_samples(), ids=lambda sample: sample.name)
async def test_bad_words_as_every_tokenizer_writes_them(make_prepared: MakePrepared, sample: Any) -> None:
    """The runs of a bad word are those that it has in texts, at the start and behind another word, each once."""
    tokenizer = sample.tokenizer
    prepared = make_prepared(sample=sample)

    async with running_stack(prepared) as stack:
        await stack.generate(
            inference_pb2.GenerateRequest(
                token_ids=inference_pb2.TokenIds(ids=[5]), sampling=inference_pb2.SamplingConfig(bad_words=["cat"])
            )
        )
        (submit,) = stack.scheduler.of_kind("submit")
        runs = [tuple(each.token_ids) for each in submit.sampling.bad_words]
    assert len(runs) == len(set(runs))
    start = tuple(tokenizer.encode("cat", add_special_tokens=False).ids)
    inside = tokenizer.encode("the cat sat", add_special_tokens=False).ids
    before = len(tokenizer.encode("the", add_special_tokens=False).ids)
    assert start in runs
    assert any(tuple(inside[before : before + len(run)]) == run for run in runs)
    assert all(tokenizer.decode(list(run)).strip() == "cat" for run in runs)


@pytest.mark.asyncio
async def test_another_chat_template(make_prepared: MakePrepared, tmp_path: Path) -> None:
    """--chat-template takes the place of the model's own, and makes a model take chats that has none."""
    file = tmp_path / "template.jinja"
    file.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}", encoding="utf-8")
    message = inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_USER, content="hi")
    request = inference_pb2.TokenizeRequest(chat=inference_pb2.ChatInput(messages=[message]))
    for name, own in (("one", "{{ 'own' }}"), ("none", None)):
        prepared = make_prepared(name, chat_template=own)
        async with running_stack(prepared, chat_template=str(file)) as stack:
            tokens = await stack.inference.Tokenize(request)
            assert list(tokens.token_ids) == ids_of("[hi]")
            (model,) = (await stack.models.ListModels(model_pb2.ListModelsRequest())).models
            assert model.supports_chat
    file.write_text("{% for %}", encoding="utf-8")
    with pytest.raises(ModelError, match="no valid Jinja"):
        GatewayServer(GatewaySettings(model="none", chat_template=str(file)), [prepared], QUICK)
