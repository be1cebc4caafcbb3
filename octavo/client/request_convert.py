"""From arguments to messages. What the wire cannot carry is refused here; what is merely wrong, by the gateway."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from octavo.client.errors import InvalidArgumentError, invalid
from octavo.client.types import GenerateOptions, Message, Messages, Prompt
from octavo.rpc.errors import FieldViolation, invalid_argument
from octavo.v1 import admin_pb2, inference_pb2, model_pb2

_REQUESTS_A_PAGE = 1000
_GROUPS = ("sampling", "stopping", "output")
_TOP_LEVEL = ("model", "n", "seed", "request_id", "best_of", "truncate_prompt_tokens")
_OF_CHATS = "continue_final_message"
_ROLES = {
    "system": inference_pb2.CHAT_ROLE_SYSTEM,
    "user": inference_pb2.CHAT_ROLE_USER,
    "assistant": inference_pb2.CHAT_ROLE_ASSISTANT,
}
_WHOLE_NUMBERS = {FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1, FieldDescriptor.CPPTYPE_UINT64: 2**64 - 1}


def _fields_by_option() -> dict[str, tuple[str, Any]]:
    request: Any = inference_pb2.GenerateRequest.DESCRIPTOR
    fields = {name: ("", request.fields_by_name[name]) for name in _TOP_LEVEL}
    for group in _GROUPS:
        for field in request.fields_by_name[group].message_type.fields:
            fields[field.name] = (group, field)
    return fields


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
        target = getattr(request, group) if group else request
        try:
            if isinstance(value, Mapping):
                for token_id, bias in value.items():
                    getattr(target, name).add(token_id=token_id, bias=bias)
            elif isinstance(value, Sequence) and not isinstance(value, str):
                getattr(target, name).extend(value)
            else:
                setattr(target, name, value)
        except ValueError:
            violations.append(FieldViolation(f"{group}.{name}" if group else name, f"{_range(field)}, is {value!r}"))
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
    request = inference_pb2.ScoreRequest(model=model or "", request_id=request_id or "")
    _set_prompt(request, prompt)
    if isinstance(continuations, str):
        raise TypeError("continuations are a list: put the one text into a list")
    for index, continuation in enumerate(continuations):
        part = request.continuations.add()
        if isinstance(continuation, str):
            part.text = continuation
        else:
            part.token_ids.SetInParent()
            _extend(f"continuations[{index}].token_ids.ids", part.token_ids.ids, continuation)
    return request


def tokenize_request(
    prompt: str | Messages, model: str | None, add_special_tokens: bool | None
) -> inference_pb2.TokenizeRequest:
    """Return the request. Raises TypeError, InvalidArgumentError."""
    request = inference_pb2.TokenizeRequest(model=model or "")
    if add_special_tokens is not None:
        request.add_special_tokens = add_special_tokens
    _set_text_or_chat(request, prompt)
    return request


def count_tokens_request(prompt: str | Messages, model: str | None) -> inference_pb2.CountTokensRequest:
    """Return the request. Raises TypeError, InvalidArgumentError."""
    request = inference_pb2.CountTokensRequest(model=model or "")
    _set_text_or_chat(request, prompt)
    return request


def detokenize_request(
    token_ids: Sequence[int], model: str | None, skip_special_tokens: bool | None
) -> inference_pb2.DetokenizeRequest:
    """Return the request. Raises TypeError, InvalidArgumentError."""
    request = inference_pb2.DetokenizeRequest(model=model or "")
    if skip_special_tokens is not None:
        request.skip_special_tokens = skip_special_tokens
    _extend("token_ids", request.token_ids, token_ids)
    return request


def list_models_request(page_token: str) -> model_pb2.ListModelsRequest:
    """Return the request for a page; "" for the first."""
    return model_pb2.ListModelsRequest(page_token=page_token)


def get_model_request(name: str) -> model_pb2.GetModelRequest:
    """Return the request."""
    return model_pb2.GetModelRequest(name=name)


def list_requests_request(page_token: str) -> admin_pb2.ListRequestsRequest:
    """Return the request for a page; "" for the first."""
    return admin_pb2.ListRequestsRequest(page_size=_REQUESTS_A_PAGE, page_token=page_token)


def cancel_request_request(request_id: str) -> admin_pb2.CancelRequestRequest:
    """Return the request."""
    return admin_pb2.CancelRequestRequest(request_id=request_id)


def get_load_request() -> admin_pb2.GetLoadRequest:
    """Return the request."""
    return admin_pb2.GetLoadRequest()


def _set_text_or_chat(
    request: inference_pb2.TokenizeRequest | inference_pb2.CountTokensRequest, prompt: str | Messages
) -> None:
    if isinstance(prompt, str):
        request.text = prompt
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
        request.text = prompt
    elif isinstance(prompt, Mapping | Message):
        raise TypeError("a prompt is text, token ids or a list of messages: put the one message into a list")
    elif prompt and isinstance(prompt[0], Mapping | Message):
        request.chat.CopyFrom(_chat(prompt))  # type: ignore[arg-type]  # the first element tells which it is
    else:
        request.token_ids.SetInParent()  # an empty list is said to be one, not to be missing
        _extend("token_ids.ids", request.token_ids.ids, prompt)  # type: ignore[arg-type]


def _chat(messages: Messages) -> inference_pb2.ChatInput:
    chat = inference_pb2.ChatInput()
    for index, message in enumerate(messages):
        if isinstance(message, Mapping):
            if message.keys() != {"role", "content"}:
                raise TypeError(f"messages[{index}] has the keys {list(message)}: give role and content")
            role, content = message["role"], message["content"]
        else:
            role, content = message.role, message.content
        if role not in _ROLES:
            raise invalid(f"chat.messages[{index}].role", f"must be system, user or assistant, is {role!r}")
        try:
            chat.messages.add(role=_ROLES[role], content=content)
        except ValueError:
            raise invalid(f"chat.messages[{index}].content", "is not valid Unicode text") from None
    return chat


def _extend(field: str, ids: Any, values: Sequence[int]) -> None:
    try:
        ids.extend(values)
    except ValueError:
        index, bad = next((i, each) for i, each in enumerate(values) if not 0 <= each < 2**32)
        raise invalid(field, f"id {bad} at index {index} is not a token id: from 0 to {2**32 - 1}") from None
    except TypeError as error:
        raise TypeError(f"{field} takes whole numbers: {error}") from None


def _range(field: Any) -> str:
    if field.message_type is not None:
        return "must be a mapping of token ids to numbers"
    if field.is_repeated and field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return "must be a list of valid Unicode texts"
    most = _WHOLE_NUMBERS.get(field.cpp_type)
    if most is not None:
        return f"must be {'whole numbers' if field.is_repeated else 'a whole number'} from 0 to {most}"
    kinds = {FieldDescriptor.CPPTYPE_FLOAT: "a number", FieldDescriptor.CPPTYPE_BOOL: "true or false"}
    return f"must be {kinds.get(field.cpp_type, 'valid Unicode text')}"


def _suggestion(name: str) -> str:
    names = [*OPTION_FIELDS, _OF_CHATS]
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f": it takes {', '.join(names)}"


def _typed(violations: Sequence[FieldViolation]) -> InvalidArgumentError:
    plain = invalid_argument(violations)
    return InvalidArgumentError(plain.code, plain.reason, plain.message, violations=violations)
