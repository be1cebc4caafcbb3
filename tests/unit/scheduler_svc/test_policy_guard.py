"""A policy that is wrong: no request pays for it, and an operator sees it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from cells import Cell, make_cell
from fakes import make_record, make_spec, undisturbed

from scheduler_svc.policies.base import BaseScheduler, SequenceView
from scheduler_svc.policies.fcfs import FcfsScheduler
from scheduler_svc.policies.guard import HOOKS, LOG_INTERVAL, PolicyGuard
from scheduler_svc.sequence import LiveRequest, SequenceStatus

Answer = Callable[[], Any]


def fails() -> Any:
    """Answer as a hook with a fault in it."""
    raise ZeroDivisionError("a fault of the policy")


class UnspeakableError(Exception):
    """An error that fails itself when it is asked what it is."""

    def __str__(self) -> str:
        raise ZeroDivisionError("no words")


UNUSUAL: list[type[BaseException]] = [
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    StopIteration,
    asyncio.CancelledError,
    UnspeakableError,
]


def raises(error: type[BaseException]) -> Answer:
    """Return an answer that raises."""

    def answer() -> Any:
        raise error

    return answer


class Wrong(BaseScheduler):
    """Serves the last comer first, but for one hook, which is wrong."""

    def __init__(self, hook: str, answer: Answer) -> None:
        self._hook = hook
        self._answer = answer
        self.asked = dict.fromkeys(HOOKS, 0)

    def admission_key(self, view: SequenceView, now: float) -> tuple[float, ...]:
        return self._give("admission_key", (-view.arrival,))  # type: ignore[no-any-return]

    def should_shed(self, view: SequenceView, now: float) -> bool:
        return self._give("should_shed", False)  # type: ignore[no-any-return]

    def choose_victim(self, running: Sequence[SequenceView], wanting: SequenceView, now: float) -> SequenceView | None:
        victim = None if wanting.status is SequenceStatus.WAITING else running[-1]
        return self._give("choose_victim", victim)  # type: ignore[no-any-return]

    def may_overtake(self, head: SequenceView, now: float) -> bool:
        return self._give("may_overtake", False)  # type: ignore[no-any-return]

    def prefill_quota(self, view: SequenceView, budget: int) -> int:
        return self._give("prefill_quota", budget)  # type: ignore[no-any-return]

    def on_tokens(self, view: SequenceView, prompt: int, output: int) -> None:
        self._give("on_tokens", None)

    def _give(self, hook: str, right: Any) -> Any:
        self.asked[hook] += 1
        return self._answer() if hook == self._hook else right


NONSENSE: list[tuple[str, Answer]] = [
    *((hook, fails) for hook in HOOKS),
    *((hook, raises(error)) for hook in HOOKS for error in UNUSUAL),
    *(
        ("admission_key", lambda answer=answer: answer)
        for answer in (None, 1.0, "first", [1.0], (math.nan,), (1.0, math.nan), ("a",), (None,), (1j,))
    ),
    *((hook, lambda answer=answer: answer) for hook in ("should_shed", "may_overtake") for answer in (None, 1, "no")),
    *(("choose_victim", lambda answer=answer: answer) for answer in ("nobody", 0, True)),
    *(("prefill_quota", lambda answer=answer: answer) for answer in (None, -1, 0.5, True, "all", math.inf)),
]


def crowded_cell(policy: BaseScheduler) -> tuple[Cell, list[int]]:
    """Return a settled cell that had every hook asked, and the order in which its six requests were first admitted."""
    cell = make_cell(make_spec(num_blocks=9, block_size=2, max_num_seqs=3), depth=1, policy=policy)
    records = [make_record(counter, prompt=[counter] * (2 + counter % 3), max_tokens=7) for counter in range(1, 7)]
    for record in records:
        cell.submit(record)
        cell.now += 0.1
    cell.settle()
    for record in records:
        assert cell.gateway.done[record.id].error is None
        assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0)[0]
    admitted = [new.request[1] for batch in cell.batches for new in batch.new_sequences]
    return cell, list(dict.fromkeys(admitted))


@pytest.mark.parametrize(("hook", "answer"), NONSENSE)
def test_a_wrong_answer_fails_no_request_and_is_counted(hook: str, answer: Answer) -> None:
    """Whatever a hook does, every request ends as in a run alone; the hook's failures are counted, and no other's."""
    policy = Wrong(hook, answer)
    cell, _ = crowded_cell(policy)
    failures = cell.engine.load().num_policy_failures
    assert failures[hook] > 0
    # on_tokens is told after the step: it stops nothing.
    assert {other for other, number in failures.items() if number} == {hook}


@pytest.mark.parametrize("answer", [fails, lambda: (math.nan,), lambda: None])
def test_without_an_order_first_come_is_first_served(answer: Answer) -> None:
    """A policy whose keys are all worthless leaves the order of arrival; a right one has its own."""
    _, order = crowded_cell(Wrong("admission_key", answer))
    assert order == [1, 2, 3, 4, 5, 6]
    _, order = crowded_cell(Wrong("", fails))
    assert order == [6, 5, 4, 3, 2, 1]


def test_every_hook_was_asked() -> None:
    """The runs above ask each hook, so none passes for want of a question; a policy that is right has no failures."""
    policy = Wrong("", fails)
    cell, _ = crowded_cell(policy)
    assert all(policy.asked.values()), policy.asked
    assert not any(cell.engine.load().num_policy_failures.values())


def make_view(counter: int, arrival: float = 100.0) -> SequenceView:
    """Return a view of a request that came at `arrival`, before 100."""
    return LiveRequest(make_record(counter, age=100.0 - arrival), 100, 100.0).sequences[0].view


def test_after_a_failure_the_policy_is_not_asked_until_the_next_step() -> None:
    """Within the step first come, first served answers for every hook; then the policy has another chance."""
    policy = Wrong("should_shed", fails)
    guard = PolicyGuard(policy)
    view = make_view(1)
    guard.begin_step(1.0)
    assert guard.prefill_quota(view, 9) == 9
    assert guard.should_shed(view, 1.0) is False
    assert guard.should_shed(view, 1.0) is False
    assert guard.prefill_quota(view, 9) == 9
    assert guard.may_overtake(view, 1.0) is False
    assert guard.choose_victim([view], make_view(2), 1.0) is None
    assert policy.asked == dict.fromkeys(HOOKS, 0) | {"prefill_quota": 1, "should_shed": 1}
    guard.begin_step(2.0)
    assert guard.prefill_quota(view, 9) == 9
    assert policy.asked["prefill_quota"] == 2


def test_a_victim_that_was_not_offered_is_nonsense() -> None:
    """Only one of those that run may be named, each at its own object."""
    views = [make_view(1), make_view(2)]
    for view in views:
        view._sequence.status = SequenceStatus.RUNNING
    guard = PolicyGuard(Wrong("choose_victim", lambda: views[0]))
    guard.begin_step(1.0)
    assert guard.choose_victim(views[1:], views[1], 1.0) is views[1]
    assert guard.num_failures["choose_victim"] == 1


def test_numbers_of_a_key_are_made_plain() -> None:
    """Keys are compared often and anywhere: numbers of a user's own type cannot raise there. A huge int is a number."""

    class Touchy(float):
        def __lt__(self, other: object) -> bool:
            raise ArithmeticError

    guard = PolicyGuard(Wrong("admission_key", lambda: (Touchy(2.5), True, 10**400)))
    key = guard.admission_key(make_view(1), 1.0)
    assert key == (2.5, 1, 10**400)
    assert [type(part) for part in key] == [float, int, int]


def test_more_than_the_budget_is_cut() -> None:
    """A policy may say `as much as you like`: that is an answer."""
    guard = PolicyGuard(Wrong("prefill_quota", lambda: 10**9))
    guard.begin_step(1.0)
    assert guard.prefill_quota(make_view(1), 64) == 64
    assert guard.num_failures["prefill_quota"] == 0


def test_who_does_not_listen_is_not_told() -> None:
    """A policy without on_tokens costs no call for each token; one of its own, on class or object, is called."""
    assert PolicyGuard(FcfsScheduler()).on_tokens is None
    told = []
    policy = FcfsScheduler()
    policy.on_tokens = lambda view, prompt, output: told.append((prompt, output))  # type: ignore[method-assign]
    tell = PolicyGuard(policy).on_tokens
    assert tell is not None
    tell(make_view(1), 3, 0)
    assert told == [(3, 0)]


def test_each_hook_is_logged_at_most_once_an_interval(caplog: pytest.LogCaptureFixture) -> None:
    """A line names policy, hook, fault and the count so far, with the stack; the next comes after the interval."""
    guard = PolicyGuard(Wrong("admission_key", fails))
    with caplog.at_level(logging.ERROR):
        for now in (50.0, 50.1, 50.0 + LOG_INTERVAL - 0.1, 50.0 + LOG_INTERVAL):
            guard.admission_key(make_view(1), now)
    first, second = caplog.records
    fields = {"policy": "Wrong", "hook": "admission_key", "error": "a fault of the policy", "failures": 1}
    assert first.fields == fields  # type: ignore[attr-defined]
    assert second.fields == fields | {"failures": 4}  # type: ignore[attr-defined]
    assert first.exc_info is not None


def test_an_error_without_words_is_logged_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """Its type stands in for what it cannot say."""
    guard = PolicyGuard(Wrong("admission_key", raises(UnspeakableError)))
    with caplog.at_level(logging.ERROR):
        assert guard.admission_key(make_view(1), 1.0) is None
    (record,) = caplog.records
    assert record.fields["error"] == "UnspeakableError, which cannot say more"  # type: ignore[attr-defined]
