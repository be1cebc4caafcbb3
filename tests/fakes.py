"""Small fakes on the real interfaces of the scheduler's domain: a model, an executor, a gateway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scheduler_svc.batch import (
    NO_RESULTS,
    BatchResult,
    Event,
    ExecutorSpec,
    NewSequence,
    RequestDone,
    ResultColumns,
    RowResult,
    RowStatus,
    ScheduledBatch,
    ScheduledRow,
    StepFailureReason,
    StepTokens,
    TokensOut,
)
from scheduler_svc.request_record import ChoiceEnd, ChoiceRecord, FinishReason, RequestId, RequestRecord, StoppingParams

_MASK = (1 << 64) - 1
MODEL = "fake"
REVISION = "r1"
VOCAB_SIZE = 50


def make_spec(
    *,
    num_blocks: int = 65,
    block_size: int = 16,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 256,
    model: str = MODEL,
    model_revision: str = REVISION,
    address: str = "127.0.0.1:50053",
    window: int = 0,
    incarnation: str = "0" * 32,
) -> ExecutorSpec:
    """Return a spec; num_blocks counts the null block."""
    return ExecutorSpec(
        address=address,
        incarnation=incarnation,
        model=model,
        model_revision=model_revision,
        tokenizer_hash="t1",
        fingerprint="f1",
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        window=window,
    )


def make_record(
    counter: int = 1,
    prompt: Sequence[int] = (1, 2, 3),
    *,
    incarnation: str = "gateway",
    model: str = MODEL,
    model_revision: str = REVISION,
    seed: int = 0,
    max_tokens: int = 8,
    min_tokens: int = 0,
    stop_token_ids: Sequence[int] = (),
    choices: Sequence[ChoiceRecord] = (ChoiceRecord(),),
    age: float = 0.0,
    remaining_deadline: float | None = None,
    was_accepted: bool = False,
    tenant: str = "",
    priority: int = 0,
    remaining_queue_ttl: float | None = None,
    remaining_first_token: float | None = None,
    cache_salt: str = "",
    reads_cache: bool = True,
    max_cached_tokens: int | None = None,
    writes_cache: bool = True,
    resume_grace: float | None = None,
) -> RequestRecord:
    """Return a record; its sampling, which the scheduler passes on unread, is the seed of the fake model."""
    return RequestRecord(
        id=(incarnation, counter),
        label="",
        model=model,
        model_revision=model_revision,
        tenant=tenant,
        prompt_token_ids=tuple(prompt),
        sampling=seed,
        stopping=StoppingParams(max_tokens, min_tokens, frozenset(stop_token_ids)),
        choices=tuple(choices),
        age=age,
        remaining_deadline=remaining_deadline,
        traceparent="",
        was_accepted=was_accepted,
        priority=priority,
        remaining_queue_ttl=remaining_queue_ttl,
        remaining_first_token=remaining_first_token,
        cache_salt=cache_salt,
        reads_cache=reads_cache,
        max_cached_tokens=max_cached_tokens,
        writes_cache=writes_cache,
        resume_grace=resume_grace,
    )


def next_token(
    token_ids: Sequence[int], num_prompt_tokens: int, choice: int, seed: object, stopping: StoppingParams
) -> int:
    """Return the fake model's token after token_ids: a pure function of the whole list, the choice and the seed.

    A token that is missing, doubled or of another sequence changes everything after it. As a real sampler does, it
    yields no stop token before min_tokens.
    """
    assert isinstance(seed, int)
    digest = (seed * 0x9E3779B97F4A7C15 + choice + 1) & _MASK
    for token_id in token_ids:
        digest = ((digest ^ token_id) * 0xBF58476D1CE4E5B9 + num_prompt_tokens) & _MASK
        digest ^= digest >> 29
    token_id = digest % VOCAB_SIZE
    if len(token_ids) - num_prompt_tokens < stopping.min_tokens:
        while token_id in stopping.stop_token_ids:
            token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def undisturbed(record: RequestRecord, choice: int, *, max_model_len: int = 1 << 30) -> tuple[list[int], ChoiceEnd]:
    """Return what one choice must come to, whatever happens on the way: computed token by token, alone."""
    stopping = record.stopping
    prompt = list(record.prompt_token_ids)
    output: list[int] = []
    while True:
        token_id = next_token([*prompt, *output], len(prompt), choice, record.sampling, stopping)
        output.append(token_id)
        if token_id in stopping.stop_token_ids and len(output) > stopping.min_tokens:
            return output, ChoiceEnd(FinishReason.STOP, token_id)
        if len(output) == stopping.max_tokens or len(prompt) + len(output) == max_model_len:
            return output, ChoiceEnd(FinishReason.LENGTH)


@dataclass
class _Stay:
    """All that the executor knows of one handle."""

    token_ids: list[int]
    new: NewSequence
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    is_over: bool = False


class FakeExecutor:
    """Runs batches as the contract says, with a paged memory that holds the computed tokens themselves.

    What a row attends to is read back from that memory through the block table, so a block that two sequences write
    to, or that is reused too early, changes tokens. With a window it reads no further back than that, at every token
    that it computes: one that read something wrong is wrong itself. Broken contracts are AssertionErrors; checksums
    that disagree are DESYNC.
    """

    def __init__(self, spec: ExecutorSpec, session: int) -> None:
        self.spec = spec
        self.session = session
        self.num_steps = 0
        self._stays: dict[int, _Stay] = {}
        self._used_handles: set[int] = set()
        self._lost_handles: set[int] = set()
        self._memory: list[int | None] = [None] * (spec.num_blocks * spec.block_size)

    @property
    def handles(self) -> set[int]:
        """Handles it holds."""
        return set(self._stays)

    def token_ids(self, handle: int) -> list[int] | None:
        """All tokens of a stay that can still run; None where there is no such stay."""
        stay = self._stays.get(handle)
        return None if stay is None or stay.is_over else stay.token_ids

    def run(
        self,
        batch: ScheduledBatch,
        *,
        failure: StepFailureReason | None = None,
        row_statuses: Mapping[int, RowStatus] | None = None,
    ) -> BatchResult:
        """Run one step. failure fails it whole; row_statuses says, by handle, which rows go wrong, and how."""
        self._check(batch)
        for handle in batch.released_handles:
            self._stays.pop(handle, None)
            self._lost_handles.discard(handle)
        for new in batch.new_sequences:
            assert new.num_cached_tokens < len(new.token_ids), "the last token is always computed"
            self._stays[new.handle] = _Stay(list(new.token_ids), new, num_computed_tokens=new.num_cached_tokens)
        handles = [row.handle for row in batch.rows]
        if failure is None and self._lost_handles.intersection(handles):
            failure = StepFailureReason.REFUSED
        if failure is not None:
            for handle in handles:
                self._stays.pop(handle, None)
            self._lost_handles.update(handles)
            return BatchResult(batch.session, batch.step, NO_RESULTS, failure, "injected")
        statuses = row_statuses or {}
        rows = (self._run_row(row, statuses.get(row.handle, RowStatus.OK)) for row in batch.rows)
        return BatchResult(batch.session, batch.step, ResultColumns.of(rows))

    def _check(self, batch: ScheduledBatch) -> None:
        self.num_steps += 1
        assert (batch.session, batch.step) == (self.session, self.num_steps), "steps come in order"
        handles = [row.handle for row in batch.rows]
        new_handles = {new.handle for new in batch.new_sequences}
        assert len(handles) == len(set(handles)), "one row per sequence"
        assert len(handles) <= self.spec.max_num_seqs
        assert batch.num_tokens == sum(row.num_scheduled_tokens for row in batch.rows)
        assert batch.num_tokens <= self.spec.max_num_batched_tokens
        assert all(row.num_scheduled_tokens >= 1 for row in batch.rows)
        assert new_handles <= set(handles), "each new sequence has a row"
        assert not new_handles & self._used_handles, "handles are never reused"
        assert not set(handles) & set(batch.released_handles), "a released handle has no row"
        assert set(batch.released_handles) <= self._used_handles, "only what was sent is released"
        assert 0 not in new_handles
        self._used_handles |= new_handles

    def _run_row(self, row: ScheduledRow, status: RowStatus) -> RowResult:
        stay = self._stays.get(row.handle)
        if stay is None:
            return RowResult(row.handle, RowStatus.DESYNC, (), None)
        if stay.is_over:
            return RowResult(row.handle, RowStatus.SKIPPED, (), None)
        if row.num_computed_tokens != stay.num_computed_tokens:
            status = RowStatus.DESYNC
        end = row.num_computed_tokens + row.num_scheduled_tokens
        num_null = self._num_passed(stay) if not stay.block_table else 0
        stay.block_table.extend(row.new_blocks)
        if end > len(stay.token_ids) or end > len(stay.block_table) * self.spec.block_size:
            status = RowStatus.BAD_INPUT
        if end >= self.spec.max_model_len:
            status = RowStatus.BAD_INPUT
        if any(not 0 < block < self.spec.num_blocks for block in row.new_blocks[num_null:]) or any(
            row.new_blocks[:num_null]
        ):
            status = RowStatus.BAD_INPUT
        if status is not RowStatus.OK:
            stay.is_over = True
            return RowResult(row.handle, status, (), None)
        for position in range(row.num_computed_tokens, end):
            is_sound = not self.spec.window or self._read(stay, position) == stay.token_ids[:position]
            self._memory[self._slot(stay, position)] = stay.token_ids[position] if is_sound else None
        stay.num_computed_tokens = end
        if end < len(stay.token_ids):
            return RowResult(row.handle, RowStatus.OK, (), None)
        return RowResult(row.handle, RowStatus.OK, (self._sample(stay),), None)

    def _sample(self, stay: _Stay) -> int:
        new = stay.new
        seen = self._read(stay, len(stay.token_ids))
        context = [-1 if token_id is None else token_id for token_id in seen]
        token_id = next_token(context, new.num_prompt_tokens, new.choice, new.sampling, new.stopping)
        stay.token_ids.append(token_id)
        num_output_tokens = len(stay.token_ids) - new.num_prompt_tokens
        is_stop = token_id in new.stopping.stop_token_ids and num_output_tokens > new.stopping.min_tokens
        stay.is_over = is_stop or num_output_tokens >= new.stopping.max_tokens
        return token_id

    def _read(self, stay: _Stay, length: int) -> list[int | None]:
        """Give the first `length` tokens: those within the window of what follows from memory, others as they are."""
        first = max(0, length + 1 - self.spec.window) if self.spec.window else 0
        read = [self._memory[self._slot(stay, position)] for position in range(first, length)]
        return [*stay.token_ids[:first], *read]

    def _num_passed(self, stay: _Stay) -> int:
        """Blocks of a new stay that the window of its first token to compute has passed: they must be null."""
        if not self.spec.window:
            return 0
        return max(0, stay.num_computed_tokens + 1 - self.spec.window) // self.spec.block_size

    def _slot(self, stay: _Stay, position: int) -> int:
        block, offset = divmod(position, self.spec.block_size)
        return stay.block_table[block] * self.spec.block_size + offset


class FakeGateway:
    """Takes the engine's events as a gateway does, and insists on what it is promised: no gap, one ending."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[RequestId, int], list[int]] = {}
        self.ends: dict[tuple[RequestId, int], ChoiceEnd] = {}
        self.done: dict[RequestId, RequestDone] = {}

    def accept(self, record: RequestRecord) -> None:
        """Note what the gateway holds of a request that it submits."""
        for index, choice in enumerate(record.choices):
            self.tokens[record.id, index] = list(choice.token_ids)
            if choice.end is not None:
                self.ends[record.id, index] = choice.end

    def keep(self, request: RequestId, choice: int, kept_tokens: int) -> None:
        """Forget the tokens of an open choice past kept_tokens, as with a stop that only the text shows."""
        if (request, choice) not in self.ends:
            del self.tokens.get((request, choice), [])[kept_tokens:]

    def receive(self, events: Sequence[Event]) -> None:
        """Apply events."""
        for event in events:
            if isinstance(event, TokensOut):
                key = event.request, event.choice
                assert event.request not in self.done, "tokens after the request ended"
                assert key not in self.ends, "tokens after the choice ended"
                assert event.token_ids or event.end or event.prompt_logprobs, "an event about nothing"
                assert event.first_token_index == len(self.tokens[key]), "a gap, or a token twice"
                self.tokens[key].extend(event.token_ids)
                if event.end is not None:
                    self.ends[key] = event.end
            elif isinstance(event, StepTokens):
                for counter, choice, index, token_id in zip(*event[1:], strict=True):
                    request = event.gateway, counter
                    assert request not in self.done, "tokens after the request ended"
                    assert (request, choice) not in self.ends, "tokens after the choice ended"
                    assert index == len(self.tokens[request, choice]), "a gap, or a token twice"
                    self.tokens[request, choice].append(token_id)
            else:
                assert event.request not in self.done, "a request ended twice"
                self.done[event.request] = event
                if event.error is None:
                    choices = [key for key in self.tokens if key[0] == event.request]
                    assert all(key in self.ends for key in choices), "done with a choice open"
