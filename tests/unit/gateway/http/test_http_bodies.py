"""What the HTTP API makes of bodies: what is taken, what is refused and by which name, and what reaches the domain."""

from __future__ import annotations

import math
import re
import struct
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from gateway.chat import ChatMessage
from gateway.http import known
from gateway.http.commands import chat_command, completion_commands, ignored_fields, tokenize_input
from gateway.http.errors import Failure, failure_from
from gateway.http.fields import (
    MAX_PROMPTS,
    MAX_UNKNOWN,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from gateway.http.names import chat_name, completion_name, detokenize_name
from gateway.http.refusals import failure_from_validation
from gateway.requests import ChatInput, GenerateCommand, LogitBias, TextInput, TokenIdsInput
from octavo.rpc.errors import ServiceError

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "so"}]}


def chat(**fields: Any) -> GenerateCommand:
    """A chat completion as a command."""
    return chat_command(ChatRequest.model_validate({**CHAT, **fields}))


def completions(**fields: Any) -> list[GenerateCommand]:
    """A completion as commands."""
    return completion_commands(CompletionRequest.model_validate({"prompt": "so", **fields}))


def refused(kind: type[ChatRequest | CompletionRequest], **fields: Any) -> Failure:
    """How a body that pydantic refuses is answered."""
    base: dict[str, Any] = CHAT if kind is ChatRequest else {"prompt": "so"}
    with pytest.raises(ValidationError) as error:
        kind.model_validate({**base, **fields})
    # As FastAPI gives them: below "body".
    return failure_from_validation([{**each, "loc": ("body", *each["loc"])} for each in error.value.errors()])


def test_every_field_reaches_the_command() -> None:
    """Each option arrives under the domain's name, as it was sent."""
    command = chat(
        model="m", temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, typical_p=0.75, repetition_penalty=1.5,
        presence_penalty=-0.5, frequency_penalty=0.5, logit_bias={"5": -100, "6": 1.5}, bad_words=["x"], max_tokens=9,
        min_tokens=2, stop=["a", "b"], stop_token_ids=[3], ignore_eos=True, include_stop_str_in_output=True,
        skip_special_tokens=False, truncate_prompt_tokens=4, prompt_logprobs=1, echo=True, n=2, best_of=3, seed=8,
        user="ann", logprobs=True, top_logprobs=5,
    )  # fmt: skip
    assert command == GenerateCommand(
        model="m", input=ChatInput([ChatMessage("user", "so")]), temperature=0.5, top_p=0.25, top_k=7, min_p=0.125,
        typical_p=0.75, repetition_penalty=1.5, presence_penalty=-0.5, frequency_penalty=0.5,
        logit_bias=(LogitBias(5, -100), LogitBias(6, 1.5)), bad_words=("x",), max_tokens=9, min_tokens=2,
        stop=("a", "b"), stop_token_ids=(3,), ignore_eos=True, include_stop=True, skip_special_tokens=False,
        truncate_prompt_tokens=4, prompt_logprobs=1, echo=True, n=2, best_of=3, seed=8, label="ann", top_logprobs=5,
    )  # fmt: skip


def test_null_is_as_good_as_left_out() -> None:
    """A body of nulls is a body without them: clients send both."""
    nulls = dict.fromkeys([*ChatRequest.model_fields, *known.CHAT])
    del nulls["messages"]
    nulls["seed"] = 1
    assert chat(**nulls) == chat(seed=1)
    nulls = dict.fromkeys([*CompletionRequest.model_fields, *known.COMPLETION])
    del nulls["prompt"]
    nulls["seed"] = 1
    assert completions(**nulls) == completions(seed=1)


@pytest.mark.parametrize(
    ("prompt", "inputs"),
    [
        ("so", [TextInput("so")]),
        ("", [TextInput("")]),
        (["so", "on"], [TextInput("so"), TextInput("on")]),
        ([1, 2], [TokenIdsInput([1, 2])]),
        ([[1], [2, 3]], [TokenIdsInput([1]), TokenIdsInput([2, 3])]),
    ],
)
def test_forms_of_a_prompt(prompt: Any, inputs: list[Any]) -> None:
    """The four forms of OpenAI's prompt; all prompts of one request have one seed."""
    commands = completions(prompt=prompt)
    assert [command.input for command in commands] == inputs
    assert len({command.seed for command in commands}) == 1


@pytest.mark.parametrize(
    "prompt",
    [None, [], 5, {"a": 1}, ["a", 1], [1, True], [1.0], [[1], "a"], [-1], [2**32], "\ud800", ["\udfff"], [[2**40]]],
)
def test_what_is_no_prompt(prompt: Any) -> None:
    """Anything else is refused by the field's name, before it can break anything."""
    assert refused(CompletionRequest, prompt=prompt).param == "prompt"


def test_too_many_prompts() -> None:
    """The number of prompts has a bound, which is told."""
    assert len(completions(prompt=["a"] * MAX_PROMPTS)) == MAX_PROMPTS
    assert f"at most {MAX_PROMPTS} prompts, has" in refused(CompletionRequest, prompt=["a"] * (MAX_PROMPTS + 1)).message


def test_text_parts_are_joined() -> None:
    """Parts of type text are one text; a developer is a system; an assistant may say nothing."""
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [], "annotations": []},
        {"role": "user", "content": []},
    ]
    assert chat(messages=messages).input == ChatInput(
        [ChatMessage("system", "a b"), ChatMessage("assistant", ""), ChatMessage("user", "")]
    )


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (
            {"type": "image_url", "image_url": {"url": "data:,"}},
            "part 0 is of type 'image_url', which is not supported",
        ),
        ({"type": "input_audio"}, "part 0 is of type 'input_audio'"),
        ({"type": "file"}, "part 0 is of type 'file'"),
        ({"type": "text"}, "part 0 has no text"),
        ({"type": "text", "text": 5}, "part 0 has no text"),
        ({"type": "text", "text": "a", "cache_control": {}}, "part 0 has 'cache_control'"),
        ({"text": "a"}, "part 0 is no object with a type"),
        ("a", "part 0 is no object with a type"),
        ({"type": ["text"]}, "part 0 is no object with a type"),
    ],
)
def test_other_parts_are_refused_by_name(part: Any, words: str) -> None:
    """The kind of part is named, and where it stands."""
    failure = refused(ChatRequest, messages=[{"role": "user", "content": [part]}])
    assert failure.param == "messages[0].content"
    assert words in failure.message


@pytest.mark.parametrize("name", sorted(known.CHAT))
def test_unsupported_fields_of_a_chat(name: str) -> None:
    """Each is refused by its name with what is supported instead, unless its value asks for nothing."""
    failure = refused(ChatRequest, **{name: {"some": "thing"}})
    assert (failure.status, failure.param, failure.message) == (400, name, f"{name}: {known.CHAT[name].why}")
    for value in (None, *known.CHAT[name].neutral):
        assert chat(**{name: value}, seed=1) == chat(seed=1)


def test_a_neutral_value_of_another_type_is_refused() -> None:
    """0 is not false: what a field's default is says its type too."""
    assert refused(ChatRequest, store=0).param == "store"
    assert refused(ChatRequest, parallel_tool_calls=1).param == "parallel_tool_calls"
    assert refused(CompletionRequest, suffix="x").message.startswith("suffix: is not supported")


@pytest.mark.parametrize("name", sorted(known.MESSAGE))
def test_unsupported_fields_of_a_message(name: str) -> None:
    """They are named with their place."""
    failure = refused(ChatRequest, messages=[*CHAT["messages"], {"role": "user", "content": "a", name: {"a": 1}}])
    assert (failure.status, failure.param) == (400, f"messages[1].{name}")


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_unknown_fields_are_refused_by_name(kind: type[ChatRequest | CompletionRequest]) -> None:
    """A misspelt field is an error and not a default; of very many the first few are named."""
    assert refused(kind, temprature=1).message == (
        "temprature: is no field of this request: check its spelling, or leave it out"
    )
    assert refused(kind, stream_options={"usage": True}).param == "stream_options.usage"
    many = refused(kind, **{f"field_{index}": 1 for index in range(1000)})
    assert len(many.message) < 2000
    assert many.message.endswith("and more")
    assert len(refused(kind, **{"x" * 100_000: 1}).message) < 1000


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (CompletionRequest, {f"field_{index}": 1 for index in range(10_000)}, "field_0"),
        (ChatRequest, {"messages": [{f"field_{index}": 1 for index in range(10_000)}]}, "messages[0].role"),
        (ChatRequest, {"messages": [{}] * 10_000}, "messages[0].role"),
        (ChatRequest, {"messages": [5] * 10_000}, "messages[0]"),
        (TokenizeRequest, {"messages": [5] * 10_000}, "messages[0]"),
        (DetokenizeRequest, {"tokens": ["5"] * 10_000}, "tokens[0]"),
        (CompletionRequest, {"stop": [5] * 10_000}, "stop[0]"),
        (CompletionRequest, {"stop_token_ids": [-1] * 10_000}, "stop_token_ids[0]"),
        (CompletionRequest, {"bad_words": [5] * 10_000}, "bad_words[0]"),
        (CompletionRequest, {"logit_bias": {str(index): "x" for index in range(10_000)}}, "logit_bias"),
        (CompletionRequest, {"logit_bias": {str(index): 1.0 for index in range(1025)}}, "logit_bias"),
        (CompletionRequest, {"prompt": ["a", 5] * 10_000}, "prompt"),
    ],
)
def test_very_many_faults_are_few_errors(kind: type[BaseModel], fields: dict[str, Any], param: str) -> None:
    """A body that is bad in thousands of places costs as many errors as are worth naming, and names the first."""
    with pytest.raises(ValidationError) as bad:
        kind.model_validate({**({"prompt": "so"} if kind is CompletionRequest else {}), **fields})
    assert bad.value.error_count() <= MAX_UNKNOWN + 1
    errors = [{**error, "loc": ("body", *error["loc"])} for error in bad.value.errors()]
    assert failure_from_validation(errors).param == param


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "1"), ("temperature", True), ("n", "1"), ("n", 1.0), ("n", True), ("n", -1), ("n", 2**32),
        ("seed", 2**64), ("seed", -(2**63) - 1), ("seed", 1.5), ("stop", 5), ("stop", [5]), ("stop", "\ud800"),
        ("stop_token_ids", [-1]), ("stop_token_ids", "5"), ("logit_bias", [1]), ("logit_bias", {"5": "1"}),
        ("stream", "yes"), ("user", 5), ("user", "\udc00"), ("bad_words", "x"), ("max_tokens", 10**400), ("echo", 1),
        ("stream_options", 5), ("model", ["a"]), ("top_k", None.__class__),
    ],
)  # fmt: skip
def test_other_types_are_refused_by_name(name: str, value: Any) -> None:
    """JSON's types are taken as they are: a text is no number, and no number is a truth value."""
    for kind in (ChatRequest, CompletionRequest):
        failure = refused(kind, **{name: value})
        assert failure.param is not None
        assert failure.param.split("[")[0].split(".")[0] == name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": "hot"}, 'temperature: must be a number from 0 to 2, is "hot"'),
        ({"top_p": []}, "top_p: must be a number above 0 and at most 1, is a list"),
        ({"n": True}, "n: must be a whole number from 1 to 128, is true"),
        ({"n": 1.5}, "n: must be a whole number from 1 to 128, is 1.5"),
        ({"max_tokens": -1}, "max_tokens: must be a whole number from 0 to 4294967295, is -1"),
        ({"priority": 2**31}, "priority: must be a whole number from -100 to 100, is 2147483648"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens: must be a whole number of at least 1, is -1"),
        ({"max_tokens": 10**400}, "max_tokens: must be .*, is a number of very many digits"),
        ({"user": 5}, "user: must be a text, is 5"),
        ({"model": "a" * 100, "echo": "b" * 100}, f'echo: must be true or false, is "{"b" * 40}..."'),
        ({"stop": 5}, "stop: must be a text or a list, is 5"),
        ({"stop": ["a", {}]}, r"stop\[1\]: must be a text, is an object"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids\[0\]: must be a whole number from 0 to 4294967295, is -1"),
        ({"logit_bias": {"7": "1", "8": None}}, 'logit_bias: must be a number, is "1" for token 7 or .* for token 8'),
    ],
)
def test_what_a_field_may_be_is_said_with_what_it_is(fields: dict[str, Any], message: str) -> None:
    """A value of another type is told as one out of range is: what the page gives as its range, and the value."""
    for kind in (ChatRequest, CompletionRequest):
        assert re.fullmatch(message, refused(kind, **fields).message)


def test_one_name_may_be_of_two_types() -> None:
    """`logprobs` is a truth value in one request and a number in the other."""
    assert refused(ChatRequest, logprobs=2).message == "logprobs: must be true or false, is 2"
    words = "logprobs: must be a whole number from 0 to 20, is true"
    assert refused(CompletionRequest, logprobs=True).message == words


def test_many_bad_values_of_one_object_are_few_words() -> None:
    """A thousand biases that are no numbers do not make a message of a thousand parts."""
    assert len(refused(ChatRequest, logit_bias={str(key): "x" for key in range(1000)}).message) < 300


def test_every_role_that_is_taken_is_named() -> None:
    """Those of HTTP, `developer` among them."""
    with pytest.raises(ServiceError) as error:
        chat(messages=[*CHAT["messages"], {"role": "robot", "content": "x"}])
    failure = failure_from(error.value, chat_name)
    words = "must be system, developer, user or assistant, is 'robot'"
    assert (failure.param, failure.message) == ("messages[1].role", f"messages[1].role: {words}")


@pytest.mark.parametrize("key", ["", "x", "-1", "1.5", " 1", "٣", str(2**32), "9" * 5000])
def test_keys_of_logit_bias_are_token_ids(key: str) -> None:
    """What is no token id is refused."""
    with pytest.raises(ServiceError, match="logit_bias: has the key"):
        chat(logit_bias={key: 1})


def test_numbers_are_what_grpc_carries() -> None:
    """Fractions are rounded to 32 bits before they are checked: one that is 0 there is 0 here. Infinity stays."""
    assert chat(top_p=1e-50).top_p == 0
    assert chat(temperature=0.7).temperature == struct.unpack("<f", struct.pack("<f", 0.7))[0] != 0.7
    assert chat(temperature=1e300).temperature == 1e300
    assert chat(temperature=math.inf).temperature == math.inf
    bias = chat(logit_bias={"1": math.nan}).logit_bias[0].bias
    assert math.isnan(bias)


def test_seeds_are_64_bits() -> None:
    """A negative seed is the same bits without a sign; one that is drawn is exact as a JSON number everywhere."""
    assert chat(seed=-1).seed == 2**64 - 1
    assert chat(seed=2**64 - 1).seed == 2**64 - 1
    drawn = [chat().seed or 0 for _ in range(20)]
    assert len(set(drawn)) == 20
    assert max(drawn) < 2**53


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "system", "content": None}]}, "messages[0].content"),
    ],
)
def test_fields_that_do_not_go_together(fields: dict[str, Any], param: str) -> None:
    """Each is named by HTTP's own name."""
    with pytest.raises(ServiceError) as error:
        chat(**fields)
    assert failure_from(error.value, chat_name).param == param


def test_fields_that_go_together() -> None:
    """Both names of max_tokens may say the same; the other way to continue a message is said in full."""
    assert chat(max_tokens=3, max_completion_tokens=3).max_tokens == 3
    assert chat(max_completion_tokens=4).max_tokens == 4
    assert chat(max_tokens=0).max_tokens == 0
    assert chat().max_tokens is None
    assert completions()[0].max_tokens == 16
    assert completions(max_tokens=0)[0].max_tokens == 0
    both = chat(add_generation_prompt=False, continue_final_message=True)
    assert isinstance(both.input, ChatInput)
    assert both.input.continue_final_message
    assert chat(logprobs=True).top_logprobs == 0
    assert chat(logprobs=False).top_logprobs is None
    assert completions(logprobs=0)[0].top_logprobs == 0
    assert completions(logprobs=2, echo=True)[0].prompt_logprobs == 2
    assert completions(logprobs=2)[0].prompt_logprobs is None
    with pytest.raises(ServiceError, match="prompt_logprobs"):
        completions(logprobs=2, echo=True, prompt_logprobs=3)


def test_ignored_fields_are_listed() -> None:
    """What was given and changes nothing, and nothing else."""
    assert ignored_fields(ChatRequest.model_validate(CHAT)) == []
    given = {"messages": [{"role": "user", "content": "a", "name": "ann"}], "metadata": {}, "service_tier": "flex"}
    assert ignored_fields(ChatRequest.model_validate(given)) == ["metadata", "service_tier", "messages.name"]


def test_tokenize_takes_one_of_two() -> None:
    """A text or messages, with the options that belong to each."""

    def given(**fields: Any) -> Any:
        return tokenize_input(TokenizeRequest.model_validate(fields))

    assert given(prompt="") == TextInput("")
    assert given(messages=CHAT["messages"]) == ChatInput([ChatMessage("user", "so")])
    for fields in (
        {},
        {"prompt": "a", "messages": CHAT["messages"]},
        {"prompt": "a", "continue_final_message": True},
    ):
        with pytest.raises(ServiceError):
            given(**fields)


@pytest.mark.parametrize(
    ("path", "in_chat", "in_completion"),
    [
        ("sampling.temperature", "temperature", "temperature"),
        ("stopping.include_stop", "include_stop_str_in_output", "include_stop_str_in_output"),
        ("stopping.stop[3]", "stop[3]", "stop[3]"),
        ("sampling.logit_bias[0].token_id", "logit_bias", "logit_bias"),
        ("sampling.logit_bias", "logit_bias", "logit_bias"),
        ("output.top_logprobs", "top_logprobs", "logprobs"),
        ("output.prompt_logprobs", "prompt_logprobs", "prompt_logprobs"),
        ("request_id", "user", "user"),
        ("chat.messages[2].role", "messages[2].role", None),
        ("chat", "messages", None),
        ("chat.continue_final_message", "continue_final_message", None),
        ("input", "messages", "prompt"),
        ("token_ids.ids", None, "prompt"),
        ("text", None, "prompt"),
        ("token_ids.ids[2]", None, "prompt[2]"),
    ],
)
def test_names_of_fields(path: str, in_chat: str | None, in_completion: str | None) -> None:
    """The domain's paths have the names that the client sent."""
    assert in_chat is None or chat_name(path) == in_chat
    assert in_completion is None or completion_name(path) == in_completion
    assert detokenize_name("token_ids") == "tokens"
