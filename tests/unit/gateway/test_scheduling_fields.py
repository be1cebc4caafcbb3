"""Priority, limits of time and the cache: what a request may say of them, and what comes of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from gateway_fakes import TIMEOUT, FakeScheduler, running_stack
from google.protobuf import duration_pb2
from tokenizer_samples import byte_level

from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.models.prepared import PreparedModel
from octavo.rpc.errors import from_rpc_error
from octavo.v1 import inference_pb2

TEXT = "the cat sat"
NUM_TOKENS = len(byte_level().tokenizer.encode(TEXT).ids)
NANOS = 1_000_000_000
KEYS = "alice sk-0123456789\nbob sk-abcdefghij\n"


def request_of(**fields: Any) -> inference_pb2.GenerateRequest:
    """Return a request with this SchedulingConfig."""
    return inference_pb2.GenerateRequest(text=TEXT, scheduling=inference_pb2.SchedulingConfig(**fields))


@pytest.mark.asyncio
async def test_fields_reach_the_scheduler(prepared: PreparedModel) -> None:
    """Priority, salt and bypass arrive as they were given; what is unset is 0, empty and false."""
    async with running_stack(prepared) as stack:
        request = request_of(priority=-7)
        request.cache.salt = "a salt \u00e9"
        request.cache.bypass = True
        await stack.generate(request)
        await stack.generate(inference_pb2.GenerateRequest(text=TEXT))
        given, unset = stack.scheduler.of_kind("submit")
        assert (given.priority, given.cache_salt, given.bypass_cache) == (-7, "a salt \u00e9", True)
        assert (unset.priority, unset.cache_salt, unset.bypass_cache) == (0, "", False)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("seconds", "nanos", "words"),
    [
        (0, 0, "is 0 s"),
        (0, 999_999, "is 0.000999999 s"),
        (-1, 0, "is -1 s"),
        (0, -1, "is -1e-09 s"),
        (86_400, 1, "is 86400 s"),
        (86_401, 0, "is 86401 s"),
        (2**63 - 1, NANOS - 1, "is 9.22337204e+18 s"),
        (-(2**63), 0, "is -9.22337204e+18 s"),
        (1, -1, "is no valid length of time"),
        (-1, 1, "is no valid length of time"),
        (1, NANOS, "is no valid length of time"),
        (1, 2**31 - 1, "is no valid length of time"),
    ],
)
async def test_lengths_of_time_that_are_none(prepared: PreparedModel, seconds: int, nanos: int, words: str) -> None:
    """Whatever a Duration on the wire may hold, what is not 1 ms to 24 h is refused by the name of its field."""
    duration = duration_pb2.Duration(seconds=seconds, nanos=nanos)
    async with running_stack(prepared) as stack:
        for name in ("queue_ttl", "first_token_target"):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stack.generate(request_of(**{name: duration}))
            (violation,) = from_rpc_error(raised.value).violations
            assert violation.field == f"scheduling.{name}"
            assert violation.description == f"must be 1 ms to 24 h, {words}"
        assert stack.scheduler.of_kind("submit") == []


@pytest.mark.asyncio
async def test_bounds(prepared: PreparedModel) -> None:
    """The ends of each range are part of it, and all that lies beyond is named at once."""
    longest, shortest = duration_pb2.Duration(seconds=86_400), duration_pb2.Duration(nanos=1_000_000)
    async with running_stack(prepared, FakeScheduler(auto=False)) as stack:
        cache = inference_pb2.CacheConfig(salt="s" * 128)
        request = request_of(priority=100, queue_ttl=longest, first_token_target=longest)
        request.cache.CopyFrom(cache)
        call = stack.inference.Generate(request, timeout=TIMEOUT)
        (submit,) = await stack.scheduler.wait_received("submit")
        assert (submit.priority, len(submit.cache_salt)) == (100, 128)
        stack.scheduler.step(20)
        assert [event async for event in call][-1].HasField("usage")
        stack.scheduler.send_pools([])
        await stack.wait_health(False)
        # Past its checks, and so it is told that nothing can run it.
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stack.generate(request_of(priority=-100, queue_ttl=shortest, first_token_target=shortest))
        assert from_rpc_error(raised.value).reason == "NO_EXECUTOR"
        bad = request_of(priority=101, queue_ttl=duration_pb2.Duration(), first_token_target=duration_pb2.Duration())
        bad.cache.salt = "s" * 129
        bad.sampling.temperature = 3
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stack.generate(bad)
        assert [violation.field for violation in from_rpc_error(raised.value).violations] == [
            "sampling.temperature",
            "scheduling.priority",
            "scheduling.queue_ttl",
            "scheduling.first_token_target",
            "cache.salt",
        ]


@pytest.mark.asyncio
async def test_no_salt_changes_the_tenant(prepared: PreparedModel, tmp_path: Path) -> None:
    """D1: the tenant is the key's and stands apart from the salt, so no salt makes one tenant's key another's."""
    (tmp_path / "keys").write_text(KEYS, encoding="utf-8")
    salts = ["", "bob", "alice", "alice\0bob", "bob\n", "default", "\ud7ff", "tenant=bob"]
    async with running_stack(prepared, api_keys=str(tmp_path / "keys")) as stack:
        for salt in salts:
            for tenant, key in (("alice", "sk-0123456789"), ("bob", "sk-abcdefghij")):
                request = inference_pb2.GenerateRequest(
                    text=TEXT, request_id=tenant, cache=inference_pb2.CacheConfig(salt=salt)
                )
                metadata = (("authorization", f"Bearer {key}"), ("tenant", "bob"), ("x-tenant", "bob"))
                async for _ in stack.inference.Generate(request, metadata=metadata, timeout=TIMEOUT):
                    pass
        part = inference_pb2.Continuation(text="b")
        scored = inference_pb2.ScoreRequest(text="a", continuations=[part], request_id="alice")
        await stack.inference.Score(scored, metadata=(("authorization", "Bearer sk-0123456789"),), timeout=TIMEOUT)
        submits = stack.scheduler.of_kind("submit")
        assert all(submit.tenant == submit.label for submit in submits)
        keys = {(submit.tenant, submit.cache_salt) for submit in submits}
        assert keys == {(tenant, salt) for tenant in ("alice", "bob") for salt in salts}


@pytest.mark.asyncio
async def test_cached_tokens_are_told(prepared: PreparedModel) -> None:
    """Started has what was cached at the acceptance, Usage what the run took: as a stream and at once."""
    scheduler = FakeScheduler(cached_when_accepted=2, cached_when_run=4)
    async with running_stack(prepared, scheduler) as stack:
        request = inference_pb2.GenerateRequest(text=TEXT, n=3)
        events = await stack.generate(request)
        assert (events[0].started.cached_tokens, events[-1].usage.cached_tokens) == (2, 4)
        wrapped = inference_pb2.GenerateOnceRequest(request=request)
        answer = await stack.inference.GenerateOnce(wrapped, timeout=TIMEOUT)
        assert (answer.started.cached_tokens, answer.usage.cached_tokens) == (2, 4)
        parts = [inference_pb2.Continuation(text=text) for text in ("b", "cd")]
        scores = await stack.inference.Score(
            inference_pb2.ScoreRequest(text=TEXT, continuations=parts), timeout=TIMEOUT
        )
        assert scores.usage.cached_tokens == 8


@pytest.mark.asyncio
@pytest.mark.parametrize(("num_tokens", "told"), [(0, 5), (3, 2)])
async def test_cached_tokens_after_a_lost_scheduler(prepared: PreparedModel, num_tokens: int, told: int) -> None:
    """What a request without output finds in the next cache counts; what one with output finds is no first run."""
    scheduler = FakeScheduler(auto=False, cached_when_accepted=1, cached_when_run=2)
    async with running_stack(prepared, scheduler) as stack:
        task = asyncio.create_task(stack.generate(inference_pb2.GenerateRequest(text=TEXT)))
        await scheduler.wait_received("submit")
        scheduler.step(num_tokens)
        await scheduler.wait_until(lambda: scheduler.acknowledged == scheduler.sequence)
        await scheduler.stop()
        scheduler.forget()
        scheduler.cached_when_accepted, scheduler.cached_when_run = 4, 5
        await scheduler.start()
        await scheduler.wait_received("submit", 2)
        scheduler.step(40)
        events = await task
        assert events[0].started.cached_tokens == 1
        assert events[-1].usage.cached_tokens == told


@pytest.mark.asyncio
async def test_no_more_than_the_prompt_is_cached(prepared: PreparedModel) -> None:
    """Figures of a scheduler that counts more than the prompt are cut to it; those of unknown requests are dropped."""
    scheduler = FakeScheduler(auto=False, cached_when_accepted=10_000)
    async with running_stack(prepared, scheduler) as stack:
        task = asyncio.create_task(stack.generate(inference_pb2.GenerateRequest(text=TEXT)))
        (submit,) = await scheduler.wait_received("submit")
        for request in (submit.request, 999):
            scheduler.send_outputs(scheduler_pb2.ChoiceOutput(request=request, num_cached_tokens=10_000))
        scheduler.step(40)
        events = await task
        assert events[0].started.cached_tokens == events[-1].usage.cached_tokens == NUM_TOKENS
