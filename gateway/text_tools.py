"""Text to tokens and back, as requests would be treated, without running any."""

from __future__ import annotations

from collections.abc import Sequence

from gateway import validation
from gateway.acceptance import raise_violations
from gateway.cell import Cell
from gateway.live_requests import LiveRequests
from gateway.prompts import tokenize
from gateway.requests import ChatInput, Input
from gateway.served_models import ServedModel, ServedModels
from octavo.rpc.errors import FieldViolation


class TextTools:
    """Tokenizes, counts and detokenizes. Raises ServiceError: INVALID_ARGUMENT, NOT_FOUND, UNAVAILABLE at shutdown."""

    def __init__(self, models: ServedModels, live: LiveRequests, cell: Cell) -> None:
        self._models = models
        self._live = live
        self._cell = cell

    async def tokenize(self, model: str, given: Input | None, *, add_special_tokens: bool | None = None) -> list[int]:
        """Return the tokens that a request for `given` runs on; a text may be empty here.

        `add_special_tokens` False leaves out what the tokenizer adds to a text by itself; it is for texts only.
        """
        served = self._resolve(model)
        violations = list(validation.check_input(given, served.prepared))
        if isinstance(given, ChatInput) and add_special_tokens is not None:
            violations.append(FieldViolation("add_special_tokens", "is not for chats: their template adds its own"))
        token_ids: list[int] = []
        if given is not None and not violations:
            token_ids, violations = await tokenize(served, given, add_special_tokens=add_special_tokens is not False)
        raise_violations(violations)
        return token_ids

    async def count_tokens(self, model: str, given: Input | None) -> tuple[int, int]:
        """Return the number of tokens of an input, and the longest input plus output that the model takes now.

        That is 0 while no executor is ready.
        """
        num_tokens = len(await self.tokenize(model, given))
        pool = self._cell.pool(self._models.resolve(model).prepared)
        return num_tokens, pool.max_model_len if pool else 0

    async def detokenize(self, model: str, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        served = self._resolve(model)
        raise_violations(list(validation.check_token_ids("token_ids", token_ids, served.prepared.vocab_size)))
        return await served.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _resolve(self, model: str) -> ServedModel:
        self._live.check_open()
        return self._models.resolve(model)
