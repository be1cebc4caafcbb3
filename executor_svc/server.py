"""Wiring of the executor, and the order of its start and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable

import grpc
from prometheus_client import CollectorRegistry

from executor_svc.batch import ExecutorInfo, Limits
from executor_svc.fingerprint import fingerprint
from executor_svc.kernels.profiled import OpTimes
from executor_svc.load import Load, num_threads, plan_load
from executor_svc.metrics import ExecutorMetrics, LiveState, OpSeconds
from executor_svc.ranks_plan import RanksPlan
from executor_svc.servicer import ExecutorService
from executor_svc.ticks import DeviceTicks
from executor_svc.worker import Worker
from octavo.internal.executor.v1.executor_pb2_grpc import add_ExecutorServiceServicer_to_server
from octavo.rpc.errors import ServiceError
from octavo.rpc.metrics import MetricsServer
from octavo.rpc.progress import StallLog, StallWatch
from octavo.rpc.server import RpcServer, wait_for_signal
from octavo.rpc.stages import Stages
from octavo.settings import ExecutorSettings

logger = logging.getLogger(__name__)

SERVICE_NAME = "octavo.internal.executor.v1.ExecutorService"

STOP_GRACE = 1.0
"""Seconds for calls to end by themselves at the stop. Sessions need milliseconds; a health watch never ends."""

RETRY_DELAY = 1.0
"""Seconds after which a scheduler may look again for an executor that stops."""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_HUNG = 4
"""The device thread has not ended: it hangs, and the process has to be left without waiting for it."""


class ExecutorServer:
    """One executor. `start` loads the model, then listens; `run` serves until told to stop."""

    def __init__(
        self, settings: ExecutorSettings, stages: Stages | None = None, ranks: RanksPlan | None = None
    ) -> None:
        """`stages`: of the start; without it the first begins now. `ranks`: where this is the first of several."""
        self._settings = settings
        self._ranks = ranks
        self._stages = Stages() if stages is None else stages
        registry = CollectorRegistry()
        self._metrics_server = MetricsServer(registry, settings.bind, settings.metrics_port)
        metrics = ExecutorMetrics(registry)
        self._live_state = LiveState(self._has_session)
        registry.register(self._live_state)
        self._op_times = OpTimes() if settings.profile_ops else None
        if self._op_times is not None:
            registry.register(OpSeconds(self._op_times.seconds))
        self._ticks = DeviceTicks()
        self._worker = Worker(
            on_answer=metrics.step_answered, check_invariants=settings.check_invariants, ticks=self._ticks
        )
        self._stall_watch = StallWatch(lambda: self._worker.is_busy, lambda: self._ticks.count, settings.stall_timeout)
        self._stall_log = StallLog(
            logger, stalled="the device makes no progress", again="the device goes on", state=self._state
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._rpc = RpcServer(settings.bind, settings.port)
        self._servicer: ExecutorService | None = None
        self._load: Load
        self._watch: asyncio.Task[int]

    @property
    def port(self) -> int:
        """The port in use, once started."""
        return self._rpc.port

    @property
    def metrics_port(self) -> int:
        """The port of the metrics page, once started."""
        return self._metrics_server.port

    async def start(self) -> None:
        """Load, warm up, listen, and only then say SERVING. The metrics page is there from the beginning.

        Raises SettingsError (a setting that does not fit), ModelError, ModelLoadError and PortTakenError; then
        nothing is left running.
        """
        settings = self._settings
        load = plan_load(settings, self._stages, self._op_times, self._ranks)
        async with contextlib.AsyncExitStack() as undo:
            self._metrics_server.start()
            undo.push_async_callback(self._metrics_server.stop)
            undo.callback(load.stop)
            runner = await self._worker.start(load)
            undo.push_async_callback(self._worker.stop)
            self._load = load
            self._live_state.holdings = load.holdings
            if self._op_times is not None:
                self._op_times.clear()
            info = _info(settings, load, runner.limits)
            servicer = self._servicer = ExecutorService(info, self._worker)
            add_ExecutorServiceServicer_to_server(servicer, self._rpc.server)
            await self._rpc.start(SERVICE_NAME)
            undo.pop_all()
        self._watch = asyncio.create_task(self._watch_worker(servicer))
        await self._set_health(True)
        self._tasks = [asyncio.create_task(self._stall_watch.run(self._stall_changed))]
        self._stages.done("listening")
        figures = _figures(settings, info, load)
        figures |= {"port": self.port, "metrics_port": self.metrics_port}
        figures |= {"start_seconds": round(self._stages.seconds, 3)}
        logger.info("executor serving", extra={"fields": figures})

    async def run(self, stop: Awaitable[object]) -> int:
        """Serve until `stop` is done or the device thread has died, then stop. Returns the exit code."""
        assert self._servicer is not None  # start
        stopped = asyncio.ensure_future(stop)
        drained = asyncio.ensure_future(self._servicer.drained.wait())
        code, has_ended = EXIT_OK, False
        try:
            await asyncio.wait((stopped, drained, self._watch), return_when=asyncio.FIRST_COMPLETED)
            if self._watch.done():
                code = self._watch.result()
        finally:
            stopped.cancel()
            drained.cancel()
            has_ended = await self.stop()
        return code if has_ended else EXIT_HUNG

    async def stop(self) -> bool:
        """Stop: NOT_SERVING first, then streams end with UNAVAILABLE, the device thread goes last, and then the page
        that shows all of it. Returns whether the thread has ended: a device that hangs is not waited for.
        """
        assert self._servicer is not None  # start
        await self._rpc.health.drain()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._servicer.end_streams(_unavailable("STOPPING", "the executor is stopping"))
        await self._rpc.stop(STOP_GRACE)
        has_ended = await self._stop_worker()
        if has_ended:
            code = await self._watch
            self._load.stop(None if code == EXIT_OK else "the device of rank 0 has failed")
        else:
            # Nor is what goes on beside it: other ranks wait for this device, and end with the process.
            self._watch.cancel()
        await self._metrics_server.stop()
        return has_ended

    async def _stop_worker(self) -> bool:
        """End the device thread, for as long as the device moves; return whether it has ended."""
        watch = StallWatch(lambda: True, lambda: self._ticks.count, self._settings.stall_timeout)
        stopping = asyncio.create_task(self._worker.stop())
        while not stopping.done():
            watch.look(asyncio.get_running_loop().time())
            if watch.is_stalled:
                stopping.cancel()
                fields = {"seconds": round(watch.stuck_for, 1), **self._state()}
                logger.error("the device thread hangs and is not waited for", extra={"fields": fields})
                return False
            await asyncio.wait({stopping}, timeout=watch.interval)
        await stopping
        return True

    async def _set_health(self, is_serving: bool) -> None:
        for name in ("", SERVICE_NAME):
            await self._rpc.health.set(name, is_serving)

    def _stall_changed(self, is_stalled: bool) -> None:
        """Say that the device hangs, and where, or that it goes on."""
        self._stall_log.tell(is_stalled, self._stall_watch.stuck_for)
        self._tasks.append(asyncio.ensure_future(self._set_health(not is_stalled)))

    def _state(self) -> dict[str, object]:
        """Return what tells where the device hangs."""
        return {"ticks": self._ticks.count, "stack": self._worker.where()}

    def _has_session(self) -> bool:
        return self._servicer is not None and self._servicer.has_session

    async def _watch_worker(self, servicer: ExecutorService) -> int:
        """Wait for the end of the device thread; if it died, say so. Returns the exit code that follows."""
        error = await self._worker.wait_ended()
        if error is None:
            return EXIT_OK
        await self._rpc.health.drain()
        servicer.end_streams(_unavailable("DEVICE_FAILED", "the executor's device thread has died"))
        return EXIT_FAILED


async def serve(settings: ExecutorSettings, stages: Stages, ranks: RanksPlan | None = None) -> int:
    """Run an executor until SIGTERM or SIGINT. Returns the exit code."""
    server = ExecutorServer(settings, stages, ranks)
    signalled = asyncio.ensure_future(wait_for_signal())
    start = asyncio.ensure_future(server.start())
    await asyncio.wait((signalled, start), return_when=asyncio.FIRST_COMPLETED)
    if not start.done():
        logger.info("told to stop while loading; stopping when that is done")
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        return EXIT_OK
    try:
        start.result()
    except BaseException:
        signalled.cancel()
        await asyncio.gather(signalled, return_exceptions=True)
        raise
    code = await server.run(signalled)
    logger.info("executor stopped", extra={"fields": {"exit_code": code}})
    return code


def _info(settings: ExecutorSettings, load: Load, limits: Limits) -> ExecutorInfo:
    prepared = load.prepared
    return ExecutorInfo(
        incarnation=secrets.token_hex(16),
        cell=settings.cell,
        model_name=prepared.name,
        model_revision=prepared.revision,
        tokenizer_hash=prepared.tokenizer_hash,
        fingerprint=fingerprint(
            model_revision=prepared.revision,
            dtype=load.dtype,
            kernels=load.kernels.build,
            passes=[each.name for each in load.passes],
            tensor_parallel_size=settings.tensor_parallel,
        ),
        limits=limits,
    )


def _figures(settings: ExecutorSettings, info: ExecutorInfo, load: Load) -> dict[str, object]:
    return {
        "bind": settings.bind,
        "cell": info.cell,
        "incarnation": info.incarnation,
        "model": info.model_name,
        "model_revision": info.model_revision,
        "architecture": load.architecture,
        "modelling_code": load.code,
        "fingerprint": info.fingerprint,
        "device": settings.device,
        "dtype": str(load.dtype).removeprefix("torch."),
        "kernels": load.kernels.name,
        "kernels_build": load.kernels.build,
        "kernels_by_reference": ", ".join(load.kernels.by_reference),
        "passes": ", ".join(each.name for each in load.passes),
        "tensor_parallel": settings.tensor_parallel,
        "threads": num_threads(settings),
        "block_size": info.limits.block_size,
        "num_blocks": info.limits.num_blocks,
        "kv_tokens": (info.limits.num_blocks - 1) * info.limits.block_size,
        "max_num_seqs": info.limits.max_num_seqs,
        "max_num_batched_tokens": info.limits.max_num_batched_tokens,
        "max_model_len": info.limits.max_model_len,
        "vocab_size": info.limits.vocab_size,
    }


def _unavailable(reason: str, message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.UNAVAILABLE, reason, message, retry_delay=RETRY_DELAY)
