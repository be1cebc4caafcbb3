"""SchedulerService over real channels: what a gateway may rely on."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from cell_of_tests import CELL
from wire_executor import MODEL, REVISION, FakeExecutor, expected_tokens
from wire_gateway import FakeGateway, Outcome, all_outputs, submit_message
from wire_scheduler import running_scheduler

from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.rpc.errors import from_rpc_error

PROMPT = list(range(1, 11))


def finish_reasons(gateway: FakeGateway, counter: int) -> list[str]:
    """Return the names of a request's ends, by choice."""
    ends = gateway.outcomes[counter].ends
    return [scheduler_pb2.FinishReason.Name(ends[choice].reason) for choice in sorted(ends)]


def step_frames(gateway: FakeGateway) -> list[scheduler_pb2.StepOutputs]:
    """Return the StepOutputs that a gateway got."""
    return [frame.step_outputs for frame in gateway.frames if frame.WhichOneof("frame") == "step_outputs"]


@pytest.mark.asyncio
@pytest.mark.parametrize("depth", [1, 2, 4])
async def test_outputs_are_token_exact_at_every_depth(depth: int) -> None:
    """Requests of many lengths at once each get exactly what the model writes after their prompt, at any depth."""
    executor = FakeExecutor()
    async with running_scheduler(executor, depth=depth) as scheduler:
        gateway = await scheduler.ready_gateway()
        for counter in range(1, 25):
            await gateway.submit(counter, PROMPT * (1 + counter % 7), 1 + counter % 13, seed=counter)
        await gateway.over(*range(1, 25))
        for counter in range(1, 25):
            expected = expected_tokens(PROMPT * (1 + counter % 7), 1 + counter % 13, seed=counter)
            assert gateway.outcomes[counter].tokens == {0: expected}
            assert finish_reasons(gateway, counter) == ["FINISH_REASON_LENGTH"]
            assert gateway.outcomes[counter].accepted == 1
        assert executor.most_unanswered <= depth
        load = await gateway.until_load(lambda load: load.executors[0].num_in_flight == 0)
        assert load.executors[0].owned_blocks == 0
        assert (load.num_requests, load.num_waiting, load.num_running, load.num_desyncs) == (0, 0, 0, 0)


@pytest.mark.asyncio
async def test_choices_stop_tokens_and_logprobs_pass_through() -> None:
    """Each choice of a request is its own sequence; a stop token ends it;
    logprob columns come as the executor sent them.
    """
    stop = expected_tokens(PROMPT, 5, choice=1, seed=3)[4]
    async with running_scheduler(FakeExecutor()) as scheduler:
        gateway = await scheduler.ready_gateway()
        message = submit_message(1, PROMPT, 9, n=3, seed=3, stop=[stop])
        message.sampling.top_logprobs = 0
        gateway.outcomes[1] = outcome = Outcome()
        await gateway.send(submit=message)
        await gateway.submit(2, PROMPT, 1)
        await gateway.over(1, 2)
        for choice in range(3):
            tokens = expected_tokens(PROMPT, 9, choice=choice, seed=3, stop=[stop])
            assert outcome.tokens[choice] == tokens
            assert outcome.logprobs[choice] == [b"%04d" % token for token in tokens]
        assert finish_reasons(gateway, 1)[1] == "FINISH_REASON_STOP"
        assert outcome.ends[1].stop_token_id == stop
        assert gateway.outcomes[2].logprobs == {}


@pytest.mark.asyncio
async def test_one_frame_carries_a_step_for_all_requests_of_a_gateway() -> None:
    """Sixteen requests decoding together come in one StepOutputs per step; another gateway gets a frame of its own."""
    executor = FakeExecutor(max_num_batched_tokens=512)
    async with running_scheduler(executor) as scheduler:
        gateway = await scheduler.ready_gateway()
        other = await scheduler.gateway()
        executor.hold()
        for counter in range(1, 16):
            await gateway.submit(counter, PROMPT, 10, seed=counter)
        await other.submit(1, PROMPT, 10)
        await gateway.until_load(lambda load: load.num_requests == 16)
        executor.release()
        await gateway.over(*range(1, 16))
        await other.over(1)
        frames = step_frames(gateway)
        assert len(frames) <= executor.num_steps
        # All but the first few steps, which admit, hold a token of every request.
        assert sum(len(all_outputs(frame)) == 15 for frame in frames) >= 7
        assert {output.request for frame in step_frames(other) for output in all_outputs(frame)} == {1}
        assert other.outcomes[1].tokens == {0: expected_tokens(PROMPT, 10)}


@pytest.mark.asyncio
async def test_a_finished_request_follows_its_last_outputs() -> None:
    """Sequence numbers are gapless over both kinds of frames, and nothing of a request comes after its Finished."""
    async with running_scheduler(FakeExecutor()) as scheduler:
        gateway = await scheduler.ready_gateway()
        for counter in range(1, 9):
            await gateway.submit(counter, PROMPT, counter, seed=counter)
        await gateway.over(*range(1, 9))
        frames = [frame for frame in gateway.frames if frame.WhichOneof("frame") in ("step_outputs", "finished")]
        numbers = [frame.step_outputs.sequence or frame.finished.sequence for frame in frames]
        assert numbers == list(range(1, len(frames) + 1))
        for counter in range(1, 9):
            assert [finished.HasField("error") for finished in gateway.outcomes[counter].finished] == [False]


@pytest.mark.asyncio
async def test_unacknowledged_frames_are_sent_again_without_gap_or_duplicate() -> None:
    """A gateway that breaks off and attaches again gets every unacknowledged frame again,
    the terminal ones included.
    """
    executor = FakeExecutor()
    async with running_scheduler(executor) as scheduler:
        gateway = await scheduler.ready_gateway()
        gateway.acknowledges = False
        await gateway.submit(1, PROMPT, 3)
        await gateway.submit(2, PROMPT, 200, seed=2)
        await gateway.over(1)
        for _ in range(3):
            tokens_before = len(gateway.outcomes[2].tokens[0])
            await gateway.break_stream()
            welcome = await gateway.attach(live=[1, 2])
            assert list(welcome.unknown_requests) == []
            await gateway.until(lambda: len(gateway.outcomes[2].tokens[0]) > tokens_before)  # noqa: B023
        gateway.acknowledges = True
        await gateway.over(2)
        assert gateway.redelivered > 0
        assert gateway.outcomes[1].tokens == {0: expected_tokens(PROMPT, 3)}
        assert gateway.outcomes[2].tokens == {0: expected_tokens(PROMPT, 200, seed=2)}
        assert len(gateway.outcomes[1].finished) == len(gateway.outcomes[2].finished) == 1


@pytest.mark.asyncio
async def test_acknowledged_frames_are_not_sent_again() -> None:
    """What was acknowledged is forgotten: the next stream starts after it."""
    async with running_scheduler(FakeExecutor()) as scheduler:
        gateway = await scheduler.ready_gateway()
        await gateway.submit(1, PROMPT, 5)
        await gateway.over(1)
        await gateway.half_close()
        assert await gateway.ended() is None
        await gateway.attach()
        await gateway.submit(2, PROMPT, 5)
        await gateway.over(2)
        assert gateway.redelivered == 0


@pytest.mark.asyncio
async def test_requests_that_hello_does_not_list_are_cancelled_in_silence() -> None:
    """After a reconnection the gateway's unlisted requests end and free their blocks; the listed one goes on."""
    executor = FakeExecutor()
    async with running_scheduler(executor) as scheduler:
        gateway = await scheduler.ready_gateway()
        await gateway.submit(1, PROMPT, 240)
        await gateway.submit(2, PROMPT, 200, seed=2)
        await gateway.until(lambda: bool(gateway.outcomes[1].tokens and gateway.outcomes[2].tokens))
        await gateway.break_stream()
        executor.hold()
        frames_before = len(gateway.frames)
        await gateway.attach(live=[2])
        load = await gateway.load()
        assert load.num_requests == 1
        executor.release()
        await gateway.over(2)
        assert gateway.outcomes[2].tokens == {0: expected_tokens(PROMPT, 200, seed=2)}
        later = [output for frame in step_frames(gateway) for output in frame.outputs if output.HasField("end")]
        assert [output.request for output in later] == [2]
        assert len(gateway.frames) > frames_before
        await gateway.until_load(lambda load: load.executors[0].owned_blocks == 0)


@pytest.mark.asyncio
async def test_resuming_is_submitting() -> None:
    """Hello's unknown requests are named; submitted again with their tokens they go on at the next index."""
    async with running_scheduler(FakeExecutor()) as scheduler:
        gateway = await scheduler.gateway(attach=False)
        welcome = await gateway.attach(live=[9, 5])
        assert list(welcome.unknown_requests) == [5, 9]
        await gateway.until_load(lambda load: len(load.executors) == 1)
        tokens = expected_tokens(PROMPT, 20, seed=4)
        gateway.outcomes[5] = outcome = Outcome(tokens={0: tokens[:7]})
        await gateway.submit(5, PROMPT, 20, seed=4, committed=tokens[:7])
        await gateway.over(5)
        assert outcome.tokens == {0: tokens}
        first = next(output for frame in step_frames(gateway) for output in frame.outputs if output.request == 5)
        assert first.first_token_index == 7


@pytest.mark.asyncio
async def test_submitting_again_changes_nothing() -> None:
    """A Submit of a live request, or of one whose end is on its way, is accepted and left alone."""
    async with running_scheduler(FakeExecutor()) as scheduler:
        gateway = await scheduler.ready_gateway()
        gateway.acknowledges = False
        for _ in range(3):
            outcome = await gateway.submit(1, PROMPT, 6)
        await gateway.over(1)
        await gateway.submit(1, PROMPT, 6)
        await gateway.until(lambda: outcome.accepted == 4)
        await gateway.submit(2, PROMPT, 1)
        await gateway.over(2)
        assert outcome.tokens == {0: expected_tokens(PROMPT, 6)}
        assert len(outcome.finished) == 1


@pytest.mark.asyncio
async def test_a_second_stream_replaces_the_first() -> None:
    """The first stream of an incarnation ends with ABORTED when a second attaches, and its requests go on there."""
    async with running_scheduler(FakeExecutor()) as scheduler:
        gateway = await scheduler.ready_gateway()
        # grpc turns the status of a stream that ends during a write into INTERNAL.
        gateway.acknowledges = False
        await gateway.submit(1, PROMPT, 150)
        await gateway.until(lambda: bool(gateway.outcomes[1].tokens))
        first_stream = gateway.reader
        await gateway.attach(live=[1])
        assert first_stream is not None
        status = await first_stream
        assert status is not None
        assert status.code() is grpc.StatusCode.ABORTED
        await gateway.over(1)
        assert gateway.outcomes[1].tokens == {0: expected_tokens(PROMPT, 150)}
        assert (await gateway.load()).num_gateways == 1


@pytest.mark.asyncio
async def test_refusals_carry_code_reason_and_numbers() -> None:
    """What cannot run is refused at once with the canonical code; others go on."""
    async with running_scheduler(FakeExecutor()) as scheduler:
        gateway = await scheduler.ready_gateway()
        await gateway.submit(1, PROMPT, 5, model="other")
        await gateway.submit(2, PROMPT, 5, revision="b" * 64)
        await gateway.submit(3, [1] * 5000, 5)
        await gateway.submit(4, PROMPT, 5)
        await gateway.over(1, 2, 3, 4)
        errors = [gateway.outcomes[counter].rejected for counter in (1, 2, 3)]
        assert all(error is not None and error.reason and error.message for error in errors)
        assert [error and error.code for error in errors] == [
            grpc.StatusCode.NOT_FOUND.value[0],
            grpc.StatusCode.FAILED_PRECONDITION.value[0],
            grpc.StatusCode.INVALID_ARGUMENT.value[0],
        ]
        assert REVISION in errors[1].message  # type: ignore[union-attr]
        assert gateway.outcomes[4].tokens == {0: expected_tokens(PROMPT, 5)}


@pytest.mark.asyncio
async def test_a_malformed_submit_is_refused_by_its_fields_and_the_stream_goes_on() -> None:
    """A Submit that lacks parts is rejected with every field named; it never reaches the engine."""
    async with running_scheduler(FakeExecutor()) as scheduler:
        gateway = await scheduler.ready_gateway()
        await gateway.submit(1, PROMPT, 2)
        gateway.outcomes[2] = bad = Outcome()
        await gateway.send(submit=scheduler_pb2.Submit(request=2))
        await gateway.over(1, 2)
        assert bad.rejected is not None
        assert bad.rejected.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        for name in ("model", "prompt_token_ids", "sampling", "stopping.max_tokens", "choices"):
            assert name in bad.rejected.message


@pytest.mark.asyncio
async def test_five_megabytes_of_token_ids_cross_the_hop() -> None:
    """A Submit past gRPC's default limit of 4 MiB arrives: it is refused for its length, not by the transport."""
    async with running_scheduler(FakeExecutor()) as scheduler:
        gateway = await scheduler.ready_gateway()
        await gateway.submit(1, [999_999] * 1_750_000, 1)
        await gateway.submit(2, PROMPT, 2)
        await gateway.over(1, 2)
        rejected = gateway.outcomes[1].rejected
        assert rejected is not None
        assert rejected.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert gateway.outcomes[2].tokens == {0: expected_tokens(PROMPT, 2)}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "frame",
    [
        {"ack": scheduler_pb2.Ack(sequence=99)},
        {"cancel": scheduler_pb2.Cancel(request=1)},
        {"hello": scheduler_pb2.Hello(incarnation="again")},
        {},
    ],
    ids=["ack of what was never sent", "cancel without a reason", "second hello", "nothing"],
)
async def test_a_frame_out_of_place_ends_the_stream(frame: dict[str, object]) -> None:
    """A frame that breaks the contract ends its stream with INVALID_ARGUMENT, and no other."""
    async with running_scheduler(FakeExecutor()) as scheduler:
        gateway = await scheduler.ready_gateway()
        other = await scheduler.gateway()
        await gateway.send(**frame)
        status = await gateway.ended()
        assert status is not None
        assert status.code() is grpc.StatusCode.INVALID_ARGUMENT
        await other.submit(1, PROMPT, 2)
        await other.over(1)


@pytest.mark.asyncio
async def test_a_stream_begins_with_hello() -> None:
    """Any other first frame, and a Hello without an incarnation or with a term that is the last, is invalid."""
    async with running_scheduler() as scheduler:
        gateway = await scheduler.gateway(attach=False)
        last_term = scheduler_pb2.Hello(incarnation="g", cell=CELL, highest_term=2**64 - 1)
        frames = ({"ack": scheduler_pb2.Ack(sequence=0)}, {"hello": scheduler_pb2.Hello()}, {"hello": last_term})
        for first in frames:
            call = gateway.stub.Attach()
            await call.write(scheduler_pb2.AttachRequest(**first))
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.asyncio
async def test_a_gateway_of_another_cell_is_refused() -> None:
    """The refusal is FAILED_PRECONDITION and names both cells; its terms do not count."""
    async with running_scheduler(cell="east") as scheduler:
        gateway = await scheduler.gateway(attach=False)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await gateway.attach(cell="west", highest_term=2**63)
        error = from_rpc_error(raised.value)
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_CELL")
        assert error.metadata == {"scheduler_cell": "east", "gateway_cell": "west"}
        await gateway.attach(cell="east")


@pytest.mark.asyncio
async def test_pools_and_load_are_told() -> None:
    """ModelPools follow Welcome and every change; LoadReport comes from time to time."""
    executor = FakeExecutor()
    async with running_scheduler(executor) as scheduler:
        gateway = await scheduler.ready_gateway()
        pools = [list(f.model_pools.pools) for f in gateway.frames if f.WhichOneof("frame") == "model_pools"]

        def sizes() -> list[int]:
            frames = [f.model_pools for f in gateway.frames if f.WhichOneof("frame") == "model_pools"]
            return [sum(pool.num_executors for pool in frame.pools) for frame in frames]

        await gateway.until(lambda: sizes()[-1:] == [1])
        await executor.stop()
        await gateway.until(lambda: sizes()[-1] == 0)
        await executor.start()
        await gateway.until(lambda: sizes()[-1] == 1)
        pools = [list(f.model_pools.pools) for f in gateway.frames if f.WhichOneof("frame") == "model_pools"]
        [pool] = pools[-1]
        assert (pool.model, pool.model_revision, pool.max_model_len) == (MODEL, REVISION, 256)
        await gateway.until(lambda: any(f.WhichOneof("frame") == "load_report" for f in gateway.frames))
