"""What a stream and a completion give, with either client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

import pytest
from client_fakes import STARTED, Face, answer, reply, send, serving
from google.protobuf import json_format

from octavo.client import (
    AsyncClient,
    ChoiceFinished,
    Client,
    Delta,
    FinishReason,
    GenerateOptions,
    InvalidArgumentError,
    Message,
    Prompt,
    PromptTokens,
    Started,
    TokenLogprobs,
    TopLogprob,
    Usage,
)
from octavo.client.client_resume import RESUME_GRACE
from octavo.client.request_convert import OPTION_FIELDS
from octavo.v1 import inference_pb2 as pb

EVERY_OPTION: dict[str, Any] = {
    "model": "m",
    "temperature": 0.0,
    "top_p": 0.5,
    "top_k": 0,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.5,
    "typical_p": 0.75,
    "logit_bias": {4: -1.5, 5: 0},
    "bad_words": ["one", "two"],
    "max_tokens": 7,
    "min_tokens": 0,
    "stop_token_ids": [4, 5],
    "ignore_eos": False,
    "stop": ["end"],
    "include_stop": False,
    "top_logprobs": 0,
    "prompt_logprobs": 0,
    "echo": False,
    "skip_special_tokens": False,
    "n": 2,
    "best_of": 3,
    "seed": 2**64 - 1,
    "resume_grace": 2.5,
    "truncate_prompt_tokens": 9,
    "priority": -100,
    "queue_ttl": 1.5,
    "first_token_target": 86_400,
    "cache_salt": "s",
    "bypass_cache": False,
    "request_id": "mine",
}
OF_CACHE = {"salt": "cache_salt", "bypass": "bypass_cache"}
"""What options are called whose fields are named within their message."""


def test_a_stream_gives_deltas_then_the_results(face: Face) -> None:
    """Deltas come in order with their tokens; Started, the choices' ends and the totals are known afterwards."""
    with serving(answer("Par", "is")) as gateway:
        deltas, stream = face.read(gateway.address, "The capital?")
    assert deltas == [Delta(0, 0, "Par", (10,), ()), Delta(0, 1, "is", (11,), ())]
    assert stream.started == Started("g-1", "m", "r", 7, 3, 9, 1)
    assert stream.choices == (ChoiceFinished(0, FinishReason.STOP, 2, 2),)
    assert stream.usage == Usage(3, 2, 2)


def test_results_are_not_known_before_they_come() -> None:
    """Asked too early, a stream says when it will know, and knows no choice."""
    stream = Client("127.0.0.1:1").generate("x")
    with pytest.raises(RuntimeError, match="first delta"):
        _ = stream.started
    with pytest.raises(RuntimeError, match="end of the loop"):
        _ = stream.usage
    assert stream.choices == ()


def test_choices_are_by_index_and_unknown_things_do_no_harm(face: Face) -> None:
    """Ends come in any order; a reason or an event of a later version of the gateway breaks nothing."""
    events = (
        pb.GenerateResponse(started=STARTED),
        pb.GenerateResponse(choice_finished=pb.ChoiceFinished(choice=1, reason=pb.FINISH_REASON_LENGTH)),
        pb.GenerateResponse(),
        pb.GenerateResponse(choice_finished=pb.ChoiceFinished(choice=0, reason=77)),  # type: ignore[arg-type]
        pb.GenerateResponse(usage=pb.Usage()),
    )
    with serving(send(*events)) as gateway:
        deltas, stream = face.read(gateway.address, "x", n=2)
    assert deltas == []
    assert [(end.choice, end.reason) for end in stream.choices] == [(0, FinishReason.UNKNOWN), (1, FinishReason.LENGTH)]
    assert [end.stop_token_id for end in stream.choices] == [None, None]


def test_a_loop_over_an_ended_stream_is_empty_and_costs_no_call(face: Face) -> None:
    """What has been read is not asked for again."""
    with serving(answer("a")) as gateway:
        _, stream = face.read(gateway.address, "x")
        assert face.collect(stream) == []
        assert len(gateway.requests) == 1


def test_every_option_reaches_its_field(face: Face) -> None:
    """All options, zeros and false included, are set in the request; nothing else is."""
    with serving(answer()) as gateway:
        face.read(gateway.address, "x", **EVERY_OPTION)
    sent = json_format.MessageToDict(gateway.requests[0], preserving_proto_field_name=True)
    assert sent == {
        "model": "m",
        "text": "x",
        "sampling": {
            "temperature": 0.0,
            "top_p": 0.5,
            "top_k": 0,
            "min_p": 0.25,
            "repetition_penalty": 1.5,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.5,
            "typical_p": 0.75,
            "logit_bias": [{"token_id": 4, "bias": -1.5}, {"token_id": 5}],
            "bad_words": ["one", "two"],
        },
        "stopping": {
            "max_tokens": 7,
            "min_tokens": 0,
            "stop_token_ids": [4, 5],
            "ignore_eos": False,
            "stop": ["end"],
            "include_stop": False,
        },
        "output": {"top_logprobs": 0, "prompt_logprobs": 0, "echo": False, "skip_special_tokens": False},
        "scheduling": {"priority": -100, "queue_ttl": "1.500s", "first_token_target": "86400s"},
        "cache": {"salt": "s"},
        "n": 2,
        "best_of": 3,
        "truncate_prompt_tokens": 9,
        "resume_grace": "2.500s",
        "seed": str(2**64 - 1),
        "request_id": "mine",
    }


def test_none_is_unset(face: Face) -> None:
    """An option that is None is as one that was left out: the model's default."""
    with serving(answer()) as gateway:
        face.read(gateway.address, "x", **dict.fromkeys(EVERY_OPTION))
    assert _without_grace(gateway.requests[0]) == pb.GenerateRequest(text="x")


def _without_grace(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """A request as its caller gave it: every stream asks for the default grace, so that it can be taken up."""
    assert request.resume_grace.seconds == RESUME_GRACE
    request.ClearField("resume_grace")
    return request


def test_options_are_those_of_the_contract() -> None:
    """Every field of the request but its input is an option, and no option has no field: a new one is missed here."""
    fields = set()
    for field in pb.GenerateRequest.DESCRIPTOR.fields:
        is_input = field.containing_oneof is not None and field.containing_oneof.name == "input"
        if is_input or field.name == "checksum":  # the client's own affair
            continue
        inner = field.message_type
        is_value = inner is None or inner.full_name == "google.protobuf.Duration"
        names = [field.name] if is_value else list(inner.fields_by_name)
        fields |= {OF_CACHE[name] if field.name == "cache" else name for name in names}
    assert set(OPTION_FIELDS) == fields == set(EVERY_OPTION)
    of_chats = {field.name for field in pb.ChatInput.DESCRIPTOR.fields} - {"messages"}
    assert set(get_type_hints(GenerateOptions)) == fields | of_chats


def test_a_conversation_is_continued() -> None:
    """continue_final_message belongs to conversations; with any other prompt it is a mistake."""
    chat = [Message("user", "hi"), Message("assistant", "the")]
    with serving(answer()) as gateway, Client(gateway.address) as client:
        for value in (True, False, None):
            list(client.generate(chat, continue_final_message=value))
        list(client.generate("x", continue_final_message=False))
    assert [request.chat.continue_final_message for request in gateway.requests] == [True, False, False, False]
    with pytest.raises(TypeError, match="is for conversations"):
        Client("127.0.0.1:1").generate("x", continue_final_message=True)
    with pytest.raises(TypeError, match="must be true or false"):
        Client("127.0.0.1:1").generate(chat, continue_final_message="yes")  # type: ignore[arg-type]


def test_the_prompt_and_stop_strings_come_back(face: Face) -> None:
    """Pieces of the prompt are one once they are read, of the first token nothing is known; a stop string is named."""
    known = pb.PromptTokenLogprobs(logprob=-0.5, top=[pb.TopLogprob(token_id=6, logprob=-0.25)])
    first = pb.Prompt(text="a", token_ids=[4, 5], logprobs=[pb.PromptTokenLogprobs(), known])
    second = pb.Prompt(first_token_index=2, text="b", token_ids=[6], logprobs=[known])
    whole = pb.Prompt(text="ab", token_ids=[4, 5, 6], logprobs=[pb.PromptTokenLogprobs(), known, known])
    end = pb.ChoiceFinished(reason=pb.FINISH_REASON_STOP, stop_string="END", completion_tokens=1)
    token = TokenLogprobs(-0.5, (TopLogprob(6, -0.25),))
    wanted = PromptTokens("ab", (4, 5, 6), (None, token, token))
    events = [pb.GenerateResponse(started=STARTED), pb.GenerateResponse(prompt=first)]
    events += [pb.GenerateResponse(prompt=second), pb.GenerateResponse(choice_finished=end)]
    with serving(send(*events)) as gateway:
        _, stream = face.read(gateway.address, "ab", echo=True, prompt_logprobs=1)
        assert stream.prompt == wanted
        assert stream.choices == (ChoiceFinished(0, FinishReason.STOP, None, 1, "END"),)
    with serving(reply(pb.GenerateOnceResponse(started=STARTED, prompt=whole))) as gateway:
        assert face.call(gateway.address, "complete", "ab", echo=True).prompt == wanted
    with serving(answer("a"), reply(completed(1))) as gateway:
        assert face.read(gateway.address, "x")[1].prompt is None
        assert face.call(gateway.address, "complete", "x").prompt is None


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("text", pb.GenerateRequest(text="text")),
        ("", pb.GenerateRequest(text="")),
        ([5, 6], pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6]))),
        (range(3), pb.GenerateRequest(token_ids=pb.TokenIds(ids=[0, 1, 2]))),
        ([], pb.GenerateRequest(token_ids=pb.TokenIds())),
        (
            [Message("system", "be brief"), {"role": "user", "content": "hi"}, Message("assistant", "yes")],
            pb.GenerateRequest(
                chat=pb.ChatInput(
                    messages=[
                        pb.ChatMessage(role=pb.CHAT_ROLE_SYSTEM, content="be brief"),
                        pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hi"),
                        pb.ChatMessage(role=pb.CHAT_ROLE_ASSISTANT, content="yes"),
                    ]
                )
            ),
        ),
    ],
)
def test_a_prompt_is_text_tokens_or_a_chat(prompt: Prompt, sent: pb.GenerateRequest) -> None:
    """The kind of input follows from the value, and an empty one is sent as what it is."""
    with serving(answer()) as gateway, Client(gateway.address) as client:
        list(client.generate(prompt))
    assert [_without_grace(request) for request in gateway.requests] == [sent]
    assert gateway.requests[0].WhichOneof("input") == sent.WhichOneof("input")


@pytest.mark.parametrize("make", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"max_tokens": -1}, "stopping.max_tokens", "a whole number from 0 to 4294967295, is -1"),
        ({"seed": 2**64}, "seed", f"from 0 to {2**64 - 1}"),
        ({"stop_token_ids": [1, -2]}, "stopping.stop_token_ids", "whole numbers from 0"),
        ({"request_id": "\ud800"}, "request_id", "valid Unicode text"),
        ({"stop": ["fine", "\ud800"]}, "stopping.stop", "valid Unicode text"),
        ({"logit_bias": {-1: 0.5}}, "sampling.logit_bias", "token ids to numbers"),
        ({"priority": 2**31}, "scheduling.priority", f"from {-(2**31)} to {2**31 - 1}, is {2**31}"),
        ({"queue_ttl": 10**400}, "scheduling.queue_ttl", "a number of seconds"),
        ({"first_token_target": float("inf")}, "scheduling.first_token_target", "a number of seconds, is inf"),
        ({"first_token_target": float("nan")}, "scheduling.first_token_target", "a number of seconds, is nan"),
        ({"cache_salt": "\ud800"}, "cache.salt", "valid Unicode text"),
        ({"temperature": 10**400}, "sampling.temperature", "must be a number"),
    ],
)
def test_what_no_field_can_hold_is_named(
    make: type[Client | AsyncClient], options: Mapping[str, Any], field: str, words: str
) -> None:
    """A value outside a field's type is refused by its name, as the gateway would, and before anything is sent."""
    with pytest.raises(InvalidArgumentError, match=words) as raised:
        make("127.0.0.1:1").generate("x", **options)
    assert [violation.field for violation in raised.value.violations] == [field]


def test_all_bad_values_are_named_at_once() -> None:
    """Two values that do not fit are two violations of one error."""
    with pytest.raises(InvalidArgumentError) as raised:
        Client("127.0.0.1:1").complete("x", n=-1, top_k=-1)
    assert {violation.field for violation in raised.value.violations} == {"n", "sampling.top_k"}


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ("x", {"temprature": 1}, "no option of a request; did you mean 'temperature'"),
        ("x", {"zzz": 1}, "it takes model, "),
        ("x", {"temperature": "hot"}, "temperature='hot' is of the wrong type: must be a number"),
        ("x", {"max_tokens": 1.5}, "max_tokens=1.5 is of the wrong type: must be a whole number"),
        ("x", {"stop_token_ids": 5}, "stop_token_ids=5 is of the wrong type: must be whole numbers"),
        ("x", {"ignore_eos": "no"}, "must be true or false"),
        ("x", {"stop": "one"}, "stop='one' is of the wrong type: must be a list of valid Unicode texts"),
        ("x", {"logit_bias": [5]}, "must be a mapping of token ids to numbers"),
        ("x", {"logit_bias": {5: "high"}}, "must be a mapping of token ids to numbers"),
        ("x", {"queue_ttl": "5s"}, "queue_ttl='5s' is of the wrong type: must be a number of seconds"),
        ("x", {"first_token_target": True}, "must be a number of seconds"),
        ("x", {"queue_ttl": [5]}, "must be a number of seconds"),
        ("x", {"priority": 1.5}, "must be a whole number"),
        ("x", {"bypass_cache": "no"}, "must be true or false"),
        ("x", {"cache_salt": 5}, "valid Unicode text"),
        ("x", {"seed": {5: 1}}, "must be a whole number"),
        ({"role": "user", "content": "x"}, {}, "into a list"),
        (["a", "b"], {}, "whole numbers"),
        ([{"role": "user"}], {}, "give role and content"),
        (b"bytes", {}, "a prompt is text, token ids or a list of messages, not bytes"),
        (5, {}, "a prompt is text, token ids or a list of messages, not int"),
        (iter([1]), {}, "a prompt is text"),
        ([Message("user", "x"), "y"], {}, r"messages\[1\] is no message but str"),
        ([{"role": "user", "content": b"x"}], {}, r"messages\[0\].content must be text, is bytes"),
        ([{"role": ["user"], "content": "x"}], {}, r"messages\[0\].role must be text"),
    ],
)
def test_wrong_types_are_told_from_wrong_values(prompt: Any, options: Mapping[str, Any], words: str) -> None:
    """A mistake in the program is a TypeError that says which argument and what it takes."""
    with pytest.raises(TypeError, match=words):
        Client("127.0.0.1:1").generate(prompt, **options)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([{"role": "robot", "content": "x"}], "chat.messages[0].role"),
        ([{"role": "user", "content": "\ud800"}], "chat.messages[0].content"),
        ([1, 2, -3], "token_ids.ids"),
        ("a\ud800", "text"),
    ],
)
def test_a_bad_prompt_names_its_part(prompt: Sequence[Any], field: str) -> None:
    """The message or the id at fault is named by the path that the gateway would give."""
    with pytest.raises(InvalidArgumentError) as raised:
        Client("127.0.0.1:1").generate(prompt)
    assert [violation.field for violation in raised.value.violations] == [field]


def completed(num_choices: int) -> pb.GenerateOnceResponse:
    """A whole output with log-probabilities."""
    choices = [
        pb.Choice(
            index=index,
            text=f"text {index}",
            token_ids=[1, 2],
            logprobs=[pb.TokenLogprobs(logprob=-0.5, top=[pb.TopLogprob(token_id=4, logprob=-0.25)])],
            finished=pb.ChoiceFinished(choice=index, reason=pb.FINISH_REASON_LENGTH, completion_tokens=2),
        )
        for index in range(num_choices)
    ]
    return pb.GenerateOnceResponse(started=STARTED, choices=choices, usage=pb.Usage(prompt_tokens=3, cached_tokens=2))


def test_a_completion_is_everything_at_once(face: Face) -> None:
    """Choices with text, tokens, log-probabilities and ends; the options travel as in a stream."""
    with serving(reply(completed(2))) as gateway:
        completion = face.call(gateway.address, "complete", "x", n=2, seed=7)
    assert gateway.requests == [pb.GenerateOnceRequest(request=pb.GenerateRequest(text="x", n=2, seed=7))]
    assert [choice.text for choice in completion.choices] == ["text 0", "text 1"]
    assert completion.choices[1].logprobs == (TokenLogprobs(-0.5, (TopLogprob(4, -0.25),)),)
    assert completion.choices[1].finished == ChoiceFinished(1, FinishReason.LENGTH, None, 2)
    assert (completion.started.seed, completion.usage) == (7, Usage(3, 0, 2))
    with pytest.raises(ValueError, match="2 choices"):
        _ = completion.text


def test_the_text_of_the_only_choice(face: Face) -> None:
    """With one choice its text is the completion's."""
    with serving(reply(completed(1))) as gateway:
        assert face.call(gateway.address, "complete", "x").text == "text 0"
