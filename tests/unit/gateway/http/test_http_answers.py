"""Answers made of events: a stream says what the whole answer says, and errors have their status."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_samples import byte_level

from gateway.http.choices import StreamedAnswer, Style, WholeAnswer
from gateway.http.envelope import Asked
from gateway.http.errors import failure_from
from gateway.http.styles import ChatStyle, CompletionStyle
from gateway.http.token_texts import LEAST_LOGPROB, Offsets, TokenTexts, rows_of
from gateway.requests import (
    ChoiceEnd,
    ChoiceFinished,
    Delta,
    Event,
    FinishReason,
    LogprobColumns,
    Prompt,
    Started,
    Usage,
)
from gateway.vocabulary import Vocabulary
from octavo.rpc.errors import FieldViolation, ServiceError, invalid_argument
from octavo.rpc.logprobs import pack_floats, pack_ids

SIZE = 320


def vocabulary() -> Vocabulary:
    """The vocabulary of a byte-level tokenizer."""
    tokenizer = byte_level().tokenizer
    tokens = {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    special = frozenset(each for each, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    return Vocabulary(tokens, special, json.loads(tokenizer.to_str())["decoder"], SIZE)


VOCABULARY = vocabulary()
NUM_TOP = 2
TOKENS = st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=4)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=6) | st.sampled_from(["\u2028", "a\x85\r\n\x1e"])
ENDS = st.sampled_from(
    [
        ChoiceEnd(FinishReason.LENGTH),
        ChoiceEnd(FinishReason.STOP, stop_token_id=1),
        ChoiceEnd(FinishReason.STOP, stop_string='\n"stop" 😀'),
    ]
)


def columns_of(token_ids: list[int], num_rows: int) -> LogprobColumns:
    """Logprobs that tell of what token they are."""
    rows = token_ids[len(token_ids) - num_rows :]
    return LogprobColumns(
        NUM_TOP,
        pack_floats([-each / 8 for each in rows]),
        pack_ids([(each + k) % SIZE for each in rows for k in range(NUM_TOP)]),
        pack_floats([-(each + k) / 4 for each in rows for k in range(NUM_TOP)]),
    )


@st.composite
def requests(draw: st.DrawFn) -> tuple[Asked, list[tuple[int, list[Event]]]]:
    """A request's options and the events of its prompts, mixed as they may come."""
    num_prompts, num_choices = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    asked = Asked(
        model=draw(st.sampled_from(["", 'an "alias"'])),
        created=5,
        num_choices=num_choices,
        num_prompts=num_prompts,
        seed=7,
        echo=draw(st.booleans()),
        has_logprobs=draw(st.booleans()),
        has_prompt_logprobs=draw(st.booleans()),
        include_usage=draw(st.booleans()),
        ignored=draw(st.sampled_from([[], ["metadata"]])),
    )
    has_prompt_rows = asked.has_prompt_logprobs or (asked.echo and asked.has_logprobs)
    waiting: list[tuple[int, list[list[Event]]]] = []
    for prompt in range(num_prompts):
        own: list[list[Event]] = [[Started(f"r-{prompt}", "tiny", "f" * 64, 7, 3, 9)]]
        if asked.echo or has_prompt_rows:
            index = 0
            for token_ids in draw(st.lists(TOKENS, min_size=1, max_size=2)):
                rows = columns_of(token_ids, len(token_ids) - (index == 0)) if has_prompt_rows else None
                own.append([Prompt(index, draw(TEXTS) if asked.echo else "", token_ids, rows)])
                index += len(token_ids)
        for choice in range(num_choices):
            count = 0
            for token_ids in draw(st.lists(TOKENS, max_size=3)):
                rows = columns_of(token_ids, len(token_ids)) if asked.has_logprobs else None
                own.append([Delta(choice, count, draw(TEXTS), token_ids, rows)])
                count += len(token_ids)
            own.append([ChoiceFinished(choice, draw(ENDS), count)])
        own.append([Usage(3, draw(st.integers(0, 50)))])
        waiting.append((prompt, own))
    events: list[tuple[int, list[Event]]] = []
    while any(own for _, own in waiting):
        prompt, own = draw(st.sampled_from([each for each in waiting if each[1]]))
        events.append((prompt, own.pop(0)))
    return asked, events


def style_of(asked: Asked, *, chat: bool) -> Style:
    """A new style for one answer."""
    if chat:
        return ChatStyle(VOCABULARY)
    return CompletionStyle(VOCABULARY, asked.num_choices * asked.num_prompts, skip_special_tokens=True)


def started_of(events: list[tuple[int, list[Event]]]) -> Started:
    """The first prompt's Started."""
    return next(each for prompt, own in events for each in own if prompt == 0 and isinstance(each, Started))


@given(requests(), st.booleans())
def test_a_stream_says_what_the_whole_says(request: tuple[Asked, list[tuple[int, list[Event]]]], chat: bool) -> None:
    """Joined by choice, the pieces of a stream are the whole answer: texts, logprobs, ends, usage, what was ignored.

    Each event is one line, also for clients that know Unicode's further line ends.
    """
    asked, events = request
    whole = WholeAnswer(asked, style_of(asked, chat=chat), started_of(events))
    for prompt, own in events:
        whole.take(prompt, own)
    answer = json.loads(json.dumps(whole.fields()))
    streamed = StreamedAnswer(asked, style_of(asked, chat=chat), started_of(events))
    data = streamed.begin() + b"".join(streamed.take(prompt, own) for prompt, own in events) + streamed.end()
    lines = data.decode().splitlines()
    assert set(lines[1::2]) == {""}, "a line end inside an event"
    *payloads, done = lines[::2]
    assert done == "data: [DONE]"
    chunks = [json.loads(each.removeprefix("data: ")) for each in payloads]
    assert chunks[0].pop("octavo") == answer.pop("octavo")
    if asked.include_usage:
        last = chunks.pop()
        assert (last["choices"], last["usage"]) == ([], answer["usage"])
        assert all(chunk["usage"] is None for chunk in chunks)
    for chunk in chunks:
        assert {chunk[name] for name in ("id", "model", "system_fingerprint")} == {
            answer[name] for name in ("id", "model", "system_fingerprint")
        }
    pieces = [chunk["choices"][0] for chunk in chunks]
    for choice in answer["choices"]:
        if choice["logprobs"] and not any(choice["logprobs"].values()):
            choice["logprobs"] = None  # a stream has nothing to tell them in
        assert _joined([piece for piece in pieces if piece["index"] == choice["index"]], chat=chat) == choice


def _joined(pieces: list[dict[str, Any]], *, chat: bool) -> dict[str, Any]:
    if chat:
        assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(piece["delta"].get("content", "") for piece in pieces)
        fields: dict[str, Any] = {"message": {"role": "assistant", "content": text, "refusal": None}}
    else:
        fields = {"text": "".join(piece["text"] for piece in pieces)}
    *before, last = pieces
    assert all(piece["finish_reason"] is None for piece in before)
    joined: dict[str, Any] | None = None
    for each in filter(None, (piece["logprobs"] for piece in pieces)):
        if joined is None:
            joined = each
        else:
            joined = {name: None if value is None else value + each[name] for name, value in joined.items()}
    fields |= {"index": last["index"], "logprobs": joined}
    fields |= {name: last[name] for name in ("finish_reason", "stop_reason")}
    if any("prompt_text" in piece for piece in pieces):
        fields["prompt_text"] = "".join(piece.get("prompt_text", "") for piece in pieces)
    if rows := [row for piece in pieces for row in piece.get("prompt_logprobs", ())]:
        fields["prompt_logprobs"] = rows
    return fields


def test_tokens_that_are_no_characters_are_told_as_bytes() -> None:
    """Half a character has a name of its own and its bytes; offsets count whole characters."""
    tokens = TokenTexts(VOCABULARY)
    ids = byte_level().tokenizer.encode("a😀b").ids
    texts = [tokens.text(each) for each in ids]
    assert texts[0] == "a"
    assert texts[-1] == "b"
    assert all(text.startswith("bytes:\\x") for text in texts[1:-1])
    (row,) = rows_of([ids[1]], LogprobColumns(0, pack_floats([-1.5]), b"", b""))
    assert tokens.entry(row) == {
        "token": texts[1],
        "logprob": -1.5,
        "bytes": list(VOCABULARY.pieces[ids[1]]),
        "top_logprobs": [],
    }
    offsets = Offsets(VOCABULARY, skip_special_tokens=True)
    assert [offsets.take(each) for each in ids] == [0, *[1] * (len(ids) - 2), 2]


def test_a_probability_of_nothing_is_a_number() -> None:
    """JSON has no infinity: OpenAI's own stand-in is used."""
    columns = LogprobColumns(1, pack_floats([float("-inf")]), pack_ids([3]), pack_floats([float("-inf")]))
    (row,) = rows_of([2], columns)
    assert (row.logprob, row.top) == (LEAST_LOGPROB, [(3, LEAST_LOGPROB)])


def test_alternatives_have_the_token_itself() -> None:
    """Completions tell alternatives by text: the token's own is there, once; of equal texts the likelier counts."""
    tokens = TokenTexts(VOCABULARY)
    columns = LogprobColumns(2, pack_floats([-3.0]), pack_ids([40, 41]), pack_floats([-1.0, -2.0]))
    (row,) = rows_of([42], columns)
    assert tokens.alternatives(row) == {tokens.text(40): -1.0, tokens.text(41): -2.0, tokens.text(42): -3.0}
    (row,) = rows_of([41], LogprobColumns(2, pack_floats([-2.0]), pack_ids([40, 41]), pack_floats([-1.0, -2.0])))
    assert tokens.alternatives(row) == {tokens.text(40): -1.0, tokens.text(41): -2.0}


STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.ABORTED: 499,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.UNKNOWN: 500,
    grpc.StatusCode.DATA_LOSS: 500,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_every_code_has_a_status(code: grpc.StatusCode) -> None:
    """The status, the reason in lower case as `code`, and Retry-After where another try can help."""
    failure = failure_from(ServiceError(code, "SOME_REASON", "words", retry_delay=1.2))
    assert (failure.status, failure.code, failure.message) == (STATUSES[code], "some_reason", "words")
    assert failure.body["error"].keys() == {"message", "type", "param", "code"}
    assert (failure.headers["retry-after"], failure.headers["retry-after-ms"]) == ("2", "1200")
    silent = failure_from(ServiceError(code, "SOME_REASON", "words"))
    assert ("retry-after" in silent.headers) == (silent.status in (429, 503))


def test_every_bad_field_is_named() -> None:
    """The message names them all, by HTTP's names; param is the first."""
    error = invalid_argument([FieldViolation("sampling.top_p", "is bad"), FieldViolation("n", "is worse")])
    failure = failure_from(error, lambda field: field.removeprefix("sampling."))
    assert (failure.message, failure.param) == ("top_p: is bad; n: is worse", "top_p")
