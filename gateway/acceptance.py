"""From what a client asks to what is run: everything is checked, and every default resolved, before anything is queued.

Every bad field is named at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway import validation
from gateway.cell import Cell
from gateway.prompts import tokenize, tokenize_bad_words, tokenize_continuations
from gateway.requests import (
    CacheParams,
    GenerateCommand,
    Input,
    OutputParams,
    SamplingParams,
    SchedulingParams,
    ScoreCommand,
    StoppingParams,
)
from gateway.served_models import ServedModel
from octavo.models.prepared import PreparedModel
from octavo.rpc.errors import FieldViolation, invalid_argument


@dataclass(frozen=True)
class Accepted:
    """What is to be run, and what of it the client is shown."""

    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    stopping: StoppingParams
    scheduling: SchedulingParams
    cache: CacheParams
    output: OutputParams
    num_choices: int
    resume_grace: float | None = None


@dataclass(frozen=True)
class AcceptedScore:
    """What is to be scored: the tokens of the input, and of each continuation."""

    prompt_token_ids: Sequence[int]
    continuations: Sequence[Sequence[int]]


class Acceptance:
    """Checks requests against a model and the cell that runs it."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    async def accept(self, command: GenerateCommand, model: ServedModel, *, streaming: bool) -> Accepted:
        """Return what a request comes to.

        `streaming`: its events are told as they happen. Raises ServiceError: INVALID_ARGUMENT with every bad field,
        UNAVAILABLE or FAILED_PRECONDITION where the cell cannot run the model now.
        """
        prepared = model.prepared
        violations = list(validation.check_parameters(command, prepared.vocab_size))
        violations += validation.check_best_of(command, streaming=streaming)
        violations += validation.check_resume_grace(command, streaming=streaming)
        if command.resume is not None:
            violations += validation.check_resume(command, streaming=False)
        bad_words: tuple[tuple[int, ...], ...] = ()
        if bad := list(validation.check_bad_words(command.bad_words)):
            violations += bad
        elif command.bad_words:
            bad_words, bad = await tokenize_bad_words(model, command.bad_words)
            violations += bad
        prompt_token_ids, bad_input = await self._prompt(command.input, model, command.truncate_prompt_tokens)
        max_tokens = 0
        if not bad_input:
            max_model_len = self._max_model_len(prepared)
            max_tokens = validation.resolve_max_tokens(command, len(prompt_token_ids), max_model_len)
            violations += validation.check_min_tokens(command, max_tokens)
        raise_violations([*bad_input, *violations], self._lengths(prepared) if bad_input else None)
        self._cell.require(prepared)
        return Accepted(
            prompt_token_ids=prompt_token_ids,
            sampling=validation.resolve_sampling(command, prepared, bad_words),
            stopping=validation.resolve_stopping(command, prepared, max_tokens),
            scheduling=validation.resolve_scheduling(command),
            cache=validation.resolve_cache(command),
            output=validation.resolve_output(command),
            num_choices=validation.resolve_num_choices(command),
            resume_grace=validation.resolve_resume_grace(command, streaming=streaming),
        )

    async def accept_score(self, command: ScoreCommand, model: ServedModel) -> AcceptedScore:
        """Return what a score comes to. Raises ServiceError as `accept`."""
        prepared = model.prepared
        violations = list(validation.check_label(command.label))
        violations += validation.check_continuations(command.continuations, prepared.vocab_size)
        continuations: list[list[int]] = []
        if not violations:
            continuations, violations = await tokenize_continuations(model, command.continuations)
        prompt_token_ids, bad_input = await self._prompt(command.input, model, None)
        if not (bad_input or violations):
            violations += validation.check_score_lengths(
                len(prompt_token_ids), [len(each) for each in continuations], self._max_model_len(prepared)
            )
        raise_violations([*bad_input, *violations])
        self._cell.require(prepared)
        return AcceptedScore(prompt_token_ids, continuations)

    async def _prompt(
        self, given: Input | None, model: ServedModel, most_tokens: int | None
    ) -> tuple[Sequence[int], list[FieldViolation]]:
        """Return the tokens of an input, the last `most_tokens` of them, or what is wrong with it."""
        violations = list(validation.check_input(given, model.prepared))
        if given is None or violations:
            return (), violations
        token_ids, violations = await tokenize(model, given)
        if most_tokens:
            token_ids = token_ids[-most_tokens:]
        if not violations:
            max_model_len = self._max_model_len(model.prepared)
            violations += validation.check_prompt_length(given, len(token_ids), max_model_len)
        return token_ids, violations

    def _lengths(self, prepared: PreparedModel) -> dict[str, str]:
        """Return what tells whoever sent too long an input whether the model could be served with a longer one."""
        own, now = prepared.max_position_embeddings, self._max_model_len(prepared)
        return {"max_model_len": str(now), "max_position_embeddings": str(own)}

    def _max_model_len(self, prepared: PreparedModel) -> int:
        pool = self._cell.pool(prepared)
        return pool.max_model_len if pool else prepared.max_position_embeddings


def raise_violations(violations: Sequence[FieldViolation], metadata: Mapping[str, str] | None = None) -> None:
    """Raise INVALID_ARGUMENT where there are any; `metadata` holds the numbers."""
    if violations:
        raise invalid_argument(violations, metadata)
