"""Hypothesis strategies for calls of the public API, made from the descriptors of its contracts.

Most calls are a good request with a few fields changed: one that is bad all over is refused for its first faults, and
nothing behind the checks ever sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from octavo.v1 import admin_pb2, inference_pb2, model_pb2

SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    model_pb2.DESCRIPTOR.services_by_name["ModelService"],
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
)
METHODS: dict[str, MethodDescriptor] = {
    f"{service.name}/{method.name}": method for service in SERVICES for method in service.methods
}
"""Every public rpc, as `Service/Method`."""
_STREAMED = "InferenceService/Generate"
_AT_ONCE = "InferenceService/GenerateOnce"
API_KEY = "a-key-for-the-fuzz"
MOST_LISTED = 3
"""Most elements that one change puts into a list, but for the few lists that are long on purpose."""
SHORT = 6
"""Most tokens of a good request: it is to run, and to be over soon."""

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True)
class Call:
    """A call as it goes over the wire. `cancel_after`: messages read before the client leaves; None: it stays."""

    method: str
    data: bytes
    metadata: Metadata = (("authorization", f"Bearer {API_KEY}"),)
    timeout: float | None = None
    cancel_after: int | None = None

    @property
    def descriptor(self) -> MethodDescriptor:
        """The rpc in its contract."""
        return METHODS[self.method]

    def request(self) -> Any:
        """The message; raises DecodeError where the bytes are none."""
        return request_class(self.method).FromString(self.data)


def request_class(method: str) -> type[Message]:
    """The class of an rpc's request."""
    return GetMessageClass(METHODS[method].input_type)


def response_class(method: str) -> type[Message]:
    """The class of an rpc's response, or of one message of its stream."""
    return GetMessageClass(METHODS[method].output_type)


def call_of(method: str, request: Message, **options: Any) -> Call:
    """A call with a request that is a message."""
    return Call(method, request.SerializeToString(), **options)


# Hypothesis is fond of the first and of the last of a range: what is to be seldom lies within.
_seldom = st.integers(0, 30)

# Values of single fields.

_UINT32 = st.sampled_from((0, 1, 2, 3, 20, 21, 128, 129, 319, 320, 2**31 - 1, 2**31, 2**32 - 1)) | st.integers(0, SHORT)
_UINT64 = st.sampled_from((0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1))
_FLOATS = (
    st.sampled_from((0.0, -0.0, 1.0, 0.5, 2.0, -2.0, -100.0, 100.0, 1e-5, 2.0**-149, 3e38))
    | st.sampled_from((float("nan"), float("inf"), float("-inf")))
    | st.floats(0, 1, width=32)
    | st.floats(width=32)
)
_TEXTS = (
    st.text(max_size=12)
    | st.sampled_from(("", " ", "\x00", "the", "the sea", "<|im_end|>", "\U0001f600", "\ufffd", "e\u0301", "{{ 1/0 }}"))
    | st.builds(
        lambda text, times: text * times, st.text(min_size=1, max_size=2), st.sampled_from((129, 300, 1025, 20_000))
    )
)
_UNKNOWN_NUMBERS = (-1, -(2**31), 2**31 - 1)


def _scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Values of a field that is no message, or of one element of it: good ones, and every kind of bad one."""
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_UINT32:
            return _UINT32
        case FieldDescriptor.CPPTYPE_UINT64:
            return _UINT64
        case FieldDescriptor.CPPTYPE_FLOAT:
            return _FLOATS
        case FieldDescriptor.CPPTYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.CPPTYPE_STRING:
            return _TEXTS
        case FieldDescriptor.CPPTYPE_ENUM:
            return st.sampled_from((*field.enum_type.values_by_number, *_UNKNOWN_NUMBERS))
    raise AssertionError(f"{field.full_name} has a type that no public request had before: say what its values are")


def _change(draw: st.DrawFn, message: Message) -> None:
    """Change one field, of the message or of one that it holds or may hold."""
    descriptor: Descriptor = message.DESCRIPTOR
    if not descriptor.fields:
        return
    field = draw(st.sampled_from(tuple(descriptor.fields)))
    if draw(_seldom) in (4, 5, 6):
        message.ClearField(field.name)
        return
    held: Any = getattr(message, field.name)
    if field.is_repeated:
        _change_list(draw, held, field)
    elif field.message_type is not None:
        # As it is, an empty message is a choice of the oneof too.
        held.SetInParent()
        if draw(_seldom) not in (4, 5, 6):
            _change(draw, held)
    else:
        setattr(message, field.name, draw(_scalars(field)))


def _change_list(draw: st.DrawFn, held: Any, field: FieldDescriptor) -> None:
    if field.message_type is not None:
        part = held[draw(st.integers(0, len(held) - 1))] if held and draw(st.booleans()) else held.add()
        for _ in range(draw(st.integers(0, MOST_LISTED))):
            _change(draw, part)
        if draw(_seldom) in (4, 5):
            held.extend([part] * draw(st.sampled_from((20, 130, 1030))))
        return
    held.extend(draw(st.lists(_scalars(field), max_size=MOST_LISTED)))
    if draw(_seldom) in (4, 5):
        held.extend([draw(_scalars(field))] * draw(st.sampled_from((20, 130, 1030))))


# Good requests.

_INPUTS: Sequence[Callable[[Any], object]] = (
    lambda request: setattr(request, "text", "the sea and the land"),
    lambda request: request.token_ids.ids.extend(range(40, 46)),
    lambda request: request.token_ids.ids.extend([300] * 40),
    lambda request: request.chat.messages.add(role=inference_pb2.CHAT_ROLE_USER, content="the sea"),
)
_TEXT_OR_CHAT = (_INPUTS[0], _INPUTS[3])


def _good_generate(draw: st.DrawFn, request: Any) -> None:
    draw(st.sampled_from(_INPUTS))(request)
    request.stopping.max_tokens = draw(st.integers(0, SHORT))
    if draw(st.booleans()):
        request.sampling.temperature = 0
    if draw(st.booleans()):
        request.n = draw(st.integers(1, 3))
    if draw(st.booleans()):
        request.output.echo = draw(st.booleans())
        request.output.top_logprobs = draw(st.integers(0, 3))
        request.output.prompt_logprobs = draw(st.integers(0, 3))


def _good_once(draw: st.DrawFn, request: Any) -> None:
    _good_generate(draw, request.request)
    if draw(st.booleans()):
        request.request.best_of = request.request.n + draw(st.integers(0, 2))


def _good_score(draw: st.DrawFn, request: Any) -> None:
    draw(st.sampled_from(_INPUTS))(request)
    for _ in range(draw(st.integers(1, 3))):
        continuation = request.continuations.add()
        draw(st.sampled_from(_INPUTS[:2]))(continuation)


def _good_detokenize(draw: st.DrawFn, request: Any) -> None:
    request.token_ids.extend(draw(st.lists(st.integers(0, 319), max_size=20)))


def _good_cancel(draw: st.DrawFn, request: Any) -> None:
    request.request_id = f"{draw(st.integers(0, 2**128 - 1)):032x}-{draw(st.sampled_from((1, 2**64 - 1, 2**64)))}"


def _nothing(draw: st.DrawFn, request: Any) -> None:
    pass


_GOOD: dict[str, Callable[[st.DrawFn, Any], None]] = {
    _STREAMED: _good_generate,
    _AT_ONCE: _good_once,
    "InferenceService/Score": _good_score,
    "InferenceService/Tokenize": lambda draw, request: draw(st.sampled_from(_TEXT_OR_CHAT))(request),
    "InferenceService/CountTokens": lambda draw, request: draw(st.sampled_from(_TEXT_OR_CHAT))(request),
    "InferenceService/Detokenize": _good_detokenize,
    "ModelService/ListModels": _nothing,
    "ModelService/GetModel": lambda draw, request: setattr(request, "name", "tiny"),
    "AdminService/ListRequests": _nothing,
    "AdminService/CancelRequest": _good_cancel,
    "AdminService/GetLoad": _nothing,
}


@st.composite
def requests(draw: st.DrawFn, method: str) -> Any:
    """A request: a good one with up to four changes, or seldom one that begins empty and has up to eight."""
    request = request_class(method)()
    if draw(_seldom) not in (4, 5, 6):
        _GOOD[method](draw, request)
        num_changes = draw(st.sampled_from((0, 0, 0, 1, 1, 1, 2, 3, 4)))
    else:
        num_changes = draw(st.integers(0, 8))
    for _ in range(num_changes):
        _change(draw, request)
    return request


# What is no message of the contract, and what comes beside it.

_FOREIGN = (
    b"\x98\x06\x01",  # field 99, a varint
    b"\x9b\x06\x9c\x06",  # field 99, an empty group
    b"\xfa\xff\xff\xff\x0f\x02hi",  # the highest field number, bytes
    b"\x0a\x02\xed\xa0",  # field 1, a text that is no UTF-8
    b"\x12\x03\xed\xa0\x80",  # field 2, a text that is half of a surrogate pair
    b"\x08\x01",  # field 1, of another wire type than a text's
    b"\x0a\x7f",  # field 1, longer than what is there
    b"\x00",  # a field of number 0
    b"\x0b" * 200,  # groups in groups, none of which ends
)


@st.composite
def _wire(draw: st.DrawFn, method: str) -> bytes:
    request = draw(requests(method))
    data: bytes = request.SerializeToString()
    match draw(_seldom):
        case 1:
            return draw(st.binary(max_size=30))
        case 2:
            return data[: draw(st.integers(0, len(data)))]
        case 3:
            return data + draw(st.sampled_from(_FOREIGN))
    return data


_ascii = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=40)
_authorizations: st.SearchStrategy[Metadata] = st.sampled_from(
    (
        (),
        (("authorization", ""),),
        (("authorization", "Bearer"),),
        (("authorization", "Bearer " + "k" * 4000),),
        (("authorization", f"Basic {API_KEY}"),),
        (("authorization", "Bearer wrong"), ("authorization", f"Bearer {API_KEY}")),
    )
)
_others: st.SearchStrategy[Metadata] = st.tuples(
    st.tuples(st.sampled_from(("traceparent", "x-octavo-request-id", "user")), _ascii | st.just("0" * 4000))
    | st.tuples(st.sampled_from(("traceparent-bin", "authorization-bin")), st.binary(max_size=40))
)


# Seconds.
_timeouts = st.sampled_from((0.003, 0.02, 0.0, 1e-6, 30.0, 1e9, -1.0))


@st.composite
def _metadata(draw: st.DrawFn) -> Metadata:
    key = (("authorization", f"Bearer {API_KEY}"),)
    match draw(_seldom):
        case 1:
            return draw(_authorizations)
        case 2 | 3:
            return (*key, *draw(_others))
    return key


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """A call of any public rpc; more often than not one that generates."""
    method = draw(
        st.sampled_from((*METHODS, *["InferenceService/Generate"] * 6, *["InferenceService/GenerateOnce"] * 3))
    )
    return Call(
        method,
        draw(_wire(method)),
        draw(_metadata()),
        timeout=draw(_timeouts) if draw(_seldom) in (4, 5, 6) else None,
        cancel_after=draw(st.integers(0, 5)) if draw(_seldom) in (4, 5, 6) else None,
    )
