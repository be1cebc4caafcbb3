"""Acknowledgements of the scheduler's frames: together where steps come one after the other, and soon in any case."""

from __future__ import annotations

import pytest
from gateway_fakes import FakeScheduler, running_stack, tokens_of
from tokenizer_samples import EOS_ID, byte_level

from gateway import attach_client
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.models.prepared import PreparedModel
from octavo.v1 import inference_pb2

TEXT = "the cat sat 😀 on the mat"
TOKENS = [*byte_level().tokenizer.encode(TEXT).ids, EOS_ID]


@pytest.mark.asyncio
async def test_frames_are_acknowledged(prepared: PreparedModel) -> None:
    """The latest applied frame is acknowledged, Finished included, and acknowledgements never go back."""
    async with running_stack(prepared) as stack:
        await stack.generate(inference_pb2.GenerateRequest(text=TEXT))
        await stack.scheduler.wait_until(lambda: stack.scheduler.acknowledged == stack.scheduler.sequence)
        sequences = [ack.sequence for ack in stack.scheduler.of_kind("ack")]
        assert sequences == sorted(set(sequences))


@pytest.mark.asyncio
async def test_steps_are_acknowledged_together(prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some steps have no Ack of their own; a sixteenth has, and so has Finished, at once and for all before it."""
    monkeypatch.setattr(attach_client, "_ACK_WITHIN", 3600.0)
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler) as stack:
        call = stack.inference.Generate(inference_pb2.GenerateRequest(text=TEXT))
        await scheduler.wait_received("submit")
        scheduler.step(2)
        counter = scheduler.of_kind("submit")[0].request
        known = scheduler_pb2.ChoiceOutput(request=counter, first_token_index=0, token_ids=TOKENS[:1])
        while scheduler.sequence < 15:
            scheduler.send_outputs(known)
        scheduler.step(1)
        await scheduler.wait_until(lambda: scheduler.acknowledged == 16)
        scheduler.step(len(TOKENS))
        events = [event async for event in call]
        await scheduler.wait_until(lambda: scheduler.acknowledged == scheduler.sequence)
        assert tokens_of(events) == TOKENS
        assert len(scheduler.of_kind("ack")) <= 3


@pytest.mark.asyncio
async def test_a_step_alone_is_acknowledged_soon(prepared: PreparedModel) -> None:
    """The scheduler need not wait for a sixteenth frame to forget the first."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler) as stack:
        call = stack.inference.Generate(inference_pb2.GenerateRequest(text=TEXT))
        await scheduler.wait_received("submit")
        scheduler.step(1)
        await scheduler.wait_until(lambda: scheduler.acknowledged == 1)
        call.cancel()
