"""Calls of every kind against a whole cell: each has an answer of its contract, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import grpc.aio
import pytest
from factories import make_llama
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from hypothesis import example, given, settings
from hypothesis import strategies as st
from proto_strategies import API_KEY, Call, call_of, calls, response_class
from stack import TIMEOUT, in_process, wait_idle
from stack_client import read_stream

from octavo.models.prepare import prepare
from octavo.models.prepared import PreparedModel, open_prepared
from octavo.rpc.channel import open_channel
from octavo.rpc.errors import DOMAIN
from octavo.v1 import admin_pb2, inference_pb2

# Under the thorough profile this looks for minutes.
pytestmark = pytest.mark.timeout(1800)

MAX_MODEL_LEN = 64
FLAGS = {"kv_memory": "78KiB"}
"""Memory for three sequences of the longest: many choices at once preempt one another."""
MOST_TRAILERS = 8 * 1024
"""Bytes of trailers that a gRPC client takes which nobody has configured."""
SAMPLING_FLOATS = [
    each.name
    for each in inference_pb2.SamplingConfig.DESCRIPTOR.fields
    if each.cpp_type == each.CPPTYPE_FLOAT and not each.is_repeated
]
SEGMENT = re.compile(r"(\w+)(?:\[(\d+)\])?")


class Fuzzed:
    """A cell with a connection to each of its public ports, on an event loop that runs while it is asked."""

    def __init__(self, runner: asyncio.Runner, model: PreparedModel, api_keys: Path) -> None:
        self.codes: Counter[grpc.StatusCode] = Counter()
        self.errors: list[logging.LogRecord] = []
        self._runner = runner
        self._model = model
        self._flags = {**FLAGS, "api_keys": str(api_keys)}

    def start(self) -> None:
        """Start the cell."""
        self._runner.run(self._start())

    def stop(self) -> None:
        """Stop the cell. It ends well: no task of it is left."""
        self._runner.run(self._opened.aclose())

    def check(self, batch: Sequence[Call]) -> None:
        """Make calls at once; every one is answered as its contract says, and the cell is idle after them."""
        self.errors.clear()
        try:
            self._runner.run(self._check(batch))
            assert not self.errors, [record.getMessage() for record in self.errors]
        except BaseException:
            # What one example has broken is not to be the fault of the next, smaller one.
            with contextlib.suppress(Exception):
                self.stop()
            self.start()
            raise

    async def _start(self) -> None:
        async with contextlib.AsyncExitStack() as opened:
            self._stack = await opened.enter_async_context(in_process(self._model, flags=self._flags))
            self._public = await opened.enter_async_context(open_channel(self._stack.gateway_address))
            self._admin = await opened.enter_async_context(open_channel(self._stack.admin_address))
            self._opened = opened.pop_all()

    async def _check(self, batch: Sequence[Call]) -> None:
        async with asyncio.timeout(2 * TIMEOUT):
            # All of them to their end: a cancelled neighbour would hide what went wrong.
            results = await asyncio.gather(*map(self._make, batch), return_exceptions=True)
        for result in results:
            if result is not None:
                raise result
        load = await wait_idle(self._stack)
        assert load.num_desyncs == 0
        assert load.num_gateways == 1
        assert [each.model for each in load.executors] == [self._model.name]
        assert not len(self._stack.gateway.live), "the gateway holds a request that nobody waits for"

    async def _make(self, call: Call) -> None:
        channel = self._admin if call.method.startswith("AdminService/") else self._public
        shape = channel.unary_stream if call.descriptor.server_streaming else channel.unary_unary
        path = f"/{call.descriptor.containing_service.full_name}/{call.descriptor.name}"
        ask = shape(path, response_deserializer=response_class(call.method).FromString)
        made: Any = ask(call.data, metadata=call.metadata, timeout=call.timeout)
        try:
            if call.cancel_after is not None:
                await leave(made, call)
            elif call.descriptor.server_streaming:
                output = await read_stream(made)
                check_stream(call.request(), output)
            else:
                response = await made
                CHECKS.get(call.method, check_nothing)(call.request(), response)
        except grpc.aio.AioRpcError as error:
            self.codes[error.code()] += 1
            check_refusal(call, error)
        except asyncio.CancelledError:
            assert call.cancel_after is not None, "a call was cancelled, and not by its client"
            assert made.cancelled()
        else:
            self.codes[grpc.StatusCode.OK] += 1


async def leave(made: Any, call: Call) -> None:
    """Read as many messages as the client waits for, then cancel."""
    if call.descriptor.server_streaming:
        for _ in range(call.cancel_after or 0):
            if await made.read() is grpc.aio.EOF:
                break
    else:
        await asyncio.sleep(0)
    made.cancel()
    await made.code()


# Answers.


def check_nothing(request: Any, response: Any) -> None:
    """What any message of the right type is."""


def check_stream(request: inference_pb2.GenerateRequest, output: Any) -> None:
    """Every choice that was asked for has come to its end, within its limits; `read_stream` has seen to the order."""
    assert len(output.choices) == (request.n if request.HasField("n") else 1)
    assert output.started.request_id
    assert not request.HasField("seed") or output.started.seed == request.seed
    asks_for_prompt = request.output.echo or request.output.HasField("prompt_logprobs")
    assert len(output.prompt.token_ids) == (output.started.prompt_tokens if asks_for_prompt else 0)
    for choice in output.choices:
        check_choice(request, output.started, choice.text, choice.token_ids, choice.logprobs, choice.finished)


def check_once(request: inference_pb2.GenerateOnceRequest, response: inference_pb2.GenerateOnceResponse) -> None:
    """The same of an answer in one message."""
    asked = request.request
    num_choices = asked.n if asked.HasField("n") else 1
    assert [choice.index for choice in response.choices] == list(range(num_choices))
    assert response.usage.prompt_tokens == response.started.prompt_tokens > 0
    assert response.usage.completion_tokens >= sum(len(choice.token_ids) for choice in response.choices)
    for choice in response.choices:
        assert choice.finished.choice == choice.index
        check_choice(asked, response.started, choice.text, choice.token_ids, choice.logprobs, choice.finished)


def check_choice(
    request: inference_pb2.GenerateRequest,
    started: inference_pb2.Started,
    text: str,
    token_ids: Sequence[int],
    logprobs: Sequence[inference_pb2.TokenLogprobs],
    finished: inference_pb2.ChoiceFinished,
) -> None:
    """A choice is as long as it may be, has the logprobs that were asked for, and tells why it ended."""
    assert text.encode().decode() == text
    assert len(token_ids) == finished.completion_tokens <= started.max_tokens
    assert started.prompt_tokens + started.max_tokens <= MAX_MODEL_LEN
    assert finished.reason in (inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH)
    is_stop = finished.reason == inference_pb2.FINISH_REASON_STOP
    assert is_stop == (finished.WhichOneof("stopped_by") is not None)
    wants_logprobs = request.output.HasField("top_logprobs")
    assert len(logprobs) == (len(token_ids) if wants_logprobs else 0)
    for each in logprobs:
        assert each.logprob <= 0
        assert len(each.top) == request.output.top_logprobs
    if finished.WhichOneof("stopped_by") == "stop_string":
        assert finished.stop_string in request.stopping.stop
    if not request.stopping.include_stop:
        stops = [stop for stop in request.stopping.stop if request.stopping.min_tokens == 0 and stop in text]
        assert not stops, f"a stop string was shown: {stops}"


def check_scores(request: inference_pb2.ScoreRequest, response: inference_pb2.ScoreResponse) -> None:
    """Every continuation has its score, every token of it a share of that."""
    assert len(response.scores) == len(request.continuations)
    for score, continuation in zip(response.scores, request.continuations, strict=True):
        assert len(score.logprobs) == len(score.token_ids) > 0
        assert math.isclose(score.logprob, math.fsum(score.logprobs), rel_tol=1e-6, abs_tol=1e-6)
        if continuation.HasField("token_ids"):
            assert score.token_ids == continuation.token_ids.ids


CHECKS = {"InferenceService/GenerateOnce": check_once, "InferenceService/Score": check_scores}


# Refusals.


def check_refusal(call: Call, error: grpc.aio.AioRpcError) -> None:
    """A refusal is one that this call can have, is typed, and names fields that there are."""
    code = error.code()
    assert code in possible_codes(call), f"{code}: {error.details()}"
    trailers = tuple(error.trailing_metadata() or ())
    if code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED) and not trailers:
        return  # the client's own timer, or its leaving, was first
    assert size_of(error.details() or "", trailers) < MOST_TRAILERS
    details = dict(trailers).get("grpc-status-details-bin")
    assert isinstance(details, bytes), f"{code} without details: {error.details()}"
    status = status_pb2.Status.FromString(details)
    assert (status.code, status.message) == (code.value[0], error.details())
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    # Unpack tells whether a detail is of its type, so neither list is empty by mistake.
    assert sum(detail.Unpack(info) for detail in status.details) == 1
    num_bad_requests = sum(detail.Unpack(bad_request) for detail in status.details)
    assert info.domain == DOMAIN
    assert re.fullmatch("[A-Z][A-Z_]+", info.reason)
    if code is not grpc.StatusCode.INVALID_ARGUMENT:
        assert num_bad_requests == 0
        return
    if info.reason == "MALFORMED_MESSAGE":
        with pytest.raises(DecodeError):
            call.request()
        return
    assert num_bad_requests == 1
    assert bad_request.field_violations
    for violation in bad_request.field_violations:
        assert violation.description
        assert leads_to_a_field(violation.field, call), f"no field {violation.field}"


def possible_codes(call: Call) -> set[grpc.StatusCode]:
    """How a call may end that does not end well. The cell is up, and nothing is full."""
    codes = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
    if call.timeout is not None or has_time_limits(call):
        codes.add(grpc.StatusCode.DEADLINE_EXCEEDED)
    if call.cancel_after is not None:
        codes.add(grpc.StatusCode.CANCELLED)
    if has_wrong_checksum(call):
        codes.add(grpc.StatusCode.UNAVAILABLE)
    if ("authorization", f"Bearer {API_KEY}") not in call.metadata:
        codes.add(grpc.StatusCode.UNAUTHENTICATED)
    return codes


def has_wrong_checksum(call: Call) -> bool:
    """Tell whether the bytes end with a checksum that is not theirs, or have one before their end."""
    data, tag = call.data, b"\x8d\x01"  # field 17, fixed32
    if data[-6:-4] == tag:
        return zlib.crc32(data[:-6]) != int.from_bytes(data[-4:], "little")
    try:
        request = call.request()
    except DecodeError:
        return False
    return "checksum" in request.DESCRIPTOR.fields_by_name and request.HasField("checksum")


def has_time_limits(call: Call) -> bool:
    """Tell whether the request itself says until when it is to run."""
    try:
        request = call.request()
    except DecodeError:
        return False
    request = getattr(request, "request", request)
    return hasattr(request, "scheduling") and any(
        request.scheduling.HasField(name) for name in ("queue_ttl", "first_token_target")
    )


def leads_to_a_field(path: str, call: Call) -> bool:
    """Tell whether a path leads from the request to a field, a oneof, or a number that is no field.

    What GenerateOnce wraps is named as Generate names it; a number is named from the top.
    """
    request = call.request()
    roots = [request, request.request] if call.method == "InferenceService/GenerateOnce" else [request]
    return any(_leads_on(path.split("."), root) for root in roots)


def _leads_on(names: list[str], message: Any) -> bool:
    first, *rest = names
    descriptor: Descriptor = message.DESCRIPTOR
    if first.isdigit() and not rest:
        return True
    match = SEGMENT.fullmatch(first)
    if match is None:
        return False
    name, index = match[1], match[2]
    if name in descriptor.oneofs_by_name:
        return not rest and index is None
    if name not in descriptor.fields_by_name:
        return False
    value = getattr(message, name)
    if index is not None:
        if not descriptor.fields_by_name[name].is_repeated or int(index) >= len(value):
            return False
        value = value[int(index)]
    elif rest and descriptor.fields_by_name[name].is_repeated:
        return False
    if not rest:
        return True
    return hasattr(value, "DESCRIPTOR") and _leads_on(rest, value)


def size_of(message: str, trailers: Sequence[tuple[str, str | bytes]]) -> int:
    """Bytes that the transport counts: names, values as they are encoded, and 32 for each (RFC 9113, 6.5.2)."""
    fields = [("grpc-status", "99"), ("grpc-message", quote(message, safe="".join(map(chr, range(0x20, 0x7F)))))]
    for key, value in trailers:
        fields.append((key, base64.b64encode(value).decode() if isinstance(value, bytes) else value))
    return sum(len(key) + len(value) + 32 for key, value in fields)


def refused_for_everything() -> inference_pb2.GenerateRequest:
    """A request of which nearly every field is bad, the long lists in every element."""
    request = inference_pb2.GenerateRequest(
        n=2**32 - 1, best_of=2**32 - 1, truncate_prompt_tokens=0, request_id="\U0001f600" * 200
    )
    for name in SAMPLING_FLOATS:
        setattr(request.sampling, name, -3e38)
    for _ in range(1024):
        request.sampling.logit_bias.add(token_id=2**32 - 1, bias=float("nan"))
    request.sampling.bad_words.extend([""] * 64)
    request.stopping.stop.extend([""] * 16)
    request.stopping.stop_token_ids.extend([2**32 - 1] * 65)
    request.output.top_logprobs = request.output.prompt_logprobs = 2**32 - 1
    for _ in range(100):
        request.chat.messages.add()
    return request


def otherwise_good(**sampling: float) -> Call:
    """A call that is good but for what `sampling` says."""
    request = inference_pb2.GenerateRequest(text="the", sampling=inference_pb2.SamplingConfig(**sampling))
    request.stopping.max_tokens = 2
    return call_of("InferenceService/Generate", request)


@pytest.fixture
def fuzzed(tmp_path: Path) -> Iterator[Fuzzed]:
    """A cell of a tiny model, with an API key."""
    folder = make_llama(tmp_path / "tiny", seed=1, max_position_embeddings=MAX_MODEL_LEN)
    prepare(str(folder))
    keys = tmp_path / "keys"
    keys.write_text(f"somebody {API_KEY}\n")
    with asyncio.Runner() as runner:
        cell = Fuzzed(runner, open_prepared(str(folder)), keys)
        handler = logging.Handler(logging.ERROR)
        # grpc calls it an error that a client left just as it was answered.
        handler.addFilter(lambda record: not record.name.startswith("grpc."))
        handler.emit = cell.errors.append  # type: ignore[method-assign]
        logging.getLogger().addHandler(handler)
        try:
            cell.start()
            yield cell
            cell.stop()
        finally:
            logging.getLogger().removeHandler(handler)
        assert not cell.errors, [record.getMessage() for record in cell.errors]


def test_every_call_has_an_answer_of_its_contract(fuzzed: Fuzzed) -> None:
    """No call of the public API ends in INTERNAL or UNKNOWN, hangs, breaks its contract, or leaves a block held."""

    @settings(max_examples=3 * settings().max_examples)
    @example([call_of("InferenceService/Generate", refused_for_everything())])
    @example([call_of("AdminService/GetKvState", admin_pb2.GetKvStateRequest(executor="\x1f" * 20_000))])
    @example([otherwise_good(**{name: float("nan")}) for name in SAMPLING_FLOATS])
    @example([otherwise_good(**{name: 2.0**-149}) for name in SAMPLING_FLOATS])
    @example([call_of("InferenceService/Generate", inference_pb2.GenerateRequest(text="the", checksum=0))])
    @given(st.lists(calls(), min_size=1, max_size=6))
    def check(batch: list[Call]) -> None:
        fuzzed.check(batch)

    check()
    total = fuzzed.codes.total()
    # Else the calls have become such that they prove little.
    assert fuzzed.codes[grpc.StatusCode.OK] > total / 4
    assert fuzzed.codes[grpc.StatusCode.INVALID_ARGUMENT] > total / 20
