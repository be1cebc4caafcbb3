"""How likely the tokens of a prompt were: the logprobs of those that a step's rows tell.

A row that computes the tokens [a, b) of its sequence has the hidden states that the tokens [a + 1, b + 1) follow from;
of these it tells the prompt's, from the first that is wanted on. Whoever is recomputed tells them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor_svc.batch import PromptLogprobs
from executor_svc.input_batch import InputBatch
from executor_svc.kernels.finite import FiniteRows
from executor_svc.kernels.logprobs import GatherLogprobs
from executor_svc.sequence_state import SequenceTable

ROWS_AT_ONCE = 64
"""Rows of logits that exist at a time: a whole chunk's, at 49,152 tokens, would take 100 MB for 512 rows."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Told:
    """What one row tells."""

    row: int
    """Which of the R rows that run."""
    start: int
    """Which of the row's hidden states is the first that counts."""
    first_token_index: int
    num_tokens: int
    num_top: int


class PromptScorer:
    """Scores prompt tokens, of the sequences that want it, a bounded number of rows of logits at a time.

    compute_logits gives the logits, a new float32 [N, V], of hidden [N, H].
    """

    def __init__(
        self,
        compute_logits: Callable[[Tensor], Tensor],
        gather_logprobs: GatherLogprobs,
        finite_rows: FiniteRows,
        table: SequenceTable,
        put: Callable[[npt.NDArray[np.generic]], Tensor] = torch.from_numpy,
        read: Callable[[Tensor], npt.NDArray[Any]] = Tensor.numpy,
    ) -> None:
        """`put` brings arrays to where the model's tensors are, `read` tensors back."""
        self._put = put
        self._read = read
        self._compute_logits = compute_logits
        self._gather_logprobs = gather_logprobs
        self._finite_rows = finite_rows
        self._table = table

    def score(self, inputs: InputBatch, hidden: Tensor, sound: npt.NDArray[np.bool_]) -> dict[int, PromptLogprobs]:
        """Return, by index in the batch, what the sound rows tell; hidden is [T, H], sound [R].

        A row whose logits are not finite tells nothing, and is marked in `sound`. To be called before the step's tokens
        count as computed.
        """
        if not self._table.sampler.wanted_prompts:
            return {}
        metadata = inputs.metadata
        context_lens = metadata.context_lens_host
        assert context_lens is not None  # InputBatchBuilder
        return self.score_rows(inputs.rows, inputs.slots, metadata.query_start.numpy(), context_lens, hidden, sound)

    def is_wanted(self, slots: Ints) -> bool:
        """Whether a stay in one of these slots may have tokens of its prompt to tell in a step that has not counted."""
        wanted = self._table.sampler.wanted_prompts
        if not wanted:
            return False
        computed = self._table.num_computed_tokens
        prompts = ((slot, wanted.get(slot)) for slot in slots.tolist())
        return any(prompt is not None and computed[slot] + 1 < prompt.num_prompt_tokens for slot, prompt in prompts)

    def score_rows(
        self,
        rows: Ints,
        slots: Ints,
        query_start: npt.NDArray[np.int32],
        context_lens: Sequence[int],
        hidden: Tensor,
        sound: npt.NDArray[np.bool_],
    ) -> dict[int, PromptLogprobs]:
        """Return what `score` does of R rows: their places in the batch, slots, where their tokens begin in hidden, and
        contexts.
        """
        told = self._told(slots, context_lens, sound)
        if not told:
            return {}
        places = np.concatenate([query_start[each.row] + each.start + np.arange(each.num_tokens) for each in told])
        token_ids = np.concatenate([self._tokens(each, slots) for each in told])
        num_top = max(each.num_top for each in told)
        logprobs, top_ids, tops, finite = self._gather(hidden, places, token_ids, num_top)
        scored: dict[int, PromptLogprobs] = {}
        ends = np.cumsum([each.num_tokens for each in told])
        for each, end in zip(told, ends.tolist(), strict=True):
            part = slice(end - each.num_tokens, end)
            if not finite[part].all():
                sound[each.row] = False
                continue
            scored[int(rows[each.row])] = PromptLogprobs(
                each.first_token_index, logprobs[part], top_ids[part, : each.num_top], tops[part, : each.num_top]
            )
        return scored

    def _told(self, slots: Ints, context_lens: Sequence[int], sound: npt.NDArray[np.bool_]) -> list[_Told]:
        wanted = self._table.sampler.wanted_prompts
        told = []
        for row, slot in enumerate(slots.tolist()):
            prompt = wanted.get(slot)
            if prompt is None or not sound[row]:
                continue
            first = max(int(self._table.num_computed_tokens[slot]) + 1, prompt.first_token_index)
            end = min(context_lens[row] + 1, prompt.num_prompt_tokens)
            if end > first:
                start = first - 1 - int(self._table.num_computed_tokens[slot])
                told.append(_Told(row, start, first, end - first, prompt.num_top))
        return told

    def _tokens(self, told: _Told, slots: Ints) -> Ints:
        end = told.first_token_index + told.num_tokens
        return self._table.tokens[slots[told.row], told.first_token_index : end].astype(np.int64)

    def _gather(
        self, hidden: Tensor, places: Ints, token_ids: Ints, num_top: int
    ) -> tuple[npt.NDArray[np.float32], Ints, npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """Return logprobs [M], top ids and logprobs [M, num_top], and which of the M rows of logits are finite."""
        logprobs = np.zeros(len(places), dtype=np.float32)
        top_ids = np.zeros((len(places), num_top), dtype=np.int64)
        tops = np.zeros((len(places), num_top), dtype=np.float32)
        finite = np.zeros(len(places), dtype=bool)
        for start in range(0, len(places), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            logits = self._compute_logits(hidden[self._put(places[part])])
            finite[part] = self._read(self._finite_rows(logits))
            # What is not finite is told to nobody; the op wants none of it.
            logits[self._put(~finite[part])] = 0
            gathered = self._gather_logprobs(logits, self._put(token_ids[part]), num_top)
            logprobs[part], top_ids[part], tops[part] = map(self._read, gathered)
        return logprobs, top_ids, tops, finite
