"""Inputs, continuations and bad words to tokens."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.chat import ChatTemplateError
from gateway.requests import ChatInput, Continuation, Input, TextInput, TokenIdsInput
from gateway.served_models import ServedModel
from gateway.validation import MAX_BAD_WORD_TOKENS, MAX_NAMED_ELEMENTS
from octavo.rpc.errors import FieldViolation

# What a template says travels in the trailers of the answer, which are small.
_MAX_TEMPLATE_WORDS = 300
_BEFORE_A_SPACE = "a"


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
        case ChatInput():
            try:
                text = await _render(model, given)
            except ChatTemplateError as error:
                words = str(error)[:_MAX_TEMPLATE_WORDS]
                return [], [FieldViolation("chat.messages", f"the chat template refused them: {words}")]
            return await model.tokenizer.encode(text, add_special_tokens=False), []


async def tokenize_continuations(
    model: ServedModel, continuations: Sequence[Continuation | None]
) -> tuple[list[list[int]], list[FieldViolation]]:
    """Return the tokens of continuations that `validation.check_continuations` passed, or which of them have none."""
    results: list[list[int]] = []
    violations: list[FieldViolation] = []
    for index, continuation in enumerate(continuations):
        assert continuation is not None, "check_continuations refuses these"
        token_ids, _ = await tokenize(model, continuation, add_special_tokens=False)
        if not token_ids and len(violations) < MAX_NAMED_ELEMENTS:
            violations.append(FieldViolation(f"continuations[{index}]", "is empty: it has no tokens"))
        results.append(token_ids)
    return results, violations


async def tokenize_bad_words(
    model: ServedModel, words: Sequence[str]
) -> tuple[tuple[tuple[int, ...], ...], list[FieldViolation]]:
    """Return the runs of tokens that write a bad word, at the start of a text and behind a space, each run once.

    Or what is wrong with the tokens of words that `validation.check_bad_words` passed.
    """
    runs: dict[tuple[int, ...], None] = {}
    violations: list[FieldViolation] = []
    for index, word in enumerate(words):
        variants = [await model.tokenizer.encode(word, add_special_tokens=False), await _behind_a_space(model, word)]
        longest = max(map(len, variants))
        if not all(variants) or longest > MAX_BAD_WORD_TOKENS:
            description = f"has {longest} tokens, must have 1 to {MAX_BAD_WORD_TOKENS}"
            violations.append(FieldViolation(f"sampling.bad_words[{index}]", description))
        runs.update(dict.fromkeys(map(tuple, variants)))
    return tuple(runs), violations


async def _behind_a_space(model: ServedModel, word: str) -> list[int]:
    """Return the tokens of a word that follows another one."""
    before = await model.tokenizer.encode(_BEFORE_A_SPACE, add_special_tokens=False)
    both = await model.tokenizer.encode(f"{_BEFORE_A_SPACE} {word}", add_special_tokens=False)
    if both[: len(before)] == before:
        return both[len(before) :]
    return await model.tokenizer.encode(f" {word}", add_special_tokens=False)


async def _render(model: ServedModel, chat: ChatInput) -> str:
    template = model.chat_template
    assert template is not None, "check_input refuses chats where there is no template"
    size = sum(len(message.content) for message in chat.messages)
    continues = chat.continue_final_message
    return await model.tokenizer.run(size, lambda: template.render(chat.messages, continue_final_message=continues))
