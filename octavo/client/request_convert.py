"""From arguments to messages. What the wire cannot carry is refused here; what is merely wrong, by the gateway."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import duration_pb2
from google.protobuf.descriptor import FieldDescriptor

from octavo.client.errors import InvalidArgumentError, invalid
from octavo.client.types import GenerateOptions, Message, Messages, Prompt
from octavo.rpc.errors import FieldViolation, invalid_argument
from octavo.v1 import admin_pb2, inference_pb2, model_pb2

_REQUESTS_A_PAGE = 1000
_GROUPS = ("sampling", "stopping", "output", "scheduling")
_TOP_LEVEL = ("model", "n", "seed", "request_id", "best_of", "truncate_prompt_tokens", "resume_grace")
_OF_CHATS = "continue_final_message"
# Their fields are named within the message that they stand in.
_OF_CACHE = {"cache_salt": "salt", "bypass_cache": "bypass"}
_ROLES = {
    "system": inference_pb2.CHAT_ROLE_SYSTEM,
    "user": inference_pb2.CHAT_ROLE_USER,
    "assistant": inference_pb2.CHAT_ROLE_ASSISTANT,
}
# Sequences of numbers too, by Python's book; given as a prompt they are text that nobody decoded.
_BYTES = bytes | bytearray | memoryview
_WHOLE_NUMBERS = {
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
}
_DURATION = "google.protobuf.Duration"


def _fields_by_option() -> dict[str, tuple[str, Any]]:
    request: Any = inference_pb2.GenerateRequest.DESCRIPTOR
    fields = {name: ("", request.fields_by_name[name]) for name in _TOP_LEVEL}
    for group in _GROUPS:
        for field in request.fields_by_name[group].message_type.fields:
            fields[field.name] = (group, field)
    cache = request.fields_by_name["cache"].message_type
    return fields | {option: ("cache", cache.fields_by_name[name]) for option, name in _OF_CACHE.items()}


OPTION_FIELDS = _fields_by_option()
"""Of each option: the message that holds it ("" for the request itself), and its FieldDescriptor."""


def generate_request(prompt: Prompt, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """Return the request. Raises TypeError, and InvalidArgumentError with every value that does not fit its field."""
    request = inference_pb2.GenerateRequest()
    _set_prompt(request, prompt)
    violations = []
    for name, value in options.items():
        if name == _OF_CHATS:
            _continue_final_message(request, value)
            continue
        if name not in OPTION_FIELDS:
            raise TypeError(f"{name!r} is no option of a request{_suggestion(name)}")
        group, field = OPTION_FIELDS[name]
        if value is None:
            continue
        try:
            _set(getattr(request, group) if group else request, field, value)
        except (ValueError, OverflowError):
            path = f"{group}.{field.name}" if group else field.name
            violations.append(FieldViolation(path, f"{_range(field)}, is {value!r}"))
        except (TypeError, AttributeError):
            raise TypeError(f"{name}={value!r} is of the wrong type: {_range(field)}") from None
    if violations:
        raise _typed(violations)
    return request


def generate_once_request(prompt: Prompt, options: GenerateOptions) -> inference_pb2.GenerateOnceRequest:
    """Return the request for the whole output at once. Raises as `generate_request`."""
    return inference_pb2.GenerateOnceRequest(request=generate_request(prompt, options))


def score_request(
    prompt: Prompt, continuations: Sequence[str | Sequence[int]], model: str | None, request_id: str | None
) -> inference_pb2.ScoreRequest:
    """Return the request. Raises TypeError, InvalidArgumentError."""
    request = inference_pb2.ScoreRequest()
    _set_text(request, "model", model)
    _set_text(request, "request_id", request_id)
    _set_prompt(request, prompt)
    if not isinstance(continuations, Sequence) or isinstance(continuations, str | _BYTES):
        put = ": put the one text into a list" if isinstance(continuations, str) else ""
        raise TypeError(f"continuations are a list, not {type(continuations).__name__}{put}")
    for index, continuation in enumerate(continuations):
        part = request.continuations.add()
        if isinstance(continuation, str):
            _set_text(part, "text", continuation, f"continuations[{index}].")
        else:
            part.token_ids.SetInParent()
            _extend(f"continuations[{index}].token_ids.ids", part.token_ids.ids, continuation)
    return request


def tokenize_request(
    prompt: str | Messages, model: str | None, add_special_tokens: bool | None
) -> inference_pb2.TokenizeRequest:
    """Return the request. Raises TypeError, InvalidArgumentError."""
    request = inference_pb2.TokenizeRequest()
    _set_text(request, "model", model)
    if add_special_tokens is not None:
        request.add_special_tokens = add_special_tokens
    _set_text_or_chat(request, prompt)
    return request


def count_tokens_request(prompt: str | Messages, model: str | None) -> inference_pb2.CountTokensRequest:
    """Return the request. Raises TypeError, InvalidArgumentError."""
    request = inference_pb2.CountTokensRequest()
    _set_text(request, "model", model)
    _set_text_or_chat(request, prompt)
    return request


def detokenize_request(
    token_ids: Sequence[int], model: str | None, skip_special_tokens: bool | None
) -> inference_pb2.DetokenizeRequest:
    """Return the request. Raises TypeError, InvalidArgumentError."""
    request = inference_pb2.DetokenizeRequest()
    _set_text(request, "model", model)
    if skip_special_tokens is not None:
        request.skip_special_tokens = skip_special_tokens
    _extend("token_ids", request.token_ids, token_ids)
    return request


def drain_request(gateway: str | None, executor: str | None, *, scheduler: bool) -> admin_pb2.DrainRequest:
    """Return the request. Raises TypeError unless exactly one service is named."""
    if (gateway is not None) + (executor is not None) + scheduler != 1:
        raise TypeError("drain takes exactly one of gateway, executor and scheduler")
    if scheduler:
        return admin_pb2.DrainRequest(scheduler=True)
    return admin_pb2.DrainRequest(gateway=gateway, executor=executor)


def list_models_request(page_token: str) -> model_pb2.ListModelsRequest:
    """Return the request for a page; "" for the first."""
    return model_pb2.ListModelsRequest(page_token=page_token)


def get_model_request(name: str) -> model_pb2.GetModelRequest:
    """Return the request. Raises TypeError, InvalidArgumentError."""
    request = model_pb2.GetModelRequest()
    _set_text(request, "name", name)
    return request


def list_requests_request(page_token: str) -> admin_pb2.ListRequestsRequest:
    """Return the request for a page; "" for the first."""
    return admin_pb2.ListRequestsRequest(page_size=_REQUESTS_A_PAGE, page_token=page_token)


def cancel_request_request(request_id: str) -> admin_pb2.CancelRequestRequest:
    """Return the request. Raises TypeError, InvalidArgumentError."""
    request = admin_pb2.CancelRequestRequest()
    _set_text(request, "request_id", request_id)
    return request


def get_load_request() -> admin_pb2.GetLoadRequest:
    """Return the request."""
    return admin_pb2.GetLoadRequest()


def _set(target: Any, field: Any, value: object) -> None:
    """Set a field. Raises what protobuf raises for a value that does not fit it."""
    if _is_duration(field):
        getattr(target, field.name).CopyFrom(_duration(value))
    elif isinstance(value, Mapping):
        for token_id, bias in value.items():
            getattr(target, field.name).add(token_id=token_id, bias=bias)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        getattr(target, field.name).extend(value)
    else:
        setattr(target, field.name, value)


def _duration(seconds: object) -> duration_pb2.Duration:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError("a length of time is a number of seconds")
    duration = duration_pb2.Duration()
    # Raises for what is no number, and for what a Duration cannot hold.
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def _is_duration(field: Any) -> bool:
    return field.message_type is not None and field.message_type.full_name == _DURATION


def _set_text_or_chat(
    request: inference_pb2.TokenizeRequest | inference_pb2.CountTokensRequest, prompt: str | Messages
) -> None:
    if isinstance(prompt, str):
        _set_text(request, "text", prompt)
    else:
        request.chat.CopyFrom(_chat(prompt))


def _continue_final_message(request: inference_pb2.GenerateRequest, value: object) -> None:
    if not isinstance(value, bool | None):
        raise TypeError(f"{_OF_CHATS}={value!r} is of the wrong type: must be true or false")
    if value and not request.HasField("chat"):
        raise TypeError(f"{_OF_CHATS} is for conversations: the prompt is none")
    if value:
        request.chat.continue_final_message = True


def _set_prompt(request: inference_pb2.GenerateRequest | inference_pb2.ScoreRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        _set_text(request, "text", prompt)
    elif not isinstance(prompt, Sequence) or isinstance(prompt, _BYTES):
        put = ": put the one message into a list" if isinstance(prompt, Mapping | Message) else ""
        raise TypeError(f"a prompt is text, token ids or a list of messages, not {type(prompt).__name__}{put}")
    elif prompt and isinstance(prompt[0], Mapping | Message):
        request.chat.CopyFrom(_chat(prompt))  # type: ignore[arg-type]  # the first element tells which it is
    else:
        request.token_ids.SetInParent()  # an empty list is said to be one, not to be missing
        _extend("token_ids.ids", request.token_ids.ids, prompt)  # type: ignore[arg-type]


def _chat(messages: Messages) -> inference_pb2.ChatInput:
    if not isinstance(messages, Sequence) or isinstance(messages, _BYTES):
        raise TypeError(f"a conversation is a list of messages, not {type(messages).__name__}")
    chat = inference_pb2.ChatInput()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if isinstance(message, Mapping):
            if message.keys() != {"role", "content"}:
                raise TypeError(f"{where} has the keys {list(message)}: give role and content")
            role, content = message["role"], message["content"]
        elif isinstance(message, Message):
            role, content = message.role, message.content
        else:
            raise TypeError(f"{where} is no message but {type(message).__name__}: give role and content")
        if not isinstance(role, str):
            raise TypeError(f"{where}.role must be text, is {role!r}")
        if role not in _ROLES:
            raise invalid(f"chat.messages[{index}].role", f"must be system, user or assistant, is {role!r}")
        _set_text(chat.messages.add(role=_ROLES[role]), "content", content, f"chat.messages[{index}].")
    return chat


def _set_text(message: Any, name: str, text: str | None, path: str = "") -> None:
    """Set a field that holds text; None: leave it empty. Raises TypeError, InvalidArgumentError."""
    if text is None:
        return
    if not isinstance(text, str):
        raise TypeError(f"{path}{name} must be text, is {type(text).__name__}")
    try:
        setattr(message, name, text)
    except ValueError:
        raise invalid(f"{path}{name}", "is not valid Unicode text") from None


def _extend(field: str, ids: Any, values: Sequence[int]) -> None:
    if isinstance(values, _BYTES):
        raise TypeError(f"{field} takes whole numbers, not {type(values).__name__}")
    try:
        ids.extend(values)
    except ValueError:
        index, bad = next((i, each) for i, each in enumerate(values) if not 0 <= each < 2**32)
        raise invalid(field, f"id {bad} at index {index} is not a token id: from 0 to {2**32 - 1}") from None
    except TypeError as error:
        raise TypeError(f"{field} takes whole numbers: {error}") from None


def _range(field: Any) -> str:
    if _is_duration(field):
        return "must be a number of seconds"
    if field.message_type is not None:
        return "must be a mapping of token ids to numbers"
    if field.is_repeated and field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return "must be a list of valid Unicode texts"
    if (bounds := _WHOLE_NUMBERS.get(field.cpp_type)) is not None:
        least, most = bounds
        return f"must be {'whole numbers' if field.is_repeated else 'a whole number'} from {least} to {most}"
    kinds = {FieldDescriptor.CPPTYPE_FLOAT: "a number", FieldDescriptor.CPPTYPE_BOOL: "true or false"}
    return f"must be {kinds.get(field.cpp_type, 'valid Unicode text')}"


def _suggestion(name: str) -> str:
    names = [*OPTION_FIELDS, _OF_CHATS]
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f": it takes {', '.join(names)}"


def _typed(violations: Sequence[FieldViolation]) -> InvalidArgumentError:
    plain = invalid_argument(violations)
    return InvalidArgumentError(plain.code, plain.reason, plain.message, violations=violations)
