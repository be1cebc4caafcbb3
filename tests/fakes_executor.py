"""Fakes for the executor: a tiny model whose output proves what it read, and a driver that schedules for one
executor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

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
    StepBatch,
    StepResult,
    StoppingParams,
)
from executor_svc.kernels import build_kernels
from executor_svc.kv_cache import KVCache
from executor_svc.model_runner import ModelRunner
from executor_svc.sampler import Sampler

GREEDY = SamplingParams(temperature=0.0)
HIDDEN = 16


@dataclass(frozen=True)
class RecallConfig:
    """The shape of RecallModel's KV."""

    num_layers: int = 1
    num_kv_heads: int = 1
    head_dim: int = HIDDEN


class RecallModel:
    """A CausalLM whose hidden state is a fingerprint of all tokens before, each read back from its KV slot.

    A token that was written to the wrong slot, read through the wrong table or given the wrong position changes what
    is sampled. Every position is computed by itself, so results are bit-equal however the sequence is batched or
    chunked. `nan_token` makes the hidden states from it on NaN; `nan_logits_token` the logits where it comes last.
    `before_forward` is called before each forward pass with its number, from 1, and may raise or block.
    """

    config = RecallConfig()

    def __init__(
        self,
        vocab_size: int,
        *,
        nan_token: int | None = None,
        nan_logits_token: int | None = None,
        before_forward: Callable[[int], None] = lambda number: None,
    ) -> None:
        generator = torch.Generator().manual_seed(20)
        self._embedding = torch.randn(vocab_size, HIDDEN, generator=generator)
        self._head = torch.randn(HIDDEN, vocab_size, generator=generator)
        if nan_token is not None:
            self._embedding[nan_token] = float("nan")
        self._nan_logits_token = nan_logits_token
        self._before_forward = before_forward
        self.num_forwards = 0

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: KVCache) -> Tensor:
        """See CausalLM."""
        self.num_forwards += 1
        self._before_forward(self.num_forwards)
        keys, values = kv_cache.keys[0].view(-1, HIDDEN), kv_cache.values[0].view(-1, HIDDEN)
        keys[metadata.slot_mapping] = self._embedding[token_ids]
        values[metadata.slot_mapping] = metadata.positions[:, None].float().expand(-1, HIDDEN)
        # One more column names the token itself; the head does not read it.
        hidden = torch.cat((torch.empty(len(token_ids), HIDDEN), token_ids[:, None].float()), dim=1)
        for row, query_len in enumerate(metadata.query_lens):
            start, context_len = int(metadata.query_start[row]), int(metadata.context_lens[row])
            slots = metadata.block_tables[row, :, None].long() * kv_cache.block_size + torch.arange(kv_cache.block_size)
            slots = slots.flatten()[:context_len]
            for token in range(query_len):
                length = context_len - query_len + token + 1
                assert int(metadata.positions[start + token]) == length - 1
                written_at = values[slots[:length], :1]
                weights = torch.cos(written_at + 1) * 0.9 ** (length - 1 - written_at)
                hidden[start + token, :HIDDEN] = (keys[slots[:length]] * weights).sum(dim=0)
        return hidden

    def likeliest(self, hidden: Tensor) -> None:
        """None: the logits are to be seen."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See CausalLM."""
        logits = torch.stack([(row[:HIDDEN, None] * self._head).sum(dim=0) for row in hidden])
        if self._nan_logits_token is not None:
            logits[hidden[:, HIDDEN] == self._nan_logits_token, 3] = float("nan")
        return logits


def make_limits(
    *,
    block_size: int = 4,
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 48,
    vocab_size: int = 61,
) -> Limits:
    """Limits of a tiny executor."""
    return Limits(block_size, num_blocks, max_num_seqs, max_num_batched_tokens, max_model_len, vocab_size)


def make_runner(
    limits: Limits, model: RecallModel | None = None, kernels: str = "cpu", *, builds_ahead: bool = False
) -> ModelRunner:
    """A runner over RecallModel. KV memory starts as NaN: reading what was never written shows."""
    model = model or RecallModel(limits.vocab_size)
    kv_cache = KVCache.allocate(model.config, limits.num_blocks, limits.block_size, torch.float32, torch.device("cpu"))
    for tensor in (*kv_cache.keys, *kv_cache.values):
        tensor.fill_(float("nan"))
    return ModelRunner(model, kv_cache, Sampler(build_kernels(kernels)), limits, builds_ahead=builds_ahead)


def make_sequence(
    handle: int,
    token_ids: Sequence[int],
    *,
    num_prompt_tokens: int | None = None,
    choice: int = 0,
    sampling: SamplingParams = GREEDY,
    max_tokens: int = 8,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
) -> NewSequence:
    """A record; by default all of its tokens are prompt."""
    num_prompt = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
    stopping = StoppingParams(max_tokens, min_tokens, stop_token_ids)
    return NewSequence(handle, tuple(token_ids), num_prompt, choice, sampling, stopping)


def make_history(sequences: Sequence[NewSequence]) -> npt.NDArray[np.int32]:
    """The tokens of records, a row each, as a sequence table holds them; int32 [N, longest]."""
    history = np.zeros((len(sequences), max(len(each.token_ids) for each in sequences)), dtype=np.int32)
    for row, sequence in zip(history, sequences, strict=True):
        row[: len(sequence.token_ids)] = sequence.token_ids
    return history


@dataclass
class _Stay:
    """What a scheduler holds of one live sequence."""

    sequence: NewSequence
    key: str
    num_tokens: int
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    sent: bool = False


class Driver:
    """Schedules sequences on one runner, with up to `depth` steps in flight, as a scheduler does.

    A step is built before the results of the `depth - 1` steps before it are read, so it counts on one token from
    every row that samples, and goes on scheduling sequences that have ended unknown to it. Blocks go back to the pool
    as soon as an end is known and are given out again at once.
    """

    def __init__(
        self,
        run: Callable[[StepBatch], StepResult],
        limits: Limits,
        *,
        depth: int = 1,
        chunk: int = 64,
        announce: Callable[[StepBatch], None] | None = None,
    ) -> None:
        """`announce`: hears of each step before the one before it is run, which is then run when its result is read."""
        self._run = run
        self._announce = announce
        self._limits = limits
        self._depth = depth
        self._chunk = chunk
        self._free = list(range(1, limits.num_blocks))
        self._stays: dict[int, _Stay] = {}
        self._released: list[int] = []
        self._in_flight: list[Callable[[], StepResult]] = []
        self._handle = 0
        self._step = 0
        self.outputs: dict[str, list[int]] = {}
        self.statuses: dict[str, list[RowStatus]] = {}
        self.prompt_logprobs: dict[str, list[PromptLogprobs]] = {}
        self.results: list[StepResult] = []

    def add(self, key: str, sequence: NewSequence) -> None:
        """Take in a sequence under a name of the test's; its handle is given here."""
        self._handle += 1
        record = replace(sequence, handle=self._handle)
        self._stays[self._handle] = _Stay(record, key, len(record.token_ids))
        self.outputs.setdefault(key, list(record.token_ids[record.num_prompt_tokens :]))
        self.statuses.setdefault(key, [])

    def step(self) -> StepBatch:
        """Send one step for all live sequences, oldest first, and read the result that is `depth` steps old."""
        batch = self._build()
        if self._announce is None:
            result = self._run(batch)
            self._in_flight.append(lambda: result)
        else:
            self._announce(batch)
            self._in_flight.append(partial(self._run, batch))
        if len(self._in_flight) >= self._depth:
            self._read()
        return batch

    def preempt(self, key: str) -> None:
        """Drop a sequence's stay and start it again from its full record, once its tokens in flight are known."""
        while self._in_flight:
            self._read()
        for stay in [stay for stay in self._stays.values() if stay.key == key]:
            self._end(stay)
            prompt = stay.sequence.token_ids[: stay.sequence.num_prompt_tokens]
            self.add(key, replace(stay.sequence, token_ids=(*prompt, *self.outputs[key])))

    def finish(self) -> dict[str, list[int]]:
        """Step until every sequence has ended; return the output tokens by name."""
        while self._stays or self._in_flight:
            if self._stays:
                self.step()
            else:
                self._read()
        return self.outputs

    def _build(self) -> StepBatch:
        self._step += 1
        new, rows = [], []
        budget = self._limits.max_num_batched_tokens
        for stay in list(self._stays.values())[: self._limits.max_num_seqs]:
            count = min(stay.num_tokens - stay.num_computed, self._chunk, budget)
            if count <= 0 or stay.num_tokens > self._limits.max_model_len:
                continue
            budget -= count
            needed = -(-(stay.num_computed + count) // self._limits.block_size) - len(stay.blocks)
            blocks = [self._free.pop(0) for _ in range(needed)]
            stay.blocks += blocks
            if not stay.sent:
                new.append(stay.sequence)
                stay.sent = True
            rows.append((stay.sequence.handle, count, stay.num_computed, len(blocks), blocks))
            stay.num_computed += count
            stay.num_tokens += stay.num_computed == stay.num_tokens
        released, self._released = tuple(self._released), []
        return StepBatch(
            session=1,
            step=self._step,
            released_handles=released,
            new_sequences=tuple(new),
            handles=tuple(row[0] for row in rows),
            num_scheduled_tokens=tuple(row[1] for row in rows),
            num_computed_tokens=tuple(row[2] for row in rows),
            num_new_blocks=tuple(row[3] for row in rows),
            new_blocks=tuple(block for row in rows for block in row[4]),
        )

    def _read(self) -> None:
        result = self._in_flight.pop(0)()
        self.results.append(result)
        assert result.failure is None, result.failure
        for row, told in result.prompt_logprobs.items():
            self.prompt_logprobs.setdefault(self._stays[result.handles[row]].key, []).append(told)
        for handle, status, token_id in zip(result.handles, result.statuses, result.sampled, strict=True):
            stay = self._stays.get(handle)
            if stay is None:
                assert status is RowStatus.SKIPPED
                continue
            self.statuses[stay.key].append(status)
            if token_id is not None:
                self._commit(stay, token_id)
            if status is not RowStatus.OK:
                self._end(stay)

    def _commit(self, stay: _Stay, token_id: int) -> None:
        output, stopping = self.outputs[stay.key], stay.sequence.stopping
        output.append(token_id)
        length = stay.sequence.num_prompt_tokens + len(output)
        ended = len(output) >= stopping.max_tokens or token_id in stopping.stop_token_ids
        if ended or length >= self._limits.max_model_len:
            self._end(stay)

    def _end(self, stay: _Stay) -> None:
        del self._stays[stay.sequence.handle]
        if stay.sent:
            self._released.append(stay.sequence.handle)
        # First out again: a block that is reused at once is the harder case.
        self._free[:0] = stay.blocks
