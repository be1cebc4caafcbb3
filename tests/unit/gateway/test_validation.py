"""Limits that depend on the model."""

from __future__ import annotations

import pytest

from gateway.chat import ChatMessage
from gateway.requests import ChatInput, GenerateCommand, TextInput
from gateway.validation import MAX_TEXT_CHARACTERS, check_input, check_parameters
from octavo.models.prepared import PreparedModel


@pytest.mark.parametrize(("vocab_size", "most"), [(8, 8), (20, 20), (49152, 20)])
def test_no_more_alternatives_than_tokens(vocab_size: int, most: int) -> None:
    """E11: alternatives go up to 20, or to the vocabulary where that is smaller; one more is refused by name."""
    assert list(check_parameters(GenerateCommand(top_logprobs=most), vocab_size)) == []
    (violation,) = check_parameters(GenerateCommand(top_logprobs=most + 1), vocab_size)
    assert violation.field == "output.top_logprobs"
    assert str(most) in violation.description


def test_texts_are_no_longer_than_an_http_body(prepared: PreparedModel) -> None:
    """Over gRPC too: tokenizing four times as much took more memory than a gateway has."""
    most = "a" * MAX_TEXT_CHARACTERS
    assert list(check_input(TextInput(most), prepared)) == []
    (of_text,) = check_input(TextInput(most + "a"), prepared)
    (of_chat,) = check_input(ChatInput([ChatMessage("user", most + "a")]), prepared)
    assert (of_text.field, of_chat.field) == ("text", "chat.messages[0].content")
    assert "at most 16777216 characters, has 16777217" in of_text.description
