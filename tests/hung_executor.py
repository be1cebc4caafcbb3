"""An executor whose device hangs for ever in the first step of a session. Program for tests."""

from __future__ import annotations

import threading


def run_hung() -> int:
    """Run the executor; once it has started every step hangs."""
    # Here and not above: the program sets up its process before anything else, which is not for those who import this.
    from executor_svc.__main__ import main
    from executor_svc.batch import StepBatch, StepResult
    from executor_svc.model_runner import ModelRunner
    from executor_svc.server import ExecutorServer

    start = ExecutorServer.start

    def hang(_: ModelRunner, __: StepBatch) -> StepResult:
        threading.Event().wait()
        raise AssertionError("nobody ends it")

    async def start_whole(server: ExecutorServer) -> None:
        # Steps are run at the start, too.
        await start(server)
        ModelRunner.run = hang  # type: ignore[method-assign]

    ExecutorServer.start = start_whole  # type: ignore[method-assign]
    return main()


if __name__ == "__main__":
    raise SystemExit(run_hung())
