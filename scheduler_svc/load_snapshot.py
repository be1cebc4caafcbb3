"""The state of a cell in numbers."""

from __future__ import annotations

from scheduler_svc.batch_builder import BatchBuilder
from scheduler_svc.live_requests import LiveRequests
from scheduler_svc.load import LoadSnapshot
from scheduler_svc.placement import Placement
from scheduler_svc.policies.guard import PolicyGuard
from scheduler_svc.request_record import Outcome
from scheduler_svc.step_results import StepResults


def load_snapshot(
    requests: LiveRequests,
    placement: Placement,
    builder: BatchBuilder,
    results: StepResults,
    policy: PolicyGuard,
    now: float,
) -> LoadSnapshot:
    """Return how busy the cell is, as those who count it tell."""
    executors = tuple(executor.load_at(now) for executor in placement.executors.values())
    total = sum(executor.total_blocks for executor in executors)
    owned = sum(executor.owned_blocks for executor in executors)
    return LoadSnapshot(
        num_requests=len(requests),
        num_accepted=requests.num_accepted,
        num_finished=requests.num_ended[Outcome.FINISHED],
        num_failed=requests.num_ended[Outcome.FAILED],
        num_cancelled=requests.num_ended[Outcome.CANCELLED],
        num_waiting=sum(executor.num_waiting for executor in executors) + len(placement.orphans),
        num_running=sum(executor.num_running for executor in executors),
        num_preemptions=builder.num_preemptions,
        num_desyncs=results.num_desyncs,
        num_generated_tokens=results.num_generated_tokens,
        num_policy_failures=dict(policy.num_failures),
        num_over_time={
            (limit.value, predicted): number for (limit, predicted), number in requests.time_limits.num_ended.items()
        },
        num_prefix_query_tokens=builder.num_prefix_query_tokens,
        num_prefix_hit_tokens=builder.num_prefix_hit_tokens,
        kv_usage=owned / total if total else 0.0,
        executors=executors,
    )
