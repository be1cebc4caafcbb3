"""Chat templates: rendered as transformers does, with errors in the template's own words."""

from __future__ import annotations

import pytest
from prepared_samples import CHAT_TEMPLATE

from gateway.chat import ChatMessage, ChatTemplate, ChatTemplateError
from octavo.models.errors import ModelError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def test_rendering() -> None:
    """Messages come in order, with the special tokens by name and the cue for the assistant at the end."""
    template = ChatTemplate(CHAT_TEMPLATE, SPECIAL)
    messages = [ChatMessage("system", "be brief"), ChatMessage("user", "hi {{ 7 * 7 }}"), ChatMessage("assistant", "é")]
    text = template.render(messages)
    # What a client writes is text, whatever it looks like.
    assert text == "<s>system\nbe brief</s><s>user\nhi {{ 7 * 7 }}</s><s>assistant\né</s><s>assistant\n"


def test_template_features() -> None:
    """What templates in the field use is there: loop controls, tojson without escapes, block trimming, the date."""
    source = (
        "{% for message in messages %}\n"
        "{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ message | tojson }}\n"
        "{% endfor %}\n"
        "{{ strftime_now('%Y') | length }}{% generation %}!{% endgeneration %}"
    )
    messages = [ChatMessage("user", "é <b>"), ChatMessage("user", "b")]
    text = ChatTemplate(source, {}).render(messages)
    assert text == '{"role": "user", "content": "é <b>"}\n4!'


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content }}", "dict object|list object|undefined"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_template_that_fails(source: str, words: str) -> None:
    """Whatever goes wrong in a template is one kind of error, with words that say what; the sandbox holds."""
    with pytest.raises(ChatTemplateError, match=words):
        ChatTemplate(source, {}).render([ChatMessage("user", "a")])


def test_template_that_is_no_jinja() -> None:
    """A template that does not compile stops the gateway when it opens the model, not the first client."""
    with pytest.raises(ModelError, match="no valid Jinja"):
        ChatTemplate("{% for message in messages %}", {})
