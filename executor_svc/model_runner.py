"""One step: apply the delta, run the model, sample, take in the sampled tokens so that the next step can run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor_svc.attention import AttentionMetadata
from executor_svc.batch import (
    Limits,
    NewSequence,
    PromptLogprobs,
    RowStatus,
    SamplingParams,
    StageTimings,
    StepBatch,
    StepFailure,
    StepFailureReason,
    StepResult,
    StoppingParams,
    TokenLogprobs,
)
from executor_svc.device import is_out_of_memory
from executor_svc.foresight import Foresight
from executor_svc.input_batch import InputBatch, InputBatchBuilder
from executor_svc.inputs_ahead import InputsAhead
from executor_svc.kv_cache import KVCache
from executor_svc.kv_pages import KvPages
from executor_svc.prompt_scorer import PromptScorer
from executor_svc.sampler import Sampler
from executor_svc.sequence_state import SequenceTable

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 16
"""Tokens of the prompt that warms up. A longer one costs its own computing and saves nothing later: after this one the
first step of 512 tokens takes as long as the next."""

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class CausalLM(Protocol):
    """A model, as a step sees it."""

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: KVCache) -> Tensor:
        """Give the last hidden states [T, hidden] of token_ids int64 [T], and write their keys and values."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Give the logits, a new float32 [N, vocab], of hidden [N, hidden]."""

    def likeliest(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Give the token of the highest logit of each row, among equals the first, int64 [N], and whether all of the
        row's logits are finite, bool [N]; None where they have to be written to be looked at.
        """


@runtime_checkable
class PlannedModel(CausalLM, Protocol):
    """A model that can work out a part of its forward pass before token ids are known, on any thread."""

    def plan(self, metadata: AttentionMetadata, block_size: int) -> Any:
        """Give what `forward_planned` takes. Nothing is changed, and a plan that is never used costs nothing."""

    def forward_planned(self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: KVCache, plan: Any) -> Tensor:
        """Do what `forward` does, by a plan for the same metadata."""


@dataclass(frozen=True)
class Outlook:
    """What a model says of the tokens that come next, for N sampling rows: logits, or the likeliest tokens alone."""

    logits: Tensor | None
    """[N, vocab]."""
    token_ids: Ints | None
    """[N]."""

    def of(self, keep: Bools) -> Outlook:
        """Return that of some rows; keep is [N]."""
        if keep.all():
            return self
        logits, token_ids = self.logits, self.token_ids
        return Outlook(
            None if logits is None else logits[torch.from_numpy(keep)], None if token_ids is None else token_ids[keep]
        )


class ModelRunner:
    """Runs steps over one model's weights and KV memory. Owned by the device thread: every method is called there."""

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache,
        sampler: Sampler,
        limits: Limits,
        pages: KvPages | None = None,
        *,
        builds_ahead: bool = False,
    ) -> None:
        """`pages`: is told of each step. builds_ahead: whether inputs are built while the step before computes; then
        `ahead` is there, to be started.
        """
        self._model = model
        self._planned = model if isinstance(model, PlannedModel) else None
        self._pages = pages
        self._kv_cache = kv_cache
        self._sampler = sampler
        self._table = SequenceTable(limits)
        self._builder = InputBatchBuilder(self._table, limits)
        self._prompt_scorer = PromptScorer(
            model.compute_logits, sampler.gather_logprobs, sampler.finite_rows, self._table
        )
        plan = None if self._planned is None else partial(self._planned.plan, block_size=limits.block_size)
        self._foresight = Foresight(self._table, limits, plan)
        self.ahead = InputsAhead(self._foresight.foresee) if builds_ahead else None
        """What builds inputs ahead; None: each step's are built in their turn."""
        self._limits = limits

    @property
    def limits(self) -> Limits:
        """What it can hold and run."""
        return self._limits

    @property
    def num_sequences(self) -> int:
        """Live stays."""
        return len(self._table)

    def warm_up(self) -> None:
        """Run a short prompt, and one token after it. Raises RuntimeError where a step fails.

        It pays for what the first steps would: thread pools, and code that is chosen or set up at its first use.
        """
        run_warm_up(self.run, self._limits)
        self.reset()

    def reset(self) -> None:
        """Forget every sequence: a session begins. KV memory keeps its bytes; nobody reads what nobody owns."""
        self._table.clear()

    def announce(self, batch: StepBatch) -> None:
        """Hear of a step that will be run or refused in its turn; on the event loop."""
        if self.ahead is not None:
            self.ahead.announce(batch)

    def refuse(self, batch: StepBatch) -> StepResult:
        """Answer a step in flight behind a failed one: released handles take effect, the stays of its rows are lost."""
        if self.ahead is not None:
            self.ahead.take(batch)
        return refusal_of(batch, self._table)

    def run(self, batch: StepBatch) -> StepResult:
        """Run one step. Whatever goes wrong becomes the result's failure, and the stays of all its rows are lost."""
        if self._pages is not None:
            self._pages.begin(batch.new_blocks)
        try:
            with torch.inference_mode():
                return self._run(batch)
        except Exception as error:
            logger.exception("step failed", extra={"fields": {"session": batch.session, "step": batch.step}})
            self._table.lose(batch)
            return StepResult(batch.session, batch.step, failure=failure_of(error))
        finally:
            if self._pages is not None:
                self._pages.end()

    def check_invariants(self) -> None:
        """Raise AssertionError where the state of a stay is not what its record gives."""
        self._table.check_invariants()

    def _run(self, batch: StepBatch) -> StepResult:
        started = perf_counter()
        inputs = self._inputs(batch)
        prepared = forwarded = perf_counter()
        sampled: dict[int, int] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        prompt_logprobs: dict[int, PromptLogprobs] = {}
        if len(inputs.rows):
            with nullcontext() if self.ahead is None else self.ahead.computing(inputs):
                hidden, outlook, sound = self._forward(inputs)
                prompt_logprobs = self._prompt_scorer.score(inputs, hidden, sound)
            forwarded = perf_counter()
            self._settle(batch, inputs, sound)
            sampled, logprobs = self._sample(inputs, outlook, sound)
        timings = StageTimings(
            prepare=prepared - started,
            forward=forwarded - prepared,
            sample=perf_counter() - forwarded,
            ahead=inputs.ahead,
        )
        return StepResult(
            batch.session,
            batch.step,
            handles=batch.handles,
            statuses=tuple(inputs.statuses),
            sampled=tuple(map(sampled.get, range(len(batch.handles)))),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            timings=timings,
        )

    def _inputs(self, batch: StepBatch) -> InputBatch:
        """Apply the step's delta and return its inputs: those built ahead, where all has come as it was foreseen."""
        foreseen = None if self.ahead is None else self.ahead.take(batch)
        inputs = None if foreseen is None else self._foresight.adopt(foreseen)
        return self._builder.build(batch) if inputs is None else inputs

    def _forward(self, inputs: InputBatch) -> tuple[Tensor, Outlook | None, Bools]:
        """Return the hidden states of the T tokens, what they say of the sampling rows, None where there are none, and
        which of the R rows are finite.
        """
        token_ids, metadata, kv_cache = inputs.token_ids, inputs.metadata, self._kv_cache
        if inputs.plan is None or self._planned is None:
            hidden = self._model.forward(token_ids, metadata, kv_cache)
        else:
            hidden = self._planned.forward_planned(token_ids, metadata, kv_cache, inputs.plan)
        sound = self._sampler.finite_rows(hidden).numpy()
        if len(sound) != len(inputs.rows):
            # A row is sound if all its tokens are; each has at least one.
            sound = np.logical_and.reduceat(sound, inputs.metadata.query_start[:-1].numpy())
        if len(inputs.sampling) == 0:
            return hidden, None, sound
        outlook, finite = self._look_ahead(hidden[inputs.layout.last_tokens], inputs.slots[inputs.sampling])
        sound[inputs.sampling] &= finite
        return hidden, outlook, sound

    def _look_ahead(self, hidden: Tensor, slots: Ints) -> tuple[Outlook, Bools]:
        """Return what hidden [N, hidden] says of the next tokens of N slots, and which rows are finite."""
        if self._sampler.takes_likeliest(self._table.sampler, slots):
            found = self._model.likeliest(hidden)
            if found is not None:
                token_ids, finite = found
                return Outlook(None, token_ids.numpy()), finite.numpy()
        logits = self._model.compute_logits(hidden)
        return Outlook(logits, None), self._sampler.finite_rows(logits).numpy()

    def _settle(self, batch: StepBatch, inputs: InputBatch, sound: Bools) -> None:
        """Count the computed tokens of the sound rows; end the stays of the others."""
        self._table.num_computed_tokens[inputs.slots[sound]] += inputs.layout.num_scheduled_tokens[sound]
        for row in inputs.rows[~sound].tolist():
            inputs.statuses[row] = RowStatus.NAN
            fields = {"handle": batch.handles[row], "step": batch.step}
            logger.error("hidden states or logits are not finite", extra={"fields": fields})
            self._table.end(batch.handles[row])

    def _sample(
        self, inputs: InputBatch, outlook: Outlook | None, sound: Bools
    ) -> tuple[dict[int, int], dict[int, TokenLogprobs]]:
        """Sample the sound rows at their sequence's end and append their tokens; return both columns by batch row."""
        keep = sound[inputs.sampling]
        if outlook is None or not keep.any():
            return {}, {}
        outlook = outlook.of(keep)
        sampling = inputs.sampling[keep]
        slots = inputs.slots[sampling]
        table = self._table
        token_ids = outlook.token_ids
        logprobs: dict[int, TokenLogprobs] = {}
        if outlook.logits is not None:
            positions = table.num_tokens[slots]
            token_ids, logprobs = self._sampler.sample(outlook.logits, table.sampler, slots, positions, table.tokens)
        assert token_ids is not None  # one of the two is there
        table.append_tokens(slots, token_ids)
        rows = inputs.rows[sampling].tolist()
        sampled = dict(zip(rows, token_ids.tolist(), strict=True))
        return sampled, {rows[index]: columns for index, columns in logprobs.items()}


def run_warm_up(run: Callable[[StepBatch], StepResult], limits: Limits) -> None:
    """Run the steps that warm a runner up. Raises RuntimeError where one fails."""
    for batch in warm_up_steps(limits):
        failure = run(batch).failure
        if failure is not None:
            raise RuntimeError(f"the warm-up step failed: {failure.message}")


def refusal_of(batch: StepBatch, table: SequenceTable) -> StepResult:
    """Return the answer to a step in flight behind a failed one, once the table knows what becomes of its stays."""
    table.release(batch.released_handles)
    table.lose(batch)
    failure = StepFailure(StepFailureReason.REFUSED, "an earlier step failed while this one was in flight")
    return StepResult(batch.session, batch.step, failure=failure)


def warm_up_steps(limits: Limits) -> tuple[StepBatch, ...]:
    """Return the steps that warm a runner up: a short prompt, and one token after it; none where none fit."""
    num_tokens = min(
        WARM_UP_TOKENS,
        limits.max_num_batched_tokens,
        limits.max_model_len - 2,
        (limits.num_blocks - 1) * limits.block_size - 1,
    )
    if num_tokens < 1:
        return ()
    tokens = tuple(token % limits.vocab_size for token in range(num_tokens))
    sequence = NewSequence(1, tokens, num_tokens, 0, SamplingParams(temperature=1.0), StoppingParams(max_tokens=2))
    num_blocks = -(-(num_tokens + 1) // limits.block_size)
    prompt = StepBatch(0, 1, (), (sequence,), (1,), (num_tokens,), (0,), (num_blocks,), tuple(range(1, num_blocks + 1)))
    token = StepBatch(
        0, 2, handles=(1,), num_scheduled_tokens=(1,), num_computed_tokens=(num_tokens,), num_new_blocks=(0,)
    )
    return prompt, token


def failure_of(error: Exception) -> StepFailure:
    """Return the failure of a step that raised an error."""
    message = f"{type(error).__name__}: {error}"
    # The CPU allocator has no exception type of its own.
    out_of_memory = isinstance(error, MemoryError) or is_out_of_memory(error) or "DefaultCPUAllocator" in message
    reason = StepFailureReason.OUT_OF_MEMORY if out_of_memory else StepFailureReason.INTERNAL
    return StepFailure(reason, message)
