"""Logprobs of prompts on their way from executors to gateways, and stops that only a text shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from wire_executor import FakeExecutor, expected_tokens, prompt_logprob_columns
from wire_gateway import FakeGateway, all_outputs
from wire_scheduler import running_scheduler

from octavo.internal.executor.v1 import executor_pb2
from octavo.internal.scheduler.v1 import scheduler_pb2
from scheduler_svc import convert

PROMPT = list(range(100, 175))


def outputs_of(gateway: FakeGateway, counter: int) -> Iterator[scheduler_pb2.ChoiceOutput]:
    """Yield what came for a request, repeated frames too."""
    for frame in gateway.frames:
        for output in all_outputs(frame.step_outputs):
            if output.request == counter:
                yield output


def told_of(gateway: FakeGateway, counter: int) -> list[scheduler_pb2.PromptLogprobs]:
    """Return the runs of prompt logprobs that came for a request; only its first choice has any."""
    told = [output for output in outputs_of(gateway, counter) if output.HasField("prompt_logprobs")]
    assert all(output.choice == 0 for output in told)
    return [output.prompt_logprobs for output in told]


def check_whole(runs: list[scheduler_pb2.PromptLogprobs], num_top: int, *, again: bool = False) -> None:
    """The runs tell every prompt token but the first, without a gap; `again`: from the start on more than once."""
    known = 1
    for run in runs:
        first, count = run.first_token_index, len(run.columns.sampled) // 4
        assert first == known or (again and first == 1), "a gap, or a repeat that nothing explains"
        assert run.columns == prompt_logprob_columns(PROMPT, first, first + count, num_top)
        known = first + count
    assert known == len(PROMPT)


@pytest.mark.asyncio
@pytest.mark.parametrize("depth", [1, 2])
async def test_every_prompt_token_is_told_of_once(depth: int) -> None:
    """A prompt of several steps is told of whole, also by steps that sample nothing, and for the first choice alone."""
    executor = FakeExecutor()
    async with running_scheduler(executor, depth=depth) as scheduler:
        gateway = await scheduler.ready_gateway()
        outcome = await gateway.submit(1, PROMPT, 4, n=3, prompt_logprobs=2)
        await gateway.submit(2, PROMPT, 4)
        await gateway.over(1, 2)
        check_whole(told_of(gateway, 1), 2)
        assert any(not output.token_ids for output in outputs_of(gateway, 1))
        assert told_of(gateway, 2) == []
        assert outcome.tokens == {choice: expected_tokens(PROMPT, 4, choice=choice) for choice in range(3)}
        assert outcome.finished[0].error.code == 0


@pytest.mark.asyncio
async def test_a_preempted_sequence_tells_again() -> None:
    """With room for less than all, whoever starts again tells its prompt from the start: never with a gap."""
    executor = FakeExecutor(num_blocks=46)
    async with running_scheduler(executor) as scheduler:
        gateway = await scheduler.ready_gateway()
        for counter in (1, 2):
            await gateway.submit(counter, PROMPT, 30, prompt_logprobs=0)
        await gateway.over(1, 2)
        for counter in (1, 2):
            check_whole(told_of(gateway, counter), 0, again=True)
            assert gateway.outcomes[counter].tokens == {0: expected_tokens(PROMPT, 30)}
        assert (await gateway.load()).num_preemptions


@pytest.mark.asyncio
async def test_an_executor_lost_amid_a_prompt_tells_again() -> None:
    """The first step of a prompt was answered, the second was not: from its start again, and the same tokens follow."""
    executor = FakeExecutor()
    async with running_scheduler(executor) as scheduler:
        gateway = await scheduler.ready_gateway()
        executor.hold()
        await gateway.submit(1, PROMPT, 10, n=2, prompt_logprobs=2)
        executor.permit(1)
        await gateway.until(lambda: bool(told_of(gateway, 1)))
        assert not any(gateway.outcomes[1].tokens.values())
        executor.break_streams()
        executor.release()
        await gateway.over(1)
        check_whole(told_of(gateway, 1), 2, again=True)
        assert gateway.outcomes[1].tokens == {choice: expected_tokens(PROMPT, 10, choice=choice) for choice in range(2)}
        assert executor.num_sessions == 2


@pytest.mark.asyncio
async def test_what_was_not_acknowledged_is_told_again() -> None:
    """Prompt logprobs are kept until they are acknowledged, as all outputs are."""
    executor = FakeExecutor()
    async with running_scheduler(executor) as scheduler:
        gateway = await scheduler.ready_gateway()
        gateway.acknowledges = False
        await gateway.submit(1, PROMPT, 1, prompt_logprobs=1)
        await gateway.over(1)
        first = told_of(gateway, 1)
        check_whole(first, 1)
        await gateway.break_stream()
        gateway.frames.clear()
        gateway.acknowledges = True
        await gateway.attach([1])
        await gateway.until(lambda: bool(gateway.frames) and gateway.frames[-1].HasField("finished"))
        assert told_of(gateway, 1) == first


@pytest.mark.asyncio
async def test_a_stop_in_the_text_ends_well() -> None:
    """Cancel with STOP ends its choice as stopped; with the last one Finished has no error and all memory is free."""
    executor = FakeExecutor()
    async with running_scheduler(executor) as scheduler:
        gateway = await scheduler.ready_gateway()
        outcome = await gateway.submit(1, PROMPT, 120, n=2)
        await gateway.until(lambda: all(len(outcome.tokens.get(choice, [])) >= 5 for choice in (0, 1)))
        for choice in (1, 0):
            await gateway.cancel(1, choice=choice, kept_tokens=4, reason=scheduler_pb2.CANCEL_REASON_STOP)
        await gateway.over(1)
        stopped = scheduler_pb2.ChoiceEnd(reason=scheduler_pb2.FINISH_REASON_STOP)
        assert outcome.ends == {0: stopped, 1: stopped}
        assert not outcome.finished[0].HasField("error")
        load = await gateway.load()
        assert load.num_requests == 0
        assert all(each.owned_blocks == 0 for each in load.executors)


def test_rows_that_do_not_exist_are_refused() -> None:
    """A result that tells of a row which the step did not have breaks the contract."""
    result = executor_pb2.StepResult(
        step=3, prompt_logprobs=[executor_pb2.RowPromptLogprobs(row=0, first_token_index=1)]
    )
    with pytest.raises(convert.WireError, match="prompt logprobs of a row"):
        convert.batch_result(result, 1)
