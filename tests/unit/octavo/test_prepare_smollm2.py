"""The demo model's tokenizer, as prepared from its GGUF file, against what the model was trained with."""

from __future__ import annotations

import jinja2
import pytest
from tokenizers import Tokenizer

from octavo.models import PreparedModel
from octavo.models.ensure import ensure_prepared


@pytest.fixture(scope="module")
def model() -> PreparedModel:
    """SmolLM2-135M-Instruct, pulled once for every run of the tests."""
    return ensure_prepared("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def tokenizer(model: PreparedModel) -> Tokenizer:
    """Its tokenizer."""
    return Tokenizer.from_file(str(model.tokenizer_file))


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("12345 + 678", ["1", "2", "3", "4", "5", "Ġ+", "Ġ", "6", "7", "8"]),
        ("  12", ["ĠĠ", "1", "2"]),
        ("a   7b", ["a", "ĠĠĠ", "7", "b"]),
        ("\t\tindent\n\n\n  x", ["ĉ", "ĉ", "indent", "ĊĊ", "ĊĠ", "Ġx"]),
        ("I'm 3rd, it's 2024!", ["I", "'m", "Ġ", "3", "rd", ",", "Ġit", "'s", "Ġ", "2", "0", "2", "4", "!"]),
        ("naïve café", ["na", "Ã¯ve", "ĠcafÃ©"]),
        ("日本🎉", ["æĹ", "¥", "æľ¬", "ðŁ", "İ", "ī"]),
        ("²½", ["Â²", "Â½"]),
        ("<|endoftext|> <repo_name>x<file_sep>", ["<|endoftext|>", "Ġ", "<repo_name>", "x", "<file_sep>"]),
    ],
)
def test_digits_spaces_unicode_and_specials(tokenizer: Tokenizer, text: str, tokens: list[str]) -> None:
    """Each digit is a token, spaces before digits stay together, specials are whole, and the text comes back."""
    encoded = tokenizer.encode(text)
    assert encoded.tokens == tokens
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text


def test_a_chat_becomes_the_ids_that_the_model_was_trained_on(model: PreparedModel, tokenizer: Tokenizer) -> None:
    """Template and tokenizer together: the default system turn, the user's turn, the cue for the answer."""
    assert model.chat_template is not None
    messages = [{"role": "user", "content": "What is gravity?"}]
    template = jinja2.Environment().from_string(model.chat_template)
    text = template.render(messages=messages, add_generation_prompt=True)
    system = [9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
    user, assistant = [4093, 198, 1780, 314, 9354, 47], [520, 9531, 198]
    assert tokenizer.encode(text).ids == [1, *system, 2, 198, 1, *user, 2, 198, 1, *assistant]


def test_the_file_says_what_the_model_is(model: PreparedModel) -> None:
    """Nothing is added around a text, generation ends at the end of a turn, and the context is the trained one."""
    assert (model.vocab_size, model.max_position_embeddings) == (49_152, 8_192)
    assert (model.bos_token_id, model.eos_token_ids) == (1, (2,))


def test_the_defaults_are_those_of_the_models_makers(model: PreparedModel) -> None:
    """The file is silent on sampling, and at temperature 1 so small a model wanders off."""
    assert (model.temperature, model.top_p, model.top_k) == (0.2, 0.9, 0)
