"""The executor, which also writes down every step that its device ran: recorded_executor.py FILE FLAGS...

It is the service as it is; when it ends, FILE holds a JSON array of steps in order, each with the time at which its
result came to the event loop (`at`, on the clock that all processes share), rows, tokens, and the times of its stages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from executor_svc.batch import StepBatch, StepResult
from executor_svc.metrics import ExecutorMetrics


def step_record(at: float, batch: StepBatch, result: StepResult) -> dict[str, Any]:
    """Return what is written of a step."""
    timings = result.timings
    return {
        "at": at,
        "rows": len(result.statuses),
        "tokens": sum(batch.num_scheduled_tokens),
        "idle": timings.idle,
        "busy": timings.prepare + timings.forward + timings.sample,
    }


def record_steps() -> list[tuple[float, StepBatch, StepResult]]:
    """Keep every step that is counted from now on; returns where they are kept."""
    kept: list[tuple[float, StepBatch, StepResult]] = []
    count = ExecutorMetrics.step_answered

    def step_answered(self: ExecutorMetrics, batch: StepBatch, result: StepResult) -> None:
        # An append and no more: what it takes is part of what is measured.
        kept.append((perf_counter(), batch, result))
        count(self, batch, result)

    ExecutorMetrics.step_answered = step_answered  # type: ignore[method-assign]
    return kept


if __name__ == "__main__":
    # What it sets has to stand before torch is loaded, and is not for those who import this.
    from executor_svc.__main__ import main

    path = Path(sys.argv.pop(1))
    steps = record_steps()
    try:
        code = main()
    finally:
        path.write_text(json.dumps([step_record(*step) for step in steps]))
    raise SystemExit(code)
