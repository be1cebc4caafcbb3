"""Builds steps: what must never differ between policies.

One step, in this order:

1. **Decodes.** Every running sequence with one token to compute gets its row. At most max_num_batched_tokens
   sequences run, so the budget always reaches; a long prompt takes only what is left. A decoding sequence therefore
   has a row in every step unless it is preempted, and the time between two of its tokens is at most that of one step
   of max_num_batched_tokens tokens.
2. **The reserve**, where there is one: short prefills in progress and short newcomers, within what it keeps for them.
3. **Prefills** in progress, in order of admission, each as long a chunk as budget and policy allow.
4. **Admissions**, in the order of the queue, while the head fits. Nobody overtakes a head that does not: it would
   starve. A head steps aside while those that run compute most of what it needs: it then shares their blocks.

Whoever does not fit may evict others, whom the policy names. A victim's blocks are free at once, for this very step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import nlargest

from scheduler_svc.batch import NewSequence, ScheduledBatch
from scheduler_svc.executor_state import ExecutorState, InFlightStep
from scheduler_svc.keyed_heap import Entry
from scheduler_svc.policies.guard import PolicyGuard
from scheduler_svc.sequence import LiveRequest, Sequence, SequenceStatus
from scheduler_svc.step_draft import StepDraft
from scheduler_svc.time_limits import Miss, find_miss, has_limit
from scheduler_svc.waiting_queue import QueueKey, WaitingQueue
from scheduler_svc.waits import is_worth_waiting, may_be_overtaken, must_wait_for_isolation

GROWTH_BLOCKS = 1
"""Free blocks that an admission leaves for each sequence already running.

With one each, nobody who runs can be short of a block within the next block_size steps, so what was just admitted is
not evicted again before its prefill has paid off.
"""


MAX_SET_ASIDE = 16
"""Most sequences per step that step aside for a prefix that is being computed; more would make the step long."""

MAX_VICTIMS = 16
"""Most that are evicted for one waiting sequence. The policy looks at all that run for each of them, in every step in
which they do not suffice; and the work of more is too much to throw away.
"""

_NO_PREFIX: list[int] = []


class BatchBuilder:
    """Builds the steps of any executor under one policy. Also home of preemption, whoever asks for it."""

    def __init__(self, policy: PolicyGuard) -> None:
        self._policy = policy
        self.num_preemptions = 0
        # Over all admissions: tokens admitted, and those of them whose KV was there already.
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0

    def queue_key(self, sequence: Sequence, now: float) -> QueueKey:
        """The place of a sequence in a queue."""
        rank = 0 if sequence.request.was_started and not sequence.has_yielded else 1
        return rank, self._policy.admission_key(sequence.view, now)

    def preempt(self, executor: ExecutorState, sequence: Sequence, now: float, *, yields: bool = False) -> None:
        """End the stay of a running sequence; it queues here again and is recomputed from its full record.

        Tokens in flight are committed when they arrive; it is not admitted before they have. `yields`: it queues by its
        key and not before all that have not started.
        """
        executor.end_stay(sequence)
        sequence.has_yielded = yields
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        executor.enqueue(sequence, self.queue_key(sequence, now))

    def has_room(self, executor: ExecutorState, sequence: Sequence, now: float, prefix: list[int] = _NO_PREFIX) -> bool:
        """Whether an executor could admit a waiting sequence beside `prefix` now, nobody evicted."""
        num_running = len(executor.running)
        blocks = executor.kv.blocks_needed(sequence, sequence.num_tokens)
        held_blocks, held_rows = executor.reserve.held_from(sequence, blocks, now)
        return num_running + held_rows < executor.max_running and executor.kv.can_fit(
            sequence, sequence.num_tokens, prefix, reserve=GROWTH_BLOCKS * num_running + held_blocks
        )

    def _has_room_in_reserve(self, executor: ExecutorState, sequence: Sequence, now: float) -> bool:
        blocks = executor.kv.blocks_needed(sequence, sequence.num_tokens)
        return executor.reserve.has_room(blocks) and self.has_room(executor, sequence, now)

    def build(
        self, executor: ExecutorState, now: float
    ) -> tuple[ScheduledBatch | None, list[tuple[LiveRequest, Miss | None]]]:
        """Build the next step and put it in flight.

        Returns the batch, or None where there is nothing to do, and the requests that are not to be started, each with
        the time limit that it does not keep, None where the policy sheds it: the caller ends them.
        """
        self._policy.begin_step(now)
        draft = self._draft(executor, now)
        shed = draft.shed
        if not draft.handles and not executor.in_flight and (executor.running or executor.waiting):
            # The policy's answers leave the executor with work and nothing to do.
            self._policy.fall_back()
            draft = self._draft(executor, now)
            shed = shed + draft.shed
        executor.drain.step(now, is_waiting=bool(executor.waiting))
        if not draft.handles and not executor.released_handles:
            return None, shed
        executor.num_steps_built += 1
        batch = ScheduledBatch(
            session=executor.session,
            step=executor.num_steps_built,
            released_handles=tuple(executor.released_handles),
            new_sequences=tuple(draft.new_sequences),
            columns=draft.columns(),
            num_tokens=executor.spec.max_num_batched_tokens - draft.budget,
        )
        executor.released_handles.clear()
        executor.in_flight.append(
            InFlightStep(batch.step, draft.sequences, batch.columns, draft.samples, batch.num_tokens, now)
        )
        return batch, shed

    def _draft(self, executor: ExecutorState, now: float) -> StepDraft:
        draft = StepDraft(executor.spec.max_num_batched_tokens)
        prefills = self._schedule_decodes(draft, executor, now)
        if executor.reserve.is_on:
            prefills = self._schedule_reserve(draft, executor, prefills, now)
        self._schedule_prefills(draft, executor, prefills, now)
        num_rows = len(draft.sequences)
        self._schedule_admissions(draft, executor, executor.waiting, now)
        executor.num_unscheduled_tokens = sum(
            each.num_known_tokens - each.num_computed_tokens
            for each in (*prefills, *draft.sequences[num_rows:])
            if each.status is SequenceStatus.RUNNING
        )
        return draft

    def _schedule_decodes(self, draft: StepDraft, executor: ExecutorState, now: float) -> list[Sequence]:
        """Give each sequence in decode its row; returns those with more than one token to compute.

        The loop runs once per sequence and step, so it does the work of StepDraft.add in place: in steady decode a row
        costs a few comparisons and three numbers, and a block once in block_size steps.
        """
        prefills: list[Sequence] = []
        sequences, handles, num_computed_tokens = draft.sequences, draft.handles, draft.num_computed_tokens
        kv = executor.kv
        for sequence in list(executor.running):
            computed = sequence.num_computed_tokens
            is_steady = computed < sequence.steady_until
            if not is_steady:
                if sequence.status is not SequenceStatus.RUNNING:
                    continue
                if sequence.num_known_tokens != computed + 1:
                    prefills.append(sequence)
                    continue
                if computed + 1 >= sequence.max_num_tokens:
                    continue
            if computed >= sequence.num_slots:
                # It lacks one block.
                if not kv.can_append_block(sequence) and not self._make_room(draft, executor, sequence, now):
                    continue
                draft.new_blocks[len(handles)] = kv.append_block(sequence)
            sequences.append(sequence)
            handles.append(sequence.handle)
            num_computed_tokens.append(computed)
            sequence.num_computed_tokens = computed + 1
            if not is_steady:
                sequence.num_placeholders += 1
                sequence.num_in_flight_rows += 1
        draft.level()
        return prefills

    def _schedule_prefills(
        self, draft: StepDraft, executor: ExecutorState, prefills: Iterable[Sequence], now: float
    ) -> None:
        for sequence in prefills:
            # A decode may have evicted it.
            if sequence.status is SequenceStatus.RUNNING and draft.budget:
                quota = self._quota(sequence, draft.budget)
                if quota and executor.kv.is_growing(sequence):
                    quota = self._growable(draft, executor, sequence, quota, now)
                if quota:
                    draft.add(sequence, quota, executor.kv.append(sequence, sequence.num_computed_tokens + quota))

    def _growable(self, draft: StepDraft, executor: ExecutorState, sequence: Sequence, quota: int, now: float) -> int:
        """How many tokens of its quota a prefill that lacks blocks can have blocks for. What it was promised suffices,
        but where others share what its window has passed, or many steps are in flight: these give blocks back.
        """
        kv, computed = executor.kv, sequence.num_computed_tokens
        if kv.num_growable_tokens(sequence) <= computed and (
            executor.in_flight or not self._make_room(draft, executor, sequence, now)
        ):
            return 0
        return min(quota, kv.num_growable_tokens(sequence) - computed)

    def _schedule_reserve(
        self, draft: StepDraft, executor: ExecutorState, prefills: list[Sequence], now: float
    ) -> list[Sequence]:
        """Give short ones, running or new, what the reserve keeps for them; returns the prefills without a row yet."""
        reserve = executor.reserve
        short = [sequence for sequence in prefills if sequence in reserve.running]
        if not short and not reserve.waiting:
            return prefills
        others = [sequence for sequence in prefills if sequence not in reserve.running]
        demand = sum(sequence.num_known_tokens - sequence.num_computed_tokens for sequence in others)
        first = executor.waiting.peek()
        head = None if first is None or first[1] in reserve.waiting else first[1]
        if head is not None and self.has_room(executor, head, now):
            demand += head.num_tokens
        num_others = draft.budget - reserve.allowance(draft.budget, demand)
        draft.budget -= num_others
        num_rows = len(draft.sequences)
        self._schedule_prefills(draft, executor, short, now)
        if head is None or may_be_overtaken(executor, head):
            self._schedule_admissions(draft, executor, reserve.waiting, now)
        draft.budget += num_others
        served = set(draft.sequences[num_rows:])
        return [sequence for sequence in prefills if sequence not in served]

    def _schedule_admissions(
        self, draft: StepDraft, executor: ExecutorState, waiting: WaitingQueue, now: float
    ) -> None:
        """Admit from a queue, the executor's or the reserve's lane, while its head fits."""
        is_lane = waiting is not executor.waiting
        aside: list[Entry[Sequence]] = []
        is_overtaking = False
        while draft.budget and (head := waiting.peek()) is not None:
            sequence = head[1]
            if is_lane and not self._has_room_in_reserve(executor, sequence, now):
                break
            prefix = executor.kv.find_prefix(sequence)
            if is_worth_waiting(executor, sequence, prefix):
                if len(aside) == MAX_SET_ASIDE:
                    # Who is behind a crowd of twins waits with it: admitted, each would compute the prefix once more.
                    break
                aside.append(waiting.set_aside())
            elif not self._admit(draft, executor, sequence, prefix, now, may_evict=not is_overtaking):
                if len(aside) == MAX_SET_ASIDE or must_wait_for_isolation(executor, sequence):
                    break
                if not is_overtaking and not self._policy.may_overtake(sequence.view, now):
                    break
                is_overtaking = True
                aside.append(waiting.set_aside())
        for entry in aside:
            waiting.put_back(entry)

    def _admit(
        self,
        draft: StepDraft,
        executor: ExecutorState,
        sequence: Sequence,
        prefix: list[int],
        now: float,
        *,
        may_evict: bool,
    ) -> bool:
        """Admit or shed a waiting sequence; False where it has to wait. `prefix`: the blocks that it can share."""
        if sequence.num_in_flight_rows or must_wait_for_isolation(executor, sequence):
            return False
        request = sequence.request
        if not request.has_run:
            miss = _find_miss(executor, sequence, prefix, now)
            if miss is not None or (not request.was_started and self._policy.should_shed(sequence.view, now)):
                executor.dequeue(sequence)
                draft.shed.append((request, miss))
                return True
        if not may_evict and not self.has_room(executor, sequence, now, prefix):
            return False
        quota = self._quota(sequence, draft.budget, len(prefix) * executor.spec.block_size)
        if not quota or not self._make_room(draft, executor, sequence, now, prefix):
            return False
        # Evictions give budget back, never take it.
        record = request.record
        queue_seconds = None if request.was_started else now - request.arrival
        blocks = executor.begin_stay(sequence, prefix, len(prefix) * executor.spec.block_size + quota)
        self.num_prefix_query_tokens += sequence.num_tokens
        self.num_prefix_hit_tokens += sequence.num_computed_tokens
        draft.new_sequences.append(
            NewSequence(
                request=sequence.request_id,
                handle=sequence.handle,
                token_ids=sequence.token_ids,
                num_prompt_tokens=sequence.num_prompt_tokens,
                choice=sequence.choice,
                sampling=record.sampling,
                stopping=record.stopping,
                num_cached_tokens=sequence.num_cached_tokens,
                queue_seconds=queue_seconds,
            )
        )
        draft.add(sequence, quota, blocks)
        return True

    def _make_room(
        self,
        draft: StepDraft,
        executor: ExecutorState,
        wanting: Sequence,
        now: float,
        prefix: list[int] = _NO_PREFIX,
    ) -> bool:
        """Whether `wanting` fits beside `prefix`, once those are evicted whom the policy names.

        Nobody is where that would not do.
        """
        kv = executor.kv
        is_waiting = wanting.status is SequenceStatus.WAITING
        # Whoever runs is short of one.
        needed = kv.blocks_taken(wanting, wanting.num_known_tokens, prefix) if is_waiting else 1
        held_blocks = held_rows = 0
        if is_waiting:
            blocks = kv.blocks_needed(wanting, wanting.num_tokens)
            held_blocks, held_rows = executor.reserve.held_from(wanting, blocks, now)

        def fits(num_available_blocks: int, num_running: int) -> bool:
            if not is_waiting:
                return needed <= num_available_blocks
            return (
                num_running + held_rows < executor.max_running
                and needed + GROWTH_BLOCKS * num_running + held_blocks <= num_available_blocks
            )

        if fits(kv.num_available_blocks, len(executor.running)):
            return True
        victims = self._choose_victims(executor, wanting, prefix, fits, now)
        for victim in victims:
            draft.drop(victim)
            self.preempt(executor, victim, now, yields=is_waiting or not self._policy.preempted_first)
        return bool(victims) and wanting not in victims

    def _choose_victims(
        self,
        executor: ExecutorState,
        wanting: Sequence,
        prefix: list[int],
        fits: Callable[[int, int], bool],
        now: float,
    ) -> list[Sequence]:
        """Those whose eviction lets `wanting` fit, or `wanting` alone where the policy has it give way, or nobody."""
        is_waiting = wanting.status is SequenceStatus.WAITING
        candidates = {
            sequence.view: sequence
            for sequence in executor.running
            if not is_waiting or sequence.num_tokens > sequence.num_tokens_at_admission
        }
        kv = executor.kv
        num_available_blocks = kv.num_available_blocks
        victims: list[Sequence] = []
        while not fits(num_available_blocks, len(executor.running) - len(victims)):
            if not candidates or (is_waiting and len(victims) == MAX_VICTIMS):
                return []
            view = self._policy.choose_victim(tuple(candidates), wanting.view, now)
            if view is None:
                return []
            victim = candidates.pop(view)
            if victim is wanting:
                return [wanting]
            num_available_blocks += kv.num_reclaimable_blocks(victim, prefix) + kv.num_promised_blocks(victim)
            victims.append(victim)
            if len(victims) == 1 and is_waiting:
                # Those with the longest tables would not do: the policy need not be asked for more of them.
                tables = (each.num_held_blocks + kv.num_promised_blocks(each) for each in candidates.values())
                most = nlargest(MAX_VICTIMS - 1, tables)
                if not fits(num_available_blocks + sum(most), len(executor.running) - 1 - len(most)):
                    return []
        return victims

    def _quota(self, sequence: Sequence, budget: int, num_cached_tokens: int = 0) -> int:
        """Tokens that a sequence may compute in this step: what it lacks, within the policy's quota and the budget.

        num_cached_tokens: of a sequence that waits, what it need not compute.
        """
        quota = self._policy.prefill_quota(sequence.view, budget)
        return max(0, min(quota, sequence.num_known_tokens - sequence.num_computed_tokens - num_cached_tokens))


def _find_miss(executor: ExecutorState, sequence: Sequence, prefix: list[int], now: float) -> Miss | None:
    """The time limit that a request could not keep if this sequence of it were admitted now."""
    if not has_limit(sequence.request):
        return None
    return find_miss(sequence.request, now, executor.lead(sequence, prefix, now))
