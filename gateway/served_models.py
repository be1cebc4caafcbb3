"""The models that this gateway serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import grpc

from gateway.chat import ChatTemplate
from gateway.tokenizer import Tokenizer
from octavo.models.prepared import PreparedModel
from octavo.rpc.errors import FieldViolation, ServiceError, invalid_argument


@dataclass(frozen=True)
class ServedModel:
    """One model with what turns its text into tokens. `chat_template` is None where it takes no chats."""

    prepared: PreparedModel
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

    @property
    def name(self) -> str:
        """Name that requests use."""
        return self.prepared.name

    @classmethod
    def open(cls, prepared: PreparedModel, executor: Executor) -> ServedModel:
        """Load tokenizer and template. Raises ModelError."""
        tokenizer = Tokenizer(prepared.tokenizer_file, prepared.vocab_size, executor)
        template = None
        if prepared.chat_template is not None:
            template = ChatTemplate(prepared.chat_template, _special_tokens(prepared, tokenizer))
        return cls(prepared, tokenizer, template)


class ServedModels:
    """The served models by name. Immutable."""

    def __init__(self, models: Sequence[ServedModel], aliases: Mapping[str, str] | None = None) -> None:
        """`aliases`: further names, each with the name of the model that it stands for."""
        self._models = {model.name: model for model in sorted(models, key=lambda each: each.name)}
        self._aliases = {alias: name for alias, name in (aliases or {}).items() if alias not in self._models}

    def __iter__(self) -> Iterator[ServedModel]:
        """Yield the models, sorted by name."""
        return iter(self._models.values())

    def names(self) -> list[str]:
        """Return every name that `resolve` knows: those of the models, then the further ones."""
        return [*self._models, *self._aliases]

    def find(self, name: str) -> ServedModel | None:
        """Return the model that `resolve` would, None where that raises."""
        if not name:
            return next(iter(self)) if len(self._models) == 1 else None
        return self._models.get(self._aliases.get(name, name))

    def resolve(self, name: str) -> ServedModel:
        """Return the model that a request means: the only one where it names none.

        Raises ServiceError: NOT_FOUND naming the served ones, INVALID_ARGUMENT where no name is given but several are
        served.
        """
        model = self.find(name)
        if model is not None:
            return model
        served = ", ".join(self._models)
        if not name:
            raise invalid_argument([FieldViolation("model", f"is required: several models are served: {served}")])
        # Only the start of the name is said back: it may be of any length.
        message = f"model {name[:100]!r} is not served here; served: {served}"
        raise ServiceError(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", message, metadata={"served": served})


def _special_tokens(prepared: PreparedModel, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the special tokens that templates ask for by name."""
    ids = {"bos_token": prepared.bos_token_id, "eos_token": next(iter(prepared.eos_token_ids), None)}
    tokens = {name: tokenizer.vocabulary.token(each) for name, each in ids.items() if each is not None}
    return {name: token for name, token in tokens.items() if token is not None}
