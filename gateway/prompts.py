"""Inputs to prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.chat import ChatMessage, ChatTemplateError
from gateway.requests import ChatInput, Input, TextInput, TokenIdsInput
from gateway.served_models import ServedModel
from octavo.rpc.errors import FieldViolation

# What a template says travels in the trailers of the answer, which are small.
_MAX_TEMPLATE_WORDS = 300


async def tokenize(
    model: ServedModel, given: Input, *, add_special_tokens: bool = True
) -> tuple[list[int], list[FieldViolation]]:
    """Return the tokens of an input that `validation.check_input` passed, or what the chat template has against it.

    `add_special_tokens` concerns text alone: token ids are taken as they are, and a template writes its own.
    """
    match given:
        case TokenIdsInput(token_ids):
            return list(token_ids), []
        case TextInput(text):
            return await model.tokenizer.encode(text, add_special_tokens=add_special_tokens), []
        case ChatInput(messages):
            try:
                text = await _render(model, messages)
            except ChatTemplateError as error:
                words = str(error)[:_MAX_TEMPLATE_WORDS]
                return [], [FieldViolation("chat.messages", f"the chat template refused them: {words}")]
            return await model.tokenizer.encode(text, add_special_tokens=False), []


async def _render(model: ServedModel, messages: Sequence[ChatMessage]) -> str:
    template = model.chat_template
    assert template is not None, "check_input refuses chats where there is no template"
    size = sum(len(message.content) for message in messages)
    return await model.tokenizer.run(size, lambda: template.render(messages))
