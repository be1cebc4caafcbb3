"""Whether a tokenizer fits a model's vocabulary: every id that it gives, and every special one, has a row."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from octavo.models.errors import ModelError
from octavo.models.source import ModelSource

_MOST_NAMED = 4


def fit_tokenizer(source: ModelSource, report: Callable[[str], None]) -> ModelSource:
    """Return the source with a tokenizer that fits; `report` takes a line on what was left out of it.

    A tokenizer may have a few added tokens past the vocabulary that the model was never trained with, as those for
    images in a model of text: these are left out. Raises ModelError where ordinary tokens are past it or where the
    model ends outputs or writes its turns by tokens that it does not have, and where tokenizer.json does not load.
    """
    tokenizer = _load(source)
    where = source.files[0].parent if len(source.files) > 1 else source.files[0]
    _check_special_ids(source, where, tokenizer)
    past = {token: index for token, index in tokenizer.get_vocab().items() if index >= source.vocab_size}
    if not past:
        return source
    ordinary = tokenizer.get_vocab(with_added_tokens=False)
    needed = {
        token: index for token, index in past.items() if token in ordinary or token in (source.chat_template or "")
    }
    if needed:
        raise ModelError(
            f"{where}: the tokenizer does not fit the model: the vocabulary has {source.vocab_size} tokens, and "
            f"{_named(needed)} lie past it: take the tokenizer that belongs to these weights"
        )
    report(f"left out of the tokenizer, past the vocabulary of {source.vocab_size}: {_named(past)}")
    document = json.loads(source.tokenizer)
    document["added_tokens"] = [token for token in document["added_tokens"] if token["id"] < source.vocab_size]
    return replace(source, tokenizer=json.dumps(document, ensure_ascii=False))


def _load(source: ModelSource) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(source.tokenizer)
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{source.files[0]}: its tokenizer does not load ({error}): the file is damaged") from None


def _check_special_ids(source: ModelSource, where: object, tokenizer: Any) -> None:
    ends = [index for index in source.eos_token_ids if index is not None]
    for index, what in [*((index, "end token") for index in ends), (source.bos_token_id, "begin token")]:
        if index is not None and not (type(index) is int and 0 <= index < source.vocab_size):
            raise ModelError(
                f"{where}: {what} {index!r} is outside the vocabulary of {source.vocab_size}: tokenizer and config "
                "belong to different models"
            )
    if ends and all(tokenizer.id_to_token(index) is None for index in ends):
        raise ModelError(f"{where}: the tokenizer has none of the tokens that end an output: {sorted(set(ends))}")


def _named(tokens: dict[str, int]) -> str:
    found = sorted(tokens.items(), key=lambda item: item[1])
    named = ", ".join(f"{token!r} ({index})" for token, index in found[:_MOST_NAMED])
    return f"{named} and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else named
