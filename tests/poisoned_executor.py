"""An executor that dies, as by a fault of its device, when it is to run a prompt with one token. Program for tests."""

from __future__ import annotations

import os
import signal

POISON = 251
"""The token, which occurs in no other prompt of the tests that use this."""


def run_poisoned() -> int:
    """Run the executor; every runner of this process dies of the token."""
    # Here and not above: the program sets up its process before anything else, which is not for those who import this.
    from executor_svc.__main__ import main
    from executor_svc.batch import StepBatch, StepResult
    from executor_svc.model_runner import ModelRunner

    run = ModelRunner.run
    poisoned: set[int] = set()

    def run_or_die(self: ModelRunner, batch: StepBatch) -> StepResult:
        for new in batch.new_sequences:
            if POISON in new.token_ids[: new.num_prompt_tokens]:
                poisoned.add(new.handle)
        if poisoned.intersection(batch.handles):
            os.kill(os.getpid(), signal.SIGKILL)
        return run(self, batch)

    ModelRunner.run = run_or_die  # type: ignore[method-assign]
    return main()


if __name__ == "__main__":
    raise SystemExit(run_poisoned())
