"""A scripted scheduler on the real interface, and a gateway attached to it, both on free ports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from cell_of_tests import CELL
from gateway_page import check_requests_balance
from grpc_health.v1 import health_pb2, health_pb2_grpc
from metrics_page import Page, scrape
from scripted_requests import Running, Script, write_again

from gateway.scheduler_client import Backoff
from gateway.server import GatewayServer
from octavo.internal.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from octavo.models.prepared import PreparedModel
from octavo.rpc.channel import open_channel
from octavo.rpc.errors import FieldViolation, ServiceError, invalid_argument
from octavo.rpc.server import RpcServer
from octavo.settings import GatewaySettings
from octavo.v1 import admin_pb2_grpc, inference_pb2, inference_pb2_grpc, model_pb2_grpc

TIMEOUT = 10.0
MAX_MODEL_LEN = 1024
QUICK = Backoff(initial=0.01, maximum=0.05)


@dataclass
class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Sends what `script` says, a token per choice and step. `auto`: steps by itself, else when `step` is called.

    Of each prompt, so much is cached when it is accepted, and when it runs.
    An operator is told of `listed`, `load` and `kv_state`, and can cancel what runs; without `answers_admin` it waits
    for ever.
    """

    script: Script = write_again
    auto: bool = True
    term: int = 1
    pools: list[scheduler_pb2.ModelPool] = field(default_factory=list)
    accepts: bool = True
    begins_with_welcome: bool = True
    prompt_tokens_a_step: int = 100
    cached_when_accepted: int = 0
    cached_when_run: int = 0
    port: int = 0
    answers_admin: bool = True
    listed: list[scheduler_pb2.LiveRequest] = field(default_factory=list)
    load: scheduler_pb2.GetLoadResponse = field(default_factory=scheduler_pb2.GetLoadResponse)
    kv_state: scheduler_pb2.GetKvStateResponse = field(default_factory=scheduler_pb2.GetKvStateResponse)
    asked: list[Any] = field(default_factory=list)
    running: dict[int, Running] = field(default_factory=dict)
    received: list[scheduler_pb2.AttachRequest] = field(default_factory=list)
    acknowledged: int = 0
    sequence: int = 0

    def __post_init__(self) -> None:
        self._changed = asyncio.Event()
        self._outgoing: asyncio.Queue[scheduler_pb2.AttachResponse | None] | None = None
        self._server: RpcServer | None = None

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    @property
    def is_attached(self) -> bool:
        """A gateway's stream is open."""
        return self._outgoing is not None

    async def start(self) -> None:
        """Listen, on the port of the time before if there was one."""
        self._server = RpcServer("127.0.0.1", self.port)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, self._server.server)
        await self._server.start("octavo.internal.scheduler.v1.SchedulerService")
        self.port = self._server.port

    async def stop(self) -> None:
        """Die without a word to the gateway."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def forget(self) -> None:
        """Lose all state, as a new process would; its term is higher."""
        self.running.clear()
        self.sequence = 0
        self.term += 1

    def end_stream(self) -> None:
        """Close the gateway's stream; state stays."""
        assert self._outgoing is not None
        self._outgoing.put_nowait(None)

    def of_kind(self, kind: str) -> list[Any]:
        """Return the frames of one kind that came, oldest first."""
        return [getattr(frame, kind) for frame in self.received if frame.WhichOneof("frame") == kind]

    async def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Return once something that came, or a stream that began or ended, has made it so."""
        async with asyncio.timeout(TIMEOUT):
            while not is_so():
                self._changed.clear()
                await self._changed.wait()

    async def wait_received(self, kind: str, count: int = 1) -> list[Any]:
        """Wait for so many frames of a kind and return them."""
        await self.wait_until(lambda: len(self.of_kind(kind)) >= count)
        return self.of_kind(kind)

    def send(self, **frame: Any) -> None:
        """Send a frame of the test's own."""
        assert self._outgoing is not None, "no gateway is attached"
        self._outgoing.put_nowait(scheduler_pb2.AttachResponse(**frame))

    def send_pools(self, pools: list[scheduler_pb2.ModelPool]) -> None:
        """Change what can run."""
        self.pools = pools
        self.send(model_pools=scheduler_pb2.ModelPools(pools=pools))

    def send_outputs(self, *outputs: scheduler_pb2.ChoiceOutput) -> None:
        """Send one step's outputs."""
        self.sequence += 1
        self.send(step_outputs=scheduler_pb2.StepOutputs(sequence=self.sequence, outputs=outputs))

    def step(self, count: int = 1) -> None:
        """Send the next token of every unended choice, `count` times, and Finished where all have ended."""
        for _ in range(count):
            outputs = [
                output
                for request in list(self.running.values())
                for output in request.next_outputs(self.prompt_tokens_a_step)
            ]
            if outputs:
                self.send_outputs(*outputs)
            self._finish()

    def _finish(self) -> None:
        for counter, request in list(self.running.items()):
            if all(request.ended):
                del self.running[counter]
                self.sequence += 1
                self.send(finished=scheduler_pb2.Finished(sequence=self.sequence, request=counter))

    async def ListRequests(self, request: Any, context: Any) -> scheduler_pb2.ListRequestsResponse:  # noqa: N802
        """List `listed`; a page's token is the index that it begins with."""
        await self._be_asked(request, context)
        if not request.page_token.isdigit() and request.page_token:
            raise invalid_argument([FieldViolation("page_token", "is none that ListRequests gave")])
        start = int(request.page_token or 0)
        stop = start + request.page_size
        token = str(stop) if stop < len(self.listed) else ""
        return scheduler_pb2.ListRequestsResponse(requests=self.listed[start:stop], next_page_token=token)

    async def CancelRequest(self, request: Any, context: Any) -> scheduler_pb2.CancelRequestResponse:  # noqa: N802
        """End a request that runs."""
        await self._be_asked(request, context)
        if self.running.pop(request.request, None) is None:
            raise ServiceError(grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND", "it is not live")
        error = scheduler_pb2.RequestError(
            code=grpc.StatusCode.CANCELLED.value[0], reason="CANCELLED_BY_OPERATOR", message="an operator cancelled it"
        )
        self.sequence += 1
        self.send(finished=scheduler_pb2.Finished(sequence=self.sequence, request=request.request, error=error))
        return scheduler_pb2.CancelRequestResponse()

    async def GetLoad(self, request: Any, context: Any) -> scheduler_pb2.GetLoadResponse:  # noqa: N802
        """Tell `load`."""
        await self._be_asked(request, context)
        return self.load

    async def GetKvState(self, request: Any, context: Any) -> scheduler_pb2.GetKvStateResponse:  # noqa: N802
        """Tell `kv_state`."""
        await self._be_asked(request, context)
        return self.kv_state

    async def FlushPrefixCache(  # noqa: N802
        self, request: Any, context: Any
    ) -> scheduler_pb2.FlushPrefixCacheResponse:
        """Free seven blocks, where the executor is not named "unknown"."""
        await self._be_asked(request, context)
        if request.executor == "unknown":
            raise ServiceError(grpc.StatusCode.NOT_FOUND, "EXECUTOR_NOT_FOUND", "it is not in session")
        return scheduler_pb2.FlushPrefixCacheResponse(num_freed_blocks=7)

    async def _be_asked(self, request: Any, context: Any) -> None:
        self.asked.append((request, context.time_remaining()))
        self._changed.set()
        if not self.answers_admin:
            await asyncio.Event().wait()

    async def Attach(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        """Serve one gateway of these tests. Others were somebody else's, who had this port before."""
        frames = aiter(request_iterator)
        hello = await anext(frames, None)
        if hello is None or hello.hello.cell != CELL:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not a gateway of this cell")
        outgoing: asyncio.Queue[scheduler_pb2.AttachResponse | None] = asyncio.Queue()
        self._outgoing = outgoing
        reader = asyncio.create_task(self._read(hello, frames))
        stepper = asyncio.create_task(self._step_alone()) if self.auto else None
        try:
            while (frame := await outgoing.get()) is not None:
                await context.write(frame)
        finally:
            self._outgoing = None
            for task in (reader, stepper):
                if task is not None:
                    task.cancel()
            self._changed.set()

    async def _read(self, hello: scheduler_pb2.AttachRequest, frames: AsyncIterator[Any]) -> None:
        self.received.append(hello)
        self._welcome(hello.hello)
        self._changed.set()
        async for frame in frames:
            self.received.append(frame)
            match frame.WhichOneof("frame"):
                case "submit":
                    self._submit(frame.submit)
                case "cancel":
                    self._cancel(frame.cancel)
                case "ack":
                    self.acknowledged = frame.ack.sequence
            self._changed.set()
        if self._outgoing is not None:
            self._outgoing.put_nowait(None)

    def _welcome(self, hello: scheduler_pb2.Hello) -> None:
        for counter in set(self.running) - set(hello.live_requests):
            del self.running[counter]
        unknown = [counter for counter in hello.live_requests if counter not in self.running]
        if self.begins_with_welcome:
            self.send(welcome=scheduler_pb2.Welcome(term=self.term, unknown_requests=unknown))
        self.send_pools(self.pools)

    def _submit(self, submit: scheduler_pb2.Submit) -> None:
        if submit.request in self.running or not self.accepts:
            return
        self.running[submit.request] = Running.begin(submit, self.script, self.cached_when_run)
        accepted = scheduler_pb2.Accepted(request=submit.request, num_cached_tokens=self.cached_when_accepted)
        self.send(accepted=accepted)

    def _cancel(self, cancel: scheduler_pb2.Cancel) -> None:
        request = self.running.get(cancel.request)
        if request is None:
            return
        if not cancel.HasField("choice"):
            del self.running[cancel.request]
            return
        request.ended[cancel.choice] = True
        end = scheduler_pb2.ChoiceEnd(reason=scheduler_pb2.FINISH_REASON_STOP)
        self.send_outputs(
            scheduler_pb2.ChoiceOutput(
                request=cancel.request, choice=cancel.choice, first_token_index=cancel.kept_tokens, end=end
            )
        )
        self._finish()

    async def _step_alone(self) -> None:
        while True:
            self.step()
            await asyncio.sleep(0 if self.running else 0.001)


def pool_of(
    prepared: PreparedModel, num_executors: int = 1, max_model_len: int = MAX_MODEL_LEN
) -> scheduler_pb2.ModelPool:
    """Return a pool that runs a model."""
    return scheduler_pb2.ModelPool(
        model=prepared.name, model_revision=prepared.revision, num_executors=num_executors, max_model_len=max_model_len
    )


def queue_of(prepared: PreparedModel, **fields: Any) -> scheduler_pb2.FullQueue:
    """Return a queue in which four choices of twelve tokens wait; `fields` say how many may."""
    return scheduler_pb2.FullQueue(model=prepared.name, num_choices=4, num_tokens=12, **fields)


@dataclass
class Stack:
    """A gateway, its scheduler, and stubs of a client."""

    scheduler: FakeScheduler
    gateway: GatewayServer
    prepared: PreparedModel
    channel: grpc.aio.Channel
    admin_channel: grpc.aio.Channel

    def __post_init__(self) -> None:
        self.inference: Any = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.models: Any = model_pb2_grpc.ModelServiceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)
        self.admin: Any = admin_pb2_grpc.AdminServiceStub(self.admin_channel)
        self.admin_health: Any = health_pb2_grpc.HealthStub(self.admin_channel)

    async def generate(self, request: inference_pb2.GenerateRequest) -> list[inference_pb2.GenerateResponse]:
        """Return all the events of a request."""
        return [event async for event in self.inference.Generate(request, timeout=TIMEOUT)]

    async def report_queues(self, *queues: scheduler_pb2.FullQueue) -> None:
        """Have the scheduler report full queues; return once the gateway has heard it: pools are told behind it."""
        self.scheduler.send(load_report=scheduler_pb2.LoadReport(full_queues=queues))
        for pools in ([], self.scheduler.pools):
            self.scheduler.send_pools(pools)
            await self.wait_health(bool(pools))

    async def scrape(self) -> Page:
        """Return the gateway's metrics page; its requests balance."""
        page = await scrape(self.gateway.metrics_port)
        check_requests_balance(page)
        return page

    async def wait_health(self, serving: bool, service: str = "", *, admin: bool = False) -> None:
        """Return once health says so, that of the public or of the operator's port."""
        wanted = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        watch = (self.admin_health if admin else self.health).Watch(
            health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT
        )
        async for answer in watch:
            if answer.status == wanted:
                break
        watch.cancel()

    async def wait_empty(self) -> None:
        """Return once the gateway holds no request."""
        async with asyncio.timeout(TIMEOUT):
            await self.gateway.live.wait_empty()
        self.gateway.live.check_invariants()


@asynccontextmanager
async def running_stack(
    prepared: PreparedModel,
    scheduler: FakeScheduler | None = None,
    *,
    max_model_len: int = MAX_MODEL_LEN,
    **settings_fields: Any,
) -> AsyncIterator[Stack]:
    """Run a scheduler and a gateway that serves `prepared`; after it no task is left of either.

    `settings_fields`: further settings of the gateway.
    """
    before = asyncio.all_tasks()
    scheduler = scheduler or FakeScheduler()
    scheduler.pools = scheduler.pools or [pool_of(prepared, max_model_len=max_model_len)]
    await scheduler.start()
    settings = GatewaySettings(
        model=prepared.name,
        scheduler=scheduler.address,
        port=0,
        http_port=0,
        admin_port=0,
        metrics_port=0,
        check_invariants=True,
        **{"cell": CELL, "drain_grace": 0.0, **settings_fields},
    )
    gateway = GatewayServer(settings, [prepared], QUICK)
    try:
        await gateway.start()
        address, admin_address = f"127.0.0.1:{gateway.port}", f"127.0.0.1:{gateway.admin_port}"
        async with open_channel(address) as channel, open_channel(admin_address) as admin_channel:
            stack = Stack(scheduler, gateway, prepared, channel, admin_channel)
            await stack.wait_health(True)
            yield stack
            await stack.wait_empty()
    finally:
        await gateway.stop()
        await scheduler.stop()
    # A fixture ends in another task than it began in.
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:
        await asyncio.wait(left, timeout=TIMEOUT)
    assert not [task for task in left if not task.done()]


def text_of(events: list[inference_pb2.GenerateResponse], choice: int = 0) -> str:
    """Return the joined texts of a choice."""
    return "".join(event.delta.text for event in events if event.HasField("delta") and event.delta.choice == choice)


def tokens_of(events: list[inference_pb2.GenerateResponse], choice: int = 0) -> list[int]:
    """Return the tokens of a choice; the indices of its deltas must leave no gap."""
    token_ids: list[int] = []
    for event in events:
        if event.HasField("delta") and event.delta.choice == choice:
            assert event.delta.first_token_index == len(token_ids)
            token_ids.extend(event.delta.token_ids)
    return token_ids
