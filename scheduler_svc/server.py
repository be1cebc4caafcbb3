"""Wiring of the scheduler, and the order of its start and end."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Iterable

from prometheus_client import CollectorRegistry

from octavo.internal.scheduler.v1.scheduler_pb2_grpc import add_SchedulerServiceServicer_to_server
from octavo.rpc.channel import open_channel
from octavo.rpc.metrics import MetricsServer
from octavo.rpc.progress import StallLog, StallWatch
from octavo.rpc.server import PortTakenError, RpcServer, wait_for_signal
from octavo.rpc.stages import Stages
from octavo.settings import SchedulerSettings
from scheduler_svc.burst_reserve import ReserveSettings
from scheduler_svc.drains import Drains
from scheduler_svc.engine import Engine
from scheduler_svc.engine_loop import EngineFailedError, EngineLoop
from scheduler_svc.executor_client import ExecutorClient, Link
from scheduler_svc.executor_directory import ExecutorDirectory, Resolver, TargetsError, parse_targets, resolve
from scheduler_svc.gateways import Gateways, stopping_error
from scheduler_svc.health import PoolHealth
from scheduler_svc.memory_log import MemoryLog
from scheduler_svc.metrics import LiveState, SchedulerMetrics
from scheduler_svc.output_streams import MAX_UNACKNOWLEDGED_BYTES, OutputStreams
from scheduler_svc.policies.registry import PolicyError, load_policy
from scheduler_svc.queue_bound import QueueBound
from scheduler_svc.servicer import SERVICE_NAME, SchedulerServicer
from scheduler_svc.term import StaleTermError, Term

logger = logging.getLogger(__name__)

TERM_PATIENCE = 2.0
"""Seconds that the first session waits for other executors to tell their highest term."""

STOP_GRACE = 1.0
"""Seconds for calls to end by themselves at the stop. Attach streams need milliseconds; a health watch never ends."""

_MOST_DUMPED_REQUESTS = 20

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_STALE = 3
"""A newer scheduler owns the cell."""


class StartError(Exception):
    """The scheduler cannot start with these settings; the message says what is wrong."""


class SchedulerServer:
    """One scheduler. `start` binds, `run` works until told to stop.

    What follows the settings is for tests: an engine, a name service, the wait for others' terms (seconds), the bound
    on a gateway's unacknowledged bytes.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        engine: Engine | None = None,
        resolver: Resolver = resolve,
        term_patience: float = TERM_PATIENCE,
        output_limit: int = MAX_UNACKNOWLEDGED_BYTES,
    ) -> None:
        self._rpc = RpcServer(settings.bind, settings.port)
        registry = CollectorRegistry()
        self._metrics_server = MetricsServer(registry, settings.bind, settings.metrics_port)
        metrics = SchedulerMetrics(registry)
        if engine is None:
            engine = Engine(
                load_policy(settings.policy),
                settings.depth,
                orphan_timeout=settings.orphan_timeout,
                reserve=ReserveSettings(settings.reserve),
                queue_bound=QueueBound(settings.max_waiting, settings.max_waiting_tokens),
                placement=settings.placement,
            )
        outputs = OutputStreams(output_limit)
        self._engine_loop = EngineLoop(engine, outputs, metrics, check_invariants=settings.check_invariants)
        self._gateways = Gateways(self._engine_loop, outputs, metrics, settings.gateway_grace)
        registry.register(LiveState(self._engine_loop.load, self._gateways.__len__))
        self._health = PoolHealth(self._rpc.health, ("", SERVICE_NAME))
        self._engine_loop.watch_pools(self._gateways.pools_changed)
        self._engine_loop.watch_pools(self._health.pools_changed)
        interval = settings.log_memory_usage
        self._memory_log = None if interval is None else MemoryLog(self._engine_loop.kv_state, interval)
        self._term = Term(time.time_ns(), term_patience)
        session_numbers = itertools.count(1)
        incarnations: dict[str, str] = {}
        links: dict[str, Link] = {}
        self._drains = Drains(links)
        self._stall_watch = StallWatch(
            lambda: self._engine_loop.has_placed_work, lambda: self._engine_loop.progress, settings.stall_timeout
        )
        self._stall_log = StallLog(
            logger, stalled="work waits and nothing commits", again="work goes on", state=self._state
        )

        def make_client(address: str) -> ExecutorClient:
            return ExecutorClient(
                address,
                self._engine_loop,
                self._term,
                settings.cell,
                dial=open_channel,
                session_numbers=session_numbers,
                incarnations=incarnations,
                links=links,
                hang_timeout=settings.hang_timeout,
            )

        self._directory = ExecutorDirectory(
            parse_targets(settings.executors),
            self._term,
            make_client,
            interval=settings.resolve_interval,
            resolver=resolver,
        )
        servicer = SchedulerServicer(self._engine_loop, self._gateways, self._term, settings.cell, self._drains)
        add_SchedulerServiceServicer_to_server(servicer, self._rpc.server)

    @property
    def port(self) -> int:
        """The port in use, once started."""
        return self._rpc.port

    @property
    def metrics_port(self) -> int:
        """The port of the metrics page, once started."""
        return self._metrics_server.port

    async def start(self) -> None:
        """Listen, first for scrapes. Raises PortTakenError, and then listens nowhere."""
        self._metrics_server.start()
        try:
            await self._rpc.start(SERVICE_NAME)
        except PortTakenError:
            await self._metrics_server.stop()
            raise

    async def run(self, stop: Awaitable[object]) -> int:
        """Work until `stop` is done or something fails that must end the process, then stop. Returns the exit code."""
        stopped = asyncio.ensure_future(stop)
        drained = asyncio.ensure_future(self._drains.drained.wait())
        work = [
            asyncio.ensure_future(each)
            for each in (
                self._engine_loop.run(),
                self._directory.run(),
                self._health.run(),
                self._gateways.report_load(),
                self._term.wait_until_stale(),
                self._stall_watch.run(self._stall_changed),
                *(() if self._memory_log is None else (self._memory_log.run(),)),
            )
        ]
        try:
            done, _ = await asyncio.wait((stopped, drained, *work), return_when=asyncio.FIRST_COMPLETED)
            return _exit_code(task for task in done if task not in (stopped, drained))
        finally:
            # In this order: nobody new comes, gateways learn that they must go elsewhere, then the executors are let
            # go. The metrics page shows all of it.
            await self._rpc.health.drain()
            self._gateways.close(stopping_error())
            for task in (stopped, drained, *work):
                task.cancel()
            await asyncio.gather(stopped, drained, *work, return_exceptions=True)
            await self._rpc.stop(STOP_GRACE)
            await self._metrics_server.stop()

    def _stall_changed(self, is_stalled: bool) -> None:
        """Say that work waits and nothing commits, or that it goes on."""
        self._health.stall_changed(is_stalled)
        self._gateways.is_stalled = is_stalled
        self._stall_log.tell(is_stalled, self._stall_watch.stuck_for)

    def _state(self) -> dict[str, object]:
        """Return all that may tell why nothing commits."""
        oldest = self._engine_loop.list_requests(None, _MOST_DUMPED_REQUESTS)
        return {"load": repr(self._engine_loop.load()), "oldest_requests": repr(oldest)}


async def serve(settings: SchedulerSettings, stages: Stages) -> int:
    """Run a scheduler until SIGTERM or SIGINT. Returns the exit code. Raises StartError."""
    try:
        server = SchedulerServer(settings)
        await server.start()
    except (PolicyError, PortTakenError, TargetsError) as error:
        raise StartError(str(error)) from error
    fields = {"bind": settings.bind, "port": server.port, "metrics_port": server.metrics_port}
    stages.done("listening")
    logger.info("scheduler listening", extra={"fields": fields})
    code = await server.run(wait_for_signal())
    logger.info("scheduler stopped", extra={"fields": {"exit_code": code}})
    return code


def _exit_code(failed: Iterable[asyncio.Future[object]]) -> int:
    """Return the exit code for the work that ended although it never should, and log why."""
    code = EXIT_OK
    for task in failed:
        error = task.exception()
        for each in _leaves(error) if error is not None else [task.result()]:
            if isinstance(each, StaleTermError):
                fields = {"error": str(each)}
                logger.critical("a newer scheduler owns the cell; this one ends", extra={"fields": fields})
                return EXIT_STALE
            if not isinstance(each, EngineFailedError):  # that one is logged where it happened, with the batch
                exception = each if isinstance(each, BaseException) else None
                logger.critical("the scheduler failed", exc_info=exception, extra={"fields": {"error": str(each)}})
            code = EXIT_FAILED
    return code


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [error]
