"""What an operator asks of the scheduler, over real channels: the list of live requests, and an end to one of them."""

from __future__ import annotations

import asyncio
import base64
import random
import zlib

import grpc
import grpc.aio
import pytest
from wire_executor import MODEL, FakeExecutor, expected_tokens
from wire_gateway import FakeGateway, Outcome
from wire_scheduler import running_scheduler

from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.rpc.errors import ServiceError, from_rpc_error

PROMPT = list(range(1, 11))
BY_OPERATOR = (grpc.StatusCode.CANCELLED.value[0], "CANCELLED_BY_OPERATOR")


async def cancel(asking: FakeGateway, incarnation: str, counter: int) -> ServiceError | None:
    """Ask for the end of a request. Returns the refusal, if it is one."""
    try:
        await asking.stub.CancelRequest(scheduler_pb2.CancelRequestRequest(gateway=incarnation, request=counter))
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    return None


async def list_page(asking: FakeGateway, size: int = 100, token: str = "") -> scheduler_pb2.ListRequestsResponse:
    """Ask for one page."""
    request = scheduler_pb2.ListRequestsRequest(page_size=size, page_token=token)
    response: scheduler_pb2.ListRequestsResponse = await asking.stub.ListRequests(request)
    return response


async def refusal(asking: FakeGateway, size: int = 100, token: str = "") -> ServiceError:
    """Ask for a page that is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await list_page(asking, size, token)
    return from_rpc_error(raised.value)


def ending(outcome: Outcome) -> tuple[int, str]:
    """Return code and reason of a request's one Finished."""
    [finished] = outcome.finished
    return finished.error.code, finished.error.reason


@pytest.mark.asyncio
async def test_a_lost_gateways_request_is_ended_and_the_gateway_told_when_it_is_back() -> None:
    """During the grace the request ends at once, and its Finished is kept and sent until it is acknowledged."""
    executor = FakeExecutor()
    async with running_scheduler(executor, gateway_grace=60) as scheduler:
        gateway = await scheduler.ready_gateway()
        other = await scheduler.gateway()
        await gateway.submit(1, PROMPT, 200)
        await gateway.until(lambda: bool(gateway.outcomes[1].tokens))
        gateway.acknowledges = False
        await gateway.break_stream()
        executor.hold()
        await other.until_load(lambda load: load.num_gateways == 1)
        assert await cancel(other, gateway.incarnation, 1) is None
        load = await other.load()
        assert load.num_requests == 0
        assert load.executors[0].owned_blocks == 0
        executor.release()
        welcome = await gateway.attach(live=[1])
        assert list(welcome.unknown_requests) == []
        await gateway.over(1)
        await gateway.break_stream()
        last = gateway.highest_sequence
        welcome = await gateway.attach(live=[1])
        assert list(welcome.unknown_requests) == []
        await gateway.until(lambda: [frame.finished.sequence for frame in gateway.frames].count(last) == 2)
        assert ending(gateway.outcomes[1]) == BY_OPERATOR
        tokens = gateway.outcomes[1].tokens[0]
        assert tokens == expected_tokens(PROMPT, len(tokens))


@pytest.mark.asyncio
async def test_what_an_operator_ended_does_not_come_back_with_its_gateway() -> None:
    """A gateway whose frames were forgotten submits what it holds; an operator's cancel holds all the same."""
    grace = 0.05
    async with running_scheduler(FakeExecutor(), gateway_grace=grace) as scheduler:
        gateway = await scheduler.ready_gateway()
        other = await scheduler.gateway()
        await gateway.submit(1, PROMPT, 240)
        await gateway.submit(2, PROMPT, 60, seed=2)
        await gateway.until(lambda: bool(gateway.outcomes[1].tokens and gateway.outcomes[2].tokens))
        await gateway.break_stream()
        await cancel(other, gateway.incarnation, 1)
        await other.until_load(lambda load: load.num_requests == 0)
        outcomes = {counter: Outcome(tokens=dict(gateway.outcomes[counter].tokens)) for counter in (1, 2)}
        while True:
            welcome = await gateway.attach(live=[1, 2])
            if list(welcome.unknown_requests) == [1, 2]:
                break
            # The grace was not over, and begins anew with each attachment: each waits longer than the one before.
            await gateway.break_stream()
            grace *= 2
            await asyncio.sleep(grace)
        gateway.outcomes |= outcomes
        # What the forgotten stream had on its way is a gap in its numbers.
        gateway.faults.clear()
        for counter in (1, 2):
            committed = outcomes[counter].tokens[0]
            seed = 0 if counter == 1 else 2
            await gateway.submit(counter, PROMPT, 240 if counter == 1 else 60, seed=seed, committed=committed)
        await gateway.over(1, 2)
        gateway.faults.clear()
        rejected = outcomes[1].rejected
        assert rejected is not None
        assert (rejected.code, rejected.reason) == BY_OPERATOR
        assert outcomes[2].tokens == {0: expected_tokens(PROMPT, 60, seed=2)}


@pytest.mark.asyncio
async def test_work_that_waits_for_an_executor_can_be_ended() -> None:
    """A request whose executor is gone is in no queue; an operator ends it like any other."""
    executor = FakeExecutor()
    async with running_scheduler(executor) as scheduler:
        gateway = await scheduler.ready_gateway()
        await gateway.submit(1, PROMPT, 240)
        await gateway.until(lambda: bool(gateway.outcomes[1].tokens))
        await executor.stop()
        await gateway.until_load(lambda load: not load.executors)
        [request] = (await list_page(gateway)).requests
        assert (request.num_waiting, request.num_running, list(request.executors)) == (1, 0, [])
        assert await cancel(gateway, gateway.incarnation, 1) is None
        await gateway.over(1)
        assert ending(gateway.outcomes[1]) == BY_OPERATOR


@pytest.mark.asyncio
async def test_cancels_of_both_sides_and_the_end_cross_and_leave_one_ending() -> None:
    """Of 200 requests ended by a gateway's Cancel, an operator's and themselves, in any order, each ends once."""
    count = 200
    draw = random.Random(7)
    async with running_scheduler(FakeExecutor(), check_invariants=False) as scheduler:
        gateway = await scheduler.ready_gateway()
        answers: dict[int, list[ServiceError | None]] = {}

        async def disturb(counter: int) -> None:
            for _ in range(draw.randrange(12)):
                await asyncio.sleep(0)
            calls = [cancel(gateway, gateway.incarnation, counter) for _ in range(2)]
            if draw.randrange(2):
                calls.insert(draw.randrange(3), gateway.cancel(counter))  # type: ignore[arg-type]
            told = await asyncio.gather(*calls)
            answers[counter] = [each for each in told if each is not None]

        disturbing = []
        for counter in range(1, count + 1):
            await gateway.submit(counter, PROMPT[: 1 + counter % 4], 1 + counter % 6)
            disturbing.append(asyncio.ensure_future(disturb(counter)))
        await asyncio.gather(*disturbing)
        await gateway.over(*range(1, count + 1))
        seen = set()
        for counter in range(1, count + 1):
            outcome = gateway.outcomes[counter]
            how = ending(outcome)
            seen.add(how if how[0] else outcome.ends[0].reason)
            assert how in (BY_OPERATOR, (0, ""))
            # Of the operator's two cancels the first one at most has found it.
            assert len(answers[counter]) == (1 if how == BY_OPERATOR else 2)
            assert {error.reason for error in answers[counter] if error} == {"REQUEST_NOT_FOUND"}
            tokens = outcome.tokens.get(0, [])
            assert tokens == expected_tokens(PROMPT[: 1 + counter % 4], 1 + counter % 6)[: len(tokens)]
        assert BY_OPERATOR in seen
        assert len(seen) > 1
        load = await gateway.until_load(lambda load: load.executors[0].num_in_flight == 0)
        assert load.executors[0].owned_blocks == 0


@pytest.mark.asyncio
async def test_a_cancel_names_one_request_of_one_gateway() -> None:
    """The same counter of another gateway runs on; unknown and ended requests are NOT_FOUND, a nameless one invalid."""
    async with running_scheduler(FakeExecutor()) as scheduler:
        gateway = await scheduler.ready_gateway()
        other = await scheduler.gateway()
        await gateway.submit(1, PROMPT, 240)
        await other.submit(1, PROMPT, 60, seed=3)
        assert await cancel(other, gateway.incarnation, 1) is None
        await gateway.over(1)
        await other.over(1)
        assert ending(gateway.outcomes[1]) == BY_OPERATOR
        assert other.outcomes[1].tokens == {0: expected_tokens(PROMPT, 60, seed=3)}
        assert ending(other.outcomes[1]) == (0, "")
        for incarnation, counter in ((gateway.incarnation, 1), (other.incarnation, 1), ("nobody", 1)):
            error = await cancel(other, incarnation, counter)
            assert error is not None
            assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")
            assert error.metadata == {"request_id": f"{incarnation}-{counter}"}
        nameless = await cancel(other, "", 1)
        assert nameless is not None
        assert nameless.code is grpc.StatusCode.INVALID_ARGUMENT
        assert [violation.field for violation in nameless.violations] == ["gateway"]
        assert len(gateway.outcomes[1].finished) == 1


@pytest.mark.asyncio
async def test_the_list_tells_of_every_gateways_requests() -> None:
    """Ids, labels, counts, blocks, executors, age and deadline are those of the request; oldest first over pages."""
    executor = FakeExecutor()
    async with running_scheduler(executor) as scheduler:
        gateway = await scheduler.ready_gateway()
        other = await scheduler.gateway()
        first = await gateway.submit(1, PROMPT, 200, n=2, label="mine", tenant="acme")
        await gateway.until(lambda: len(first.tokens.get(0, [])) > 4 and len(first.tokens.get(1, [])) > 4)
        executor.hold()
        await other.submit(1, PROMPT, 20, remaining_deadline={"seconds": 900})
        await gateway.until_load(lambda load: load.num_requests == 2)
        await gateway.submit(2, PROMPT, 20, age={"seconds": 500})
        await gateway.until_load(lambda load: load.num_requests == 3)
        page = await list_page(gateway, 2)
        rest = await list_page(other, 2, page.next_page_token)
        oldest, running, waiting = (*page.requests, *rest.requests)
        assert rest.next_page_token == ""
        assert [(each.gateway, each.request) for each in (oldest, running, waiting)] == [
            (gateway.incarnation, 2),
            (gateway.incarnation, 1),
            (other.incarnation, 1),
        ]
        assert 500 <= oldest.age.ToTimedelta().total_seconds() < 600
        assert (running.label, running.tenant, running.model) == ("mine", "acme", MODEL)
        assert (running.num_prompt_tokens, running.num_running, running.num_waiting) == (10, 2, 0)
        assert running.num_output_tokens >= 10
        assert running.num_blocks >= 2 * 4
        assert list(running.executors) == [executor.address]
        assert not running.HasField("remaining_deadline")
        assert 800 < waiting.remaining_deadline.ToTimedelta().total_seconds() <= 900
        load = await gateway.load()
        each_request = (oldest, running, waiting)
        assert sum(each.num_running for each in each_request) == load.num_running
        assert sum(each.num_waiting for each in each_request) == load.num_waiting
        assert load.num_running + load.num_waiting == 4
        held = load.executors[0].owned_blocks
        # A block that choices share is in the table of each.
        assert sum(each.num_blocks for each in each_request) >= held > 0


@pytest.mark.asyncio
async def test_a_page_that_makes_no_sense_is_refused_by_its_fields() -> None:
    """Sizes outside 1 to 1000 and tokens of no page, or of another scheduler, are INVALID_ARGUMENT and named."""
    async with running_scheduler(FakeExecutor()) as scheduler:
        gateway = await scheduler.ready_gateway()
        for size in (0, 1001, 2**32 - 1):
            error = await refusal(gateway, size)
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT
            assert [violation.field for violation in error.violations] == ["page_size"]
        await gateway.submit(1, PROMPT, 240)
        await gateway.submit(2, PROMPT, 240)
        await gateway.until_load(lambda load: load.num_requests == 2)
        token = (await list_page(gateway, 1)).next_page_token
        assert len((await list_page(gateway, 1000, token)).requests) == 1
        kind, arrival, term, rest = base64.urlsafe_b64decode(token)[4:].decode().split(":", 3)

        def forged(text: str, encoding: str = "utf-8") -> str:
            data = text.encode(encoding)
            return base64.urlsafe_b64encode(zlib.crc32(data).to_bytes(4) + data).decode()

        assert forged(f"{kind}:{arrival}:{term}:{rest}") == token

        bad = (
            "x",
            token[:-4],
            token[:-1],
            token + "!",
            "é" + token,
            forged(f"{kind}:{arrival}:{int(term) + 1}:{rest}"),
            forged(f"kv:{arrival}:{term}:{rest}"),
            forged(f"{kind}:nan:{term}:1:g"),
            forged(f"{kind}:0x1p99999:{term}:1:g"),
            forged(f"{kind}:0x1p1:{term}:one:g"),
            forged(term),
            forged(f"{kind}:0x1p1:{term}:1:é", "latin-1"),
        )
        for each in bad:
            error = await refusal(gateway, 1, each)
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT, each
            assert [violation.field for violation in error.violations] == ["page_token"]
        error = await refusal(gateway, 0, "x")
        assert [violation.field for violation in error.violations] == ["page_size", "page_token"]
