"""Chat messages to the text that the model was trained on, by its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.models.errors import ModelError


class ChatTemplateError(Exception):
    """A template refused the messages or failed on them; the words are the template's own."""


@dataclass(frozen=True)
class ChatMessage:
    """One turn. `role` is system, user or assistant, None where the client gave none that is known."""

    role: str | None
    content: str


class ChatTemplate:
    """A model's template: Jinja, as in transformers, in its sandbox."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: variables that templates use, such as bos_token. Raises ModelError for invalid Jinja."""
        # Imported here since it takes over a second, which nobody but a gateway with a chat model is to wait for.
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        self._source = source
        self._special_tokens = dict(special_tokens)
        self._render: Any = render_jinja_template
        try:
            # Compiles it, now rather than in the first request.
            self.render([ChatMessage("user", "")])
        except ChatTemplateError as error:
            if isinstance(error.__cause__, TemplateSyntaxError):
                raise ModelError(f"the chat template is no valid Jinja: {error}") from error

    def render(self, messages: Sequence[ChatMessage], *, continue_final_message: bool = False) -> str:
        """Return the text of the messages with the cue for an assistant's turn at its end. Raises ChatTemplateError.

        `continue_final_message`: it ends with the last message instead, which is to be continued.
        """
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        try:
            texts, _ = self._render(
                [conversation],
                chat_template=self._source,
                add_generation_prompt=not continue_final_message,
                continue_final_message=continue_final_message,
                **self._special_tokens,
            )
        except Exception as error:  # what a template can raise has no common base
            words = str(error) or type(error).__name__
            raise ChatTemplateError(words) from error
        text: str = texts[0]
        return text
