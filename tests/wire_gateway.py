"""A scripted gateway on the real contract."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from cell_of_tests import CELL
from wire_executor import MODEL, REVISION, TIMEOUT, Watched

from octavo.internal.executor.v1 import sequence_pb2
from octavo.internal.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from octavo.rpc.channel import open_channel


@dataclass
class Outcome:
    """What a gateway was told of one request."""

    accepted: int = 0
    rejected: scheduler_pb2.RequestError | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[bytes]] = field(default_factory=dict)
    ends: dict[int, scheduler_pb2.ChoiceEnd] = field(default_factory=dict)
    finished: list[scheduler_pb2.Finished] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return bool(self.finished) or self.rejected is not None


class FakeGateway(Watched):
    """A gateway that applies what it is told and faults on any gap, change or second ending.

    Acknowledges each output frame unless `acknowledges` is False. `reads` False leaves frames unread.
    """

    def __init__(self, port: int, incarnation: str | None = None) -> None:
        super().__init__()
        self.incarnation = incarnation or secrets.token_hex(16)
        self.acknowledges = True
        self.frames: list[scheduler_pb2.AttachResponse] = []
        self.outcomes: dict[int, Outcome] = {}
        self.faults: list[str] = []
        self.highest_sequence = 0
        self.redelivered = 0
        self._channel = open_channel(f"127.0.0.1:{port}")
        self.stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self._call: Any = None
        self._writing = asyncio.Lock()
        self.reader: asyncio.Future[grpc.aio.AioRpcError | None] | None = None

    async def attach(
        self, live: Iterable[int] = (), *, cell: str = CELL, highest_term: int = 0, read: bool = True
    ) -> scheduler_pb2.Welcome:
        """Open a stream, say Hello, and read on in the background after Welcome."""
        self._call = self.stub.Attach()
        hello = scheduler_pb2.Hello(
            incarnation=self.incarnation, cell=cell, highest_term=highest_term, live_requests=live
        )
        await self.send(hello=hello)
        async with asyncio.timeout(TIMEOUT):
            frame = await self._call.read()
        assert frame is not grpc.aio.EOF
        assert frame.WhichOneof("frame") == "welcome"
        if read:
            self.read_on()
        return frame.welcome

    def read_on(self) -> None:
        """Read in the background until the stream ends."""
        self.reader = asyncio.ensure_future(self._read(self._call))

    async def send(self, **frame: Any) -> None:
        # grpc allows one write at a time on a stream.
        async with self._writing:
            await self._call.write(scheduler_pb2.AttachRequest(**frame))

    async def submit(self, counter: int, prompt: Sequence[int], max_tokens: int, **options: Any) -> Outcome:
        """Submit a request; options as in `submit_message`."""
        self.outcomes.setdefault(counter, Outcome())
        await self.send(submit=submit_message(counter, prompt, max_tokens, **options))
        return self.outcomes[counter]

    async def cancel(self, counter: int, **options: Any) -> None:
        cancel = scheduler_pb2.Cancel(request=counter, **{"reason": scheduler_pb2.CANCEL_REASON_CLIENT, **options})
        await self.send(cancel=cancel)

    async def over(self, *counters: int) -> None:
        """Wait until these requests have ended."""
        for counter in counters:
            await self.until(lambda: self.outcomes[counter].is_over)  # noqa: B023 - it ends within the turn

    async def ended(self) -> grpc.aio.AioRpcError | None:
        """Wait until the newest stream has ended; returns its error."""
        assert self.reader is not None
        async with asyncio.timeout(TIMEOUT):
            return await self.reader

    async def break_stream(self) -> None:
        """Cancel the stream, as a broken connection does."""
        self._call.cancel()
        if self.reader is not None:
            await asyncio.gather(self.reader, return_exceptions=True)

    async def half_close(self) -> None:
        await self._call.done_writing()

    async def close(self) -> None:
        if self._call is not None:
            await self.break_stream()
        await self._channel.close()

    async def load(self) -> scheduler_pb2.GetLoadResponse:
        response: scheduler_pb2.GetLoadResponse = await self.stub.GetLoad(scheduler_pb2.GetLoadRequest())
        return response

    async def until_load(
        self, predicate: Callable[[scheduler_pb2.GetLoadResponse], bool]
    ) -> scheduler_pb2.GetLoadResponse:
        """Ask for the load until the predicate holds."""
        async with asyncio.timeout(TIMEOUT):
            while not predicate(load := await self.load()):
                pass
        return load

    async def _read(self, call: Any) -> grpc.aio.AioRpcError | None:
        try:
            while (frame := await call.read()) is not grpc.aio.EOF:
                self.frames.append(frame)
                self._apply(frame)
                self.changed()
                sequence = max(frame.step_outputs.sequence, frame.finished.sequence)
                if sequence and self.acknowledges:
                    async with self._writing:
                        await call.write(scheduler_pb2.AttachRequest(ack=scheduler_pb2.Ack(sequence=sequence)))
        except grpc.aio.AioRpcError as error:
            return error
        except asyncio.InvalidStateError:  # an acknowledgement after the end
            return grpc.aio.AioRpcError(await call.code(), grpc.aio.Metadata(), grpc.aio.Metadata())
        finally:
            self.changed()
        return None

    def _apply(self, frame: scheduler_pb2.AttachResponse) -> None:
        match frame.WhichOneof("frame"):
            case "accepted":
                self.outcomes[frame.accepted.request].accepted += 1
            case "rejected":
                self.outcomes[frame.rejected.request].rejected = frame.rejected.error
            case "step_outputs":
                if self._is_new(frame.step_outputs.sequence):
                    self._apply_outputs(all_outputs(frame.step_outputs))
            case "finished":
                if self._is_new(frame.finished.sequence):
                    self.outcomes[frame.finished.request].finished.append(frame.finished)

    def _is_new(self, sequence: int) -> bool:
        if sequence <= self.highest_sequence:
            self.redelivered += 1
            return False
        if sequence != self.highest_sequence + 1:
            self.faults.append(f"frame {sequence} after {self.highest_sequence}")
        self.highest_sequence = sequence
        return True

    def _apply_outputs(self, outputs: Iterable[scheduler_pb2.ChoiceOutput]) -> None:
        seen = set()
        for output in outputs:
            key = (output.request, output.choice)
            outcome = self.outcomes[output.request]
            tokens = outcome.tokens.setdefault(output.choice, [])
            if key in seen or outcome.finished or output.choice in outcome.ends:
                self.faults.append(f"{key}: twice in a frame, or after its end")
            seen.add(key)
            if output.first_token_index > len(tokens):
                self.faults.append(f"{key}: a gap, {output.first_token_index} after {len(tokens)}")
            known = tokens[output.first_token_index :]
            if any(old != new for old, new in zip(known, output.token_ids, strict=False)):
                self.faults.append(f"{key}: a token changed")
            tokens += output.token_ids[len(known) :]
            if output.HasField("logprobs"):
                outcome.logprobs.setdefault(output.choice, []).append(output.logprobs.sampled)
            if output.HasField("end"):
                outcome.ends[output.choice] = output.end


def all_outputs(step: scheduler_pb2.StepOutputs) -> list[scheduler_pb2.ChoiceOutput]:
    """Return what every choice got in a step, rows as outputs of one token."""
    columns = (step.requests, step.choices, step.token_indexes, step.token_ids)
    rows = [
        scheduler_pb2.ChoiceOutput(request=request, choice=choice, first_token_index=index, token_ids=[token_id])
        for request, choice, index, token_id in zip(*columns, strict=True)
    ]
    return [*step.outputs, *rows]


def submit_message(
    counter: int,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    n: int = 1,
    seed: int = 0,
    stop: Iterable[int] = (),
    model: str = MODEL,
    revision: str = REVISION,
    committed: Sequence[int] = (),
    prompt_logprobs: int | None = None,
    **fields: Any,
) -> scheduler_pb2.Submit:
    """A Submit of a new request, or with `committed` tokens of its first choice of a resumed one."""
    return scheduler_pb2.Submit(
        request=counter,
        model=model,
        model_revision=revision,
        prompt_token_ids=prompt,
        sampling=sequence_pb2.SamplingParams(seed=seed, top_p=1, repetition_penalty=1, prompt_logprobs=prompt_logprobs),
        stopping=sequence_pb2.StoppingParams(max_tokens=max_tokens, stop_token_ids=sorted(stop)),
        choices=[scheduler_pb2.ChoiceRecord(token_ids=() if index else committed) for index in range(n)],
        **fields,
    )
