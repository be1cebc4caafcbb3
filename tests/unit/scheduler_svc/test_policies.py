"""FCFS, and how policies are found by name."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from fakes import make_record

from scheduler_svc.policies.base import BaseScheduler
from scheduler_svc.policies.fcfs import FcfsScheduler
from scheduler_svc.policies.registry import PolicyError, load_policy
from scheduler_svc.sequence import LiveRequest, Sequence, SequenceStatus


class YoungestFirst(FcfsScheduler):
    """A user's policy."""


class NeedsAnArgument(FcfsScheduler):
    """A policy that cannot be made from a name."""

    def __init__(self, weight: int) -> None:
        self.weight = weight


class LacksHooks(BaseScheduler):
    """A policy that leaves out what has no default."""


class EndsTheProcess(FcfsScheduler):
    """A policy that knows of no other way to complain."""

    def __init__(self) -> None:
        sys.exit("no weights")


class Undecided(FcfsScheduler):
    """A policy with something else where True or False belongs."""

    preempted_first = 0  # type: ignore[assignment]


def make_sequence(counter: int, age: float, deadline: float | None = None) -> Sequence:
    """Return a sequence of a request that is `age` seconds old at time 100."""
    record = make_record(counter, age=age, remaining_deadline=deadline)
    return LiveRequest(record, 100, 100.0).sequences[0]


def test_fcfs_orders_by_arrival() -> None:
    """The older request has the smaller key, whatever the time is now."""
    policy = FcfsScheduler()
    old, young = make_sequence(1, age=5.0), make_sequence(2, age=1.0)
    assert policy.admission_key(old.view, 100.0) < policy.admission_key(young.view, 200.0)


def test_fcfs_sheds_only_what_is_overdue() -> None:
    """Without a deadline nothing is shed; with one, from the moment it passes."""
    policy = FcfsScheduler()
    assert not policy.should_shed(make_sequence(1, age=1e6).view, 100.0)
    with_deadline = make_sequence(2, age=0.0, deadline=2.0).view
    assert not policy.should_shed(with_deadline, 101.9)
    assert policy.should_shed(with_deadline, 102.0)


def test_fcfs_has_the_youngest_give_way() -> None:
    """The victim is the youngest that runs, the last admitted among equals, be it the one that wants room itself."""
    policy = FcfsScheduler()
    old, young, twin = make_sequence(1, 5.0), make_sequence(2, 1.0), make_sequence(3, 1.0)
    for sequence in (old, young, twin):
        sequence.status = SequenceStatus.RUNNING
    running = [old.view, young.view, twin.view]
    assert policy.choose_victim(running, old.view, 100.0) is twin.view
    assert policy.choose_victim(running, twin.view, 100.0) is twin.view
    assert policy.choose_victim(running[:2], old.view, 100.0) is young.view


def test_fcfs_evicts_nobody_for_one_that_waits() -> None:
    """Who waits came later, or was evicted itself: it waits on."""
    running = make_sequence(1, 5.0)
    running.status = SequenceStatus.RUNNING
    assert FcfsScheduler().choose_victim([running.view], make_sequence(2, 9.0).view, 100.0) is None


def test_defaults_leave_the_budget_alone() -> None:
    """Hooks that a policy does not override change nothing."""
    policy = FcfsScheduler()
    view = make_sequence(1, 0.0).view
    assert policy.prefill_quota(view, 17) == 17
    policy.on_tokens(view, 3, 1)


def test_load_policy_finds_built_in_and_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short name and package.module:Class both give a policy that was just made."""
    module = ModuleType("own_policies")
    module.YoungestFirst = YoungestFirst  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_policies", module)
    assert type(load_policy("fcfs")) is FcfsScheduler
    assert type(load_policy("own_policies:YoungestFirst")) is YoungestFirst


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lifo", "neither one of fcfs, priority, shortest-first nor of the form package.module:Class"),
        ("", "neither one of"),
        ("module:", "neither one of"),
        (":Class", "neither one of"),
        ("no_such_module:Policy", "module 'no_such_module' cannot be imported"),
        ("scheduler_svc.policies.fcfs:Missing", "has no 'Missing'"),
        ("scheduler_svc.block_pool:BlockPool", "is no scheduler_svc.policies.base.BaseScheduler"),
        ("scheduler_svc.block_pool:NULL_BLOCK", "is no scheduler_svc.policies.base.BaseScheduler"),
        ("own_policies:LacksHooks", "lacks admission_key, choose_victim"),
        ("own_policies:NeedsAnArgument", r"NeedsAnArgument\(\) failed"),
        ("own_policies:EndsTheProcess", r"EndsTheProcess\(\) failed: no weights"),
        ("own_policies:Undecided", "preempted_first of 'Undecided' is neither True nor False"),
    ],
)
def test_load_policy_says_what_is_wrong(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that cannot be used is one kind of error, whose message names the policy and the reason."""
    module = ModuleType("own_policies")
    module.LacksHooks = LacksHooks  # type: ignore[attr-defined]
    module.NeedsAnArgument = NeedsAnArgument  # type: ignore[attr-defined]
    module.EndsTheProcess = EndsTheProcess  # type: ignore[attr-defined]
    module.Undecided = Undecided  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_policies", module)
    with pytest.raises(PolicyError, match=message) as caught:
        load_policy(name)
    assert repr(name) in str(caught.value)


def test_a_script_that_ends_itself_is_no_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that calls sys.exit when it is imported does not end the scheduler with its own exit code."""
    (tmp_path / "script_that_ends.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PolicyError, match="module 'script_that_ends' cannot be imported: 0"):
        load_policy("script_that_ends:Policy")
