"""The engine's machine under the policies that come with it, with priorities and every time limit."""

from __future__ import annotations

import dataclasses

import pytest
from cells import Cell
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from strategies import RequestPlan, executor_specs
from test_engine_machine import EngineMachine

from octavo.rpc.errors import ServiceError
from scheduler_svc.batch import ExecutorSpec
from scheduler_svc.burst_reserve import ReserveSettings
from scheduler_svc.engine import Engine
from scheduler_svc.policies.priority import PriorityScheduler
from scheduler_svc.policies.shortest_first import ShortestFirstScheduler
from scheduler_svc.request_record import RequestRecord

# Under the thorough profile this looks for minutes.
pytestmark = pytest.mark.timeout(1800)


class PolicyMachine(EngineMachine):
    """As the engine's own machine; each request has a priority, and some have more limits than a deadline."""

    @initialize(
        depth=st.integers(1, 3),
        is_by_priority=st.booleans(),
        specs=st.lists(executor_specs, min_size=1, max_size=2),
        share=st.sampled_from((0.0, 0.3)),
    )
    def make(  # type: ignore[override]
        self, depth: int, is_by_priority: bool, specs: list[ExecutorSpec], share: float
    ) -> None:
        super().make(depth, None, [], share)
        policy = PriorityScheduler() if is_by_priority else ShortestFirstScheduler()
        reserve = ReserveSettings(share, longest_prompt=5, idle_seconds=1.0)
        self.cell = Cell(Engine(policy, depth, orphan_timeout=1000.0, reserve=reserve))
        for spec in specs:
            self.join(spec)

    def _make_record(self, plan: RequestPlan, counter: int) -> tuple[RequestRecord, int]:
        record, limit = super()._make_record(plan, counter)
        record = dataclasses.replace(
            record,
            priority=counter * 7 % 5 - 2,
            remaining_queue_ttl=1.0 if counter % 6 == 1 else None,
            remaining_first_token=1.5 if counter % 6 == 2 else None,
        )
        return record, limit

    def _check_failure(self, record: RequestRecord, error: ServiceError) -> None:
        if error.reason == "QUEUE_TTL":
            assert record.remaining_queue_ttl is not None
            assert not any(self.cell.gateway.tokens[record.id, choice] for choice in range(len(record.choices)))
        elif error.reason == "FIRST_TOKEN_TARGET":
            assert record.remaining_first_token is not None
            assert not any(self.cell.gateway.tokens[record.id, choice] for choice in range(len(record.choices)))
        else:
            super()._check_failure(record, error)


TestPolicies = PolicyMachine.TestCase
TestPolicies.settings = settings(stateful_step_count=50)
TestPolicies.__doc__ = "Output equals the undisturbed run, every ledger ends empty, every request ends once."
