"""The real engine between requests and an executor that are made up, on a clock that is made up too.

Nothing here waits and nothing is random beyond a seed, so a run is the same on every machine. A step takes what the
cost model says; up to `depth` steps are under way, and the executor runs them one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_svc.batch import (
    BatchResult,
    ExecutorSpec,
    ResultColumns,
    RowResult,
    RowStatus,
    ScheduledBatch,
    StepTokens,
    TokensOut,
)
from scheduler_svc.burst_reserve import ReserveSettings
from scheduler_svc.engine import Engine
from scheduler_svc.policies.registry import load_policy
from scheduler_svc.request_record import ChoiceRecord, RequestId, RequestRecord, StoppingParams

DEPTH = 2
_MODEL, _REVISION = "made-up", "r1"
_VOCAB_SIZE = 1000


@dataclass(frozen=True)
class CostModel:
    """What a step takes, in seconds: a floor, and so much for each token computed and each token attended to."""

    step: float = 4e-3
    token: float = 25e-6
    context_token: float = 5e-9

    def seconds(self, batch: ScheduledBatch) -> float:
        """The time that the executor needs for a step."""
        context = sum(row.num_scheduled_tokens * row.num_computed_tokens for row in batch.rows)
        return self.step + self.token * batch.num_tokens + self.context_token * context


@dataclass(frozen=True)
class Job:
    """A request of the workload. at: seconds after the start; lengths in tokens; kind is for the figures."""

    at: float
    num_prompt_tokens: int
    max_tokens: int
    kind: str


@dataclass
class Outcome:
    """What became of a job. first_token and end: seconds after its arrival."""

    job: Job
    first_token: float = 0.0
    end: float = 0.0


@dataclass
class Run:
    """A run to its end. seconds is how long it took; steps and tokens are those computed."""

    outcomes: list[Outcome]
    seconds: float = 0.0
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0


class MadeUpExecutor:
    """Answers every step well: a row that reaches its sequence's last token samples one."""

    def __init__(self) -> None:
        self._num_tokens: dict[int, int] = {}

    def run(self, batch: ScheduledBatch) -> BatchResult:
        """Return the answer to a step."""
        for handle in batch.released_handles:
            self._num_tokens.pop(handle, None)
        for new in batch.new_sequences:
            self._num_tokens[new.handle] = len(new.token_ids)
        rows = []
        for row in batch.rows:
            samples = row.num_computed_tokens + row.num_scheduled_tokens == self._num_tokens[row.handle]
            self._num_tokens[row.handle] += samples
            rows.append(RowResult(row.handle, RowStatus.OK, (7,) if samples else (), None))
        return BatchResult(batch.session, batch.step, ResultColumns.of(rows))


@dataclass
class _Device:
    """Steps under way, and when the first of them is done."""

    steps: deque[ScheduledBatch] = field(default_factory=deque)
    done_at: float = 0.0


def simulate(
    jobs: Sequence[Job],
    *,
    policy: str,
    share: float,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    cost: CostModel | None = None,
) -> Run:
    """Run every job to its end under a policy with a reserve of `share`, on one executor; jobs are in order of time."""
    cost = cost or CostModel()
    engine = Engine(load_policy(policy), DEPTH, reserve=ReserveSettings(share))
    session = engine.add_executor(_spec(num_blocks, max_num_seqs, budget))
    executor, device = MadeUpExecutor(), _Device()
    run = Run([Outcome(job) for job in jobs])
    coming = deque(enumerate(jobs))
    now, num_open = 0.0, len(jobs)
    while num_open:
        while coming and coming[0][1].at <= now:
            index, job = coming.popleft()
            engine.submit(_record(index, job), now)
        engine.expire(now)
        while (batch := engine.schedule(session, now)) is not None:
            if not device.steps:
                device.done_at = now + cost.seconds(batch)
            device.steps.append(batch)
            run.num_steps += 1
            run.num_computed_tokens += batch.num_tokens
        if device.steps and (not coming or device.done_at <= coming[0][1].at):
            now = device.done_at
            events = engine.update(session, executor.run(device.steps.popleft()), now)
            if device.steps:
                device.done_at = now + cost.seconds(device.steps[0])
            for event in events:
                if isinstance(event, StepTokens):
                    continue  # neither a first token nor an end
                outcome = run.outcomes[event.request[1]]
                if isinstance(event, TokensOut):
                    if event.first_token_index == 0:
                        outcome.first_token = now - outcome.job.at
                    continue
                if event.error is not None:
                    raise event.error
                outcome.end = now - outcome.job.at
                num_open -= 1
        else:
            now = coming[0][1].at
    run.seconds = now
    run.num_preemptions = engine.load().num_preemptions
    return run


def _spec(num_blocks: int, max_num_seqs: int, budget: int) -> ExecutorSpec:
    return ExecutorSpec(
        address="127.0.0.1:1",
        incarnation="0" * 32,
        model=_MODEL,
        model_revision=_REVISION,
        tokenizer_hash="t",
        fingerprint="f",
        block_size=16,
        num_blocks=num_blocks + 1,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=1 << 16,
        vocab_size=_VOCAB_SIZE,
    )


def _record(index: int, job: Job) -> RequestRecord:
    identity: RequestId = ("bench", index)
    # No two prompts share a beginning: this is not about the prefix cache.
    prompt = (index % _VOCAB_SIZE, index // _VOCAB_SIZE, *[5] * (job.num_prompt_tokens - 2))
    return RequestRecord(
        id=identity,
        label="",
        model=_MODEL,
        model_revision=_REVISION,
        tenant="",
        prompt_token_ids=prompt,
        sampling=None,
        stopping=StoppingParams(job.max_tokens, 0, frozenset()),
        choices=(ChoiceRecord(),),
        age=0.0,
        remaining_deadline=None,
        traceparent="",
    )
