"""The gateway assembled, and the order in which it starts and stops."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from prometheus_client import CollectorRegistry

from gateway.admin_client import AdminClient
from gateway.admin_servicer import AdminServicer
from gateway.auth import ApiKeys, ApiKeysError, read_api_keys
from gateway.cell import Cell
from gateway.early_refusals import EarlyRefusals
from gateway.generator import Generator
from gateway.health import ADMIN_SERVICE, INFERENCE_SERVICE, GatewayHealth
from gateway.http.app import make_app
from gateway.http.generation_api import GenerationApi
from gateway.http.server import HttpServer
from gateway.http.service_api import ServiceApi
from gateway.live_requests import LiveRequests
from gateway.metrics import GatewayCollector, GatewayMetrics
from gateway.model_servicer import ModelServicer
from gateway.permits import Permits
from gateway.resume_tokens import ResumeTokens
from gateway.scheduler_client import Backoff, SchedulerClient
from gateway.served_models import ServedModel, ServedModels
from gateway.servicer import InferenceServicer
from gateway.text_tools import TextTools
from octavo.models.prepared import PreparedModel, open_prepared
from octavo.rpc.channel import open_channel
from octavo.rpc.early_gc import resume_gc
from octavo.rpc.metrics import MetricsServer
from octavo.rpc.server import RpcServer, wait_for_signal
from octavo.rpc.settings import SettingsError
from octavo.rpc.stages import Stages
from octavo.settings import GatewaySettings
from octavo.v1 import admin_pb2_grpc, inference_pb2_grpc, model_pb2_grpc

logger = logging.getLogger(__name__)

MODEL_SERVICE = "octavo.v1.ModelService"

# Seconds. A scheduler reports four times in each.
_LEAST_SILENCE = 1.0
# Long texts at work at once. Each takes a core for a while, and there are streams to serve besides.
_NUM_THREADS = 2
# Seconds: for streams to tell their clients, for calls that are left to be cut, for the scheduler to hear of it.
_STREAMS_END = 1.0
_CUT = 0.5
_SCHEDULER_HEARS = 1.0
# And for another scheduler to take over requests that may be taken up, where there is none at the moment.
_SCHEDULER_COMES = 10.0


class GatewayServer:
    """The gateway. Make it inside the event loop that runs it; `start` once, `stop` once."""

    def __init__(self, settings: GatewaySettings, models: Sequence[PreparedModel], backoff: Backoff) -> None:
        """Load tokenizers, templates and keys. Raises ModelError, and SettingsError for a file that a flag names."""
        clock = asyncio.get_running_loop().time
        self._executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")
        keys = _keys(settings)
        models = [_with_template(prepared, settings) for prepared in models]
        served = [ServedModel.open(prepared, self._executor) for prepared in models]
        self._models = ServedModels(served, _aliases(settings, models))
        metrics = GatewayMetrics(model.name for model in self._models)
        self.live = LiveRequests(secrets.token_hex(16), clock, metrics, stream_interval=settings.stream_interval)
        # Nothing below the servers refers to them, so that one that never started is gone before the interpreter is.
        self._cell = cell = Cell()
        self._channel = open_channel(settings.scheduler)
        self.drained = asyncio.Event()
        """Set once an operator has asked this gateway to stop."""
        self._drain_grace = settings.drain_grace
        self._scheduler = SchedulerClient(
            lambda: open_channel(settings.scheduler),
            self.live,
            self._cell,
            cell_name=settings.cell,
            clock=clock,
            backoff=backoff,
            check_invariants=settings.check_invariants,
            silence=max(_LEAST_SILENCE, settings.stall_timeout / 2),
            on_drain=self.drained.set,
        )
        tokens = ResumeTokens(settings.resume_key, settings.cell)
        self.permits = permits = Permits(settings.max_requests, metrics)
        generator = Generator(self._models, self.live, self._cell, self._scheduler, metrics, clock, tokens)
        self._detached = generator.detached
        self._rpc = RpcServer(settings.bind, settings.port)
        tools = TextTools(self._models, self.live, self._cell)
        early_refusals = EarlyRefusals(self._models, cell, metrics)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(
            InferenceServicer(generator, tools, keys, permits, early_refusals, clock), self._rpc.server
        )
        model_pb2_grpc.add_ModelServiceServicer_to_server(
            ModelServicer(self._models, self._cell, keys), self._rpc.server
        )
        self._admin = RpcServer(settings.bind, settings.admin_port, "--admin-port")
        admin_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminServicer(AdminClient(self._channel, self._cell), self.live.incarnation, self.drained.set),
            self._admin.server,
        )
        registry = CollectorRegistry()
        registry.register(GatewayCollector(metrics, self.live.count_by_model, permits, lambda: cell.is_attached))
        self._metrics = MetricsServer(registry, settings.bind, settings.metrics_port)
        routers = [
            GenerationApi(generator, self._models, permits, early_refusals, clock).router(),
            ServiceApi(self._models, self._cell, tools, registry, self._rpc.health.is_serving).router(),
        ]
        app = make_app(routers, keys, early_refusals, settings.cors_origins or ())
        self._http = HttpServer(app, settings.bind, settings.http_port)
        self._health = GatewayHealth(
            self._rpc.health,
            self._admin.health,
            self._models,
            cell,
            self.live,
            lambda: len(generator.detached),
            stall_timeout=settings.stall_timeout,
            clock=clock,
        )
        self._tasks: list[asyncio.Task[NoReturn]] = []

    @property
    def port(self) -> int:
        """The port of the public API, bound by `start`."""
        return self._rpc.port

    @property
    def http_port(self) -> int:
        """The port of the OpenAI-compatible API, bound by `start`."""
        return self._http.port

    @property
    def admin_port(self) -> int:
        """The port of the operator's API, bound by `start`."""
        return self._admin.port

    @property
    def metrics_port(self) -> int:
        """The port of the metrics page, bound by `start`."""
        return self._metrics.port

    async def start(self) -> None:
        """Listen, and connect to the scheduler. Health says SERVING once a model can run.

        Raises PortTakenError; nothing listens then.
        """
        async with contextlib.AsyncExitStack() as started:
            await self._rpc.start(INFERENCE_SERVICE, MODEL_SERVICE)
            started.push_async_callback(self._rpc.stop, 0)
            await self._admin.start(ADMIN_SERVICE)
            started.push_async_callback(self._admin.stop, 0)
            await self._http.start()
            started.push_async_callback(self._http.stop, 0)
            self._metrics.start()
            started.pop_all()
        await self._rpc.health.set(MODEL_SERVICE, True)
        self._scheduler.start()
        self._tasks = [asyncio.create_task(self._health.publish()), asyncio.create_task(self._health.watch())]

    async def stop(self) -> None:
        """Say NOT_SERVING, refuse new requests, let the old ones end within the grace, end what is left with a status,
        tell the scheduler, leave nothing behind.
        """
        await self._rpc.health.drain()
        await self._admin.health.drain()
        self.live.refuse_new()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.live.wait_served(self._detached.requests), self._drain_grace)
        if self.live.num_resumable():
            # Where its scheduler went away too, these records are nowhere else: the next one is to have them.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._cell.wait_attached(), _SCHEDULER_COMES)
        self.live.close()
        # Calls that come meanwhile are still answered: UNAVAILABLE, with when to try again.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.live.wait_empty(), _STREAMS_END)
        await asyncio.gather(self._rpc.stop(_CUT), self._http.stop(_CUT))
        await self._admin.stop(_CUT)
        # Behind them, so that it hears of the streams that had to be cut.
        await self._scheduler.stop(_SCHEDULER_HEARS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        # The last page tells how everything ended.
        await self._metrics.stop()


async def serve(settings: GatewaySettings, stages: Stages) -> int:
    """Run the gateway until SIGTERM or SIGINT. Raises ModelError, SettingsError and PortTakenError."""
    stopped = asyncio.create_task(wait_for_signal())
    server = GatewayServer(settings, [open_prepared(settings.model)], Backoff())
    stages.done("tokenizer")
    resume_gc()
    await server.start()
    stages.done("listening")
    ports = {name: getattr(server, name) for name in ("port", "http_port", "admin_port", "metrics_port")}
    logger.info("listening", extra={"fields": {"bind": settings.bind, **ports}})
    drained = asyncio.create_task(server.drained.wait())
    await asyncio.wait((stopped, drained), return_when=asyncio.FIRST_COMPLETED)
    # From here on a signal takes its usual effect, whoever has asked for the stop.
    for task in (stopped, drained):
        task.cancel()
    await asyncio.gather(stopped, drained, return_exceptions=True)
    logger.info("stopping", extra={"fields": {"live_requests": len(server.live)}})
    await server.stop()
    return 0


def _aliases(settings: GatewaySettings, models: Sequence[PreparedModel]) -> dict[str, str]:
    """Return the further names of the one model served."""
    return dict.fromkeys(settings.served_model_name or (), models[0].name)


def _keys(settings: GatewaySettings) -> ApiKeys:
    if settings.api_keys is None:
        return ApiKeys(None)
    try:
        return read_api_keys(Path(settings.api_keys))
    except ApiKeysError as error:
        raise SettingsError(f"--api-keys: {error}") from error


def _with_template(prepared: PreparedModel, settings: GatewaySettings) -> PreparedModel:
    """Return the model with the chat template that the settings name in place of its own."""
    if settings.chat_template is None:
        return prepared
    try:
        template = Path(settings.chat_template).read_text(encoding="utf-8")
    except OSError as error:
        message = f"{settings.chat_template} cannot be read: {error.strerror or error}"
        raise SettingsError(f"--chat-template: {message}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"--chat-template: {settings.chat_template} is not UTF-8 text") from error
    return dataclasses.replace(prepared, chat_template=template)
