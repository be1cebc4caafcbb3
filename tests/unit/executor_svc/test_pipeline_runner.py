"""Steps launched ahead on a fake device, whose rules are watched, give the tokens of one step at a time on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_device import FakeDevice
from fakes_executor import Driver, make_limits, make_sequence
from fakes_pipeline import Ahead, ExactModel, exact_on, make_pipelined, make_plain
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.batch import Limits, NewSequence, RowStatus, SamplingParams, StepBatch, StepFailureReason

RANDOM = SamplingParams(temperature=1.0, seed=11)
CLEAN = SamplingParams(
    temperature=1.2,
    seed=4,
    bias_token_ids=(1, 2, 3, 9),
    bias_values=(9.0, 9.0, 9.0, -50.0),
    bad_words=((7,), (1, 1), (2, 3, 1), (3, 2, 1, 3), (1, 2, 2)),
    prompt_logprobs=3,
)


@pytest.fixture(name="device")
def _device() -> Iterator[FakeDevice]:
    """A device that watches this thread."""
    device = FakeDevice()
    with device.watching():
        yield device


def plain_mix() -> dict[str, NewSequence]:
    """Sequences that want nothing beside the draw."""
    return {
        "greedy": make_sequence(0, [5, 9, 2], max_tokens=9),
        "greedy4": make_sequence(0, [7, 7, 1, 3], max_tokens=12),
        "random": make_sequence(0, list(range(17)), sampling=RANDOM, max_tokens=11, choice=3),
        "filtered": make_sequence(0, [4], sampling=replace(RANDOM, top_k=20, top_p=0.9, min_p=0.01), max_tokens=13),
        "typical": make_sequence(0, [6, 6], sampling=replace(RANDOM, typical_p=0.7), max_tokens=10),
        "stopped": make_sequence(0, [1, 2], sampling=RANDOM, max_tokens=20, stop_token_ids=tuple(range(0, 60, 2))),
    }


def wanting_mix() -> dict[str, NewSequence]:
    """Sequences that want more: penalties, biases, min_tokens, bad words, logprobs."""
    penalized = SamplingParams(0.0, repetition_penalty=2.0, presence_penalty=0.3, frequency_penalty=0.4)
    stops = tuple(range(0, 60, 2))
    return {
        "penalized": make_sequence(0, [8, 8, 8, 8, 8], sampling=penalized, max_tokens=14),
        "late": make_sequence(0, [1, 2], sampling=RANDOM, max_tokens=20, min_tokens=6, stop_token_ids=stops),
        "told": make_sequence(0, [6, 6], sampling=replace(RANDOM, top_logprobs=2), max_tokens=10),
        "told0": make_sequence(0, [9], sampling=replace(RANDOM, top_logprobs=0), max_tokens=4),
        "clean": make_sequence(0, [3, 1, 4, 1, 5], sampling=CLEAN, max_tokens=16, choice=1),
    }


def mix() -> dict[str, NewSequence]:
    """All of them."""
    return plain_mix() | wanting_mix()


def run_plain(sequences: dict[str, NewSequence], limits: Limits) -> Driver:
    """One step at a time on the CPU."""
    driver = Driver(make_plain(limits, ExactModel(limits.vocab_size)).run, limits)
    for key, sequence in sequences.items():
        driver.add(key, sequence)
    driver.finish()
    return driver


def expected_of(device: FakeDevice, sequence: NewSequence, limits: Limits) -> list[int]:
    """One sequence's output on the CPU, while the device looks away."""
    with device.watch.unwatched():
        return run_plain({"it": sequence}, limits).outputs["it"]


def ahead(device: FakeDevice, limits: Limits, *, depth: int, chunk: int = 64, graphs: bool = True) -> Driver:
    """A driver whose steps are launched ahead."""
    runner = make_pipelined(limits, exact_on(device, limits), device, graphs=graphs)
    return Driver(Ahead(runner).run, limits, depth=depth, chunk=chunk)


LIMITS = make_limits(max_num_seqs=12, num_blocks=120)


@pytest.fixture(name="undisturbed", scope="module")
def _undisturbed() -> Driver:
    """The oracle."""
    with torch.inference_mode():
        return run_plain(mix(), LIMITS)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize(("depth", "chunk"), [(1, 64), (2, 64), (2, 3), (3, 5), (3, 1)])
def test_no_token_changes(undisturbed: Driver, device: FakeDevice, depth: int, chunk: int, graphs: bool) -> None:
    """Whatever is in flight, chunked or captured: tokens and ends are those of one step at a time (C8, C9)."""
    driver = ahead(device, LIMITS, depth=depth, chunk=chunk, graphs=graphs)
    for key, sequence in mix().items():
        driver.add(key, sequence)
    assert driver.finish() == undisturbed.outputs
    for key, told in undisturbed.prompt_logprobs.items():
        mine = driver.prompt_logprobs[key]
        assert np.concatenate([each.logprobs for each in mine]).tolist() == pytest.approx(
            np.concatenate([each.logprobs for each in told]).tolist(), abs=1e-5
        )


def test_steps_are_in_flight_together(undisturbed: Driver, device: FakeDevice) -> None:
    """A step is launched while the one before it has not landed; decode steps replay graphs of each size in turn."""
    runner = make_pipelined(LIMITS, exact_on(device, LIMITS), device)
    before = runner._ops.model.num_forwards  # type: ignore[attr-defined]
    assert runner.num_graphs == 5
    steps = Ahead(runner)
    driver = Driver(steps.run, LIMITS, depth=2)
    for key, sequence in plain_mix().items():
        driver.add(key, sequence)
    outputs = driver.finish()
    assert outputs == {key: undisturbed.outputs[key] for key in outputs}
    assert steps.most == 2
    # The model's code ran for the prompts alone.
    assert runner._ops.model.num_forwards == before + 1  # type: ignore[attr-defined]
    assert len(driver.results) > 10


@settings(max_examples=8)
@given(
    depth=st.integers(1, 3),
    chunk=st.integers(1, 9),
    preempted=st.lists(st.tuples(st.integers(0, 20), st.sampled_from(sorted(mix()))), max_size=5),
)
def test_recompute_equals_undisturbed(
    undisturbed: Driver, depth: int, chunk: int, preempted: list[tuple[int, str]]
) -> None:
    """Preempted anywhere, and started again from the full record in another's slot, no token changes (C6, C10)."""
    device = FakeDevice()
    with device.watching():
        driver = ahead(device, LIMITS, depth=depth, chunk=chunk)
        for key, sequence in mix().items():
            driver.add(key, sequence)
        for step in range(21):
            for at, key in preempted:
                if at == step:
                    driver.preempt(key)
            driver.step()
        assert driver.finish() == undisturbed.outputs


def test_logprobs_are_those_of_the_cpu(undisturbed: Driver, device: FakeDevice) -> None:
    """Of each sampled token and the likeliest ones, by the row that asked."""
    told = {key: each for key, each in wanting_mix().items() if key.startswith("told")}

    def logprobs(driver: Driver) -> list[tuple[int, float, list[int]]]:
        for key, sequence in told.items():
            driver.add(key, sequence)
        driver.finish()
        return [
            (row, round(each.sampled, 4), each.top_token_ids.tolist())
            for result in driver.results
            for row, each in sorted(result.logprobs.items())
        ]

    mine = logprobs(ahead(device, LIMITS, depth=2))
    with device.watch.unwatched():
        plain = logprobs(Driver(make_plain(LIMITS, ExactModel(LIMITS.vocab_size)).run, LIMITS))
    assert mine == plain
    assert len(mine) == 14


def test_only_prompts_that_are_told_are_waited_for(device: FakeDevice) -> None:
    """Scoring a prompt waits for the device in the middle of its step; the same stay's decode steps do not."""
    limits = make_limits()
    runner = make_pipelined(limits, exact_on(device, limits), device)
    sequence = make_sequence(1, [5, 9, 2], max_tokens=6, sampling=SamplingParams(0.0, prompt_logprobs=2))
    told = runner.run(StepBatch(1, 1, (), (sequence,), (1,), (3,), (0,), (1,), (1,))).prompt_logprobs
    assert told[0].first_token_index == 1
    assert len(told[0].logprobs) == 2
    # Held, the device ends nothing: a wait would fail.
    device.gate.clear()
    device.gate_seconds = 0.0
    flight = runner.launch(StepBatch(1, 2, (), (), (1,), (1,), (3,), (0,), ()))
    assert flight.result is None
    device.gate.set()
    flight.wait()
    assert runner.land(flight).sampled != (None,)


def test_more_stays_than_rows(device: FakeDevice) -> None:
    """Where the tables grow the graphs, which hold their addresses, are used no more; the tokens stay the same."""
    limits = make_limits(max_num_seqs=2)
    prompts = {1: [5, 9, 2], 2: [7, 1, 3], 3: [4, 4, 8], 4: [1, 2, 6]}
    runner = make_pipelined(limits, exact_on(device, limits), device)
    sampled: dict[int, list[int | None]] = {handle: [] for handle in prompts}
    step = 0

    def run(handles: tuple[int, int], computed: int) -> None:
        nonlocal step
        step += 1
        new = tuple(make_sequence(each, prompts[each], max_tokens=3) for each in handles) if not computed else ()
        blocks = tuple(each + 4 * (computed > 3) for each in handles) if computed in (0, 4) else ()
        counts = (int(bool(blocks)),) * 2
        scheduled = (1 if computed else 3,) * 2
        result = runner.run(StepBatch(1, step, (), new, handles, scheduled, (computed,) * 2, counts, blocks))
        for handle, token in zip(handles, result.sampled, strict=True):
            sampled[handle].append(token)

    run((1, 2), 0)
    run((1, 2), 3)
    assert runner.num_graphs == 2
    run((3, 4), 0)
    assert runner.num_graphs == 0
    run((3, 4), 3)
    run((1, 2), 4)
    run((3, 4), 4)
    assert sampled == {
        handle: expected_of(device, make_sequence(0, prompt, max_tokens=3), limits)
        for handle, prompt in prompts.items()
    }


def test_rows_behind_a_stop_are_skipped(undisturbed: Driver, device: FakeDevice) -> None:
    """A row launched before its stay's stop token was known comes back SKIPPED; its neighbours have their tokens."""
    driver = ahead(device, LIMITS, depth=3)
    for key, sequence in plain_mix().items():
        driver.add(key, sequence)
    outputs = driver.finish()
    assert outputs == {key: undisturbed.outputs[key] for key in outputs}
    rows = [row for result in driver.results for row in zip(result.statuses, result.sampled, strict=True)]
    assert (RowStatus.SKIPPED, None) in rows
    assert all((status is RowStatus.OK) == (token is not None) for status, token in rows)


def test_a_row_of_nan_ends_alone(device: FakeDevice) -> None:
    """It is NAN, the row launched behind it SKIPPED, and its neighbours have their tokens; the stay is over."""
    limits = make_limits()
    sound = expected_of(device, make_sequence(0, [5, 9, 2], max_tokens=6), limits)
    runner = make_pipelined(limits, exact_on(device, limits, nan_token=60), device)
    first = runner.launch(
        StepBatch(
            1,
            1,
            new_sequences=(make_sequence(1, [5, 9, 2], max_tokens=6), make_sequence(2, [60, 1], max_tokens=6)),
            handles=(1, 2),
            num_scheduled_tokens=(3, 2),
            num_computed_tokens=(0, 0),
            num_new_blocks=(1, 1),
            new_blocks=(1, 2),
        )
    )
    second = runner.launch(
        StepBatch(1, 2, (), (), (1, 2), (1, 1), num_computed_tokens=(3, 2), num_new_blocks=(0, 0), new_blocks=())
    )
    first.wait()
    result = runner.land(first)
    assert result.statuses == (RowStatus.OK, RowStatus.NAN)
    assert result.sampled == (sound[0], None)
    second.wait()
    result = runner.land(second)
    assert result.statuses == (RowStatus.OK, RowStatus.SKIPPED)
    assert result.sampled == (sound[1], None)
    assert runner.num_sequences == 1


def test_a_released_stay_is_told_and_its_slot_is_anothers(device: FakeDevice) -> None:
    """A token in flight when its stay is released is still told, and touches nothing of who has the slot by then."""
    limits = make_limits(max_num_seqs=1)
    expected = {
        key: expected_of(device, make_sequence(0, prompt, max_tokens=4), limits)
        for key, prompt in (("a", [5, 9, 2]), ("b", [7, 1, 3]))
    }
    runner = make_pipelined(limits, exact_on(device, limits), device)

    def start(step: int, handle: int, prompt: list[int], released: tuple[int, ...]) -> StepBatch:
        sequence = make_sequence(handle, prompt, max_tokens=4)
        return StepBatch(1, step, released, (sequence,), (handle,), (3,), (0,), (1,), (handle,))

    def go_on(step: int, handle: int, computed: int) -> StepBatch:
        blocks = (4,) if computed == 4 else ()
        return StepBatch(1, step, (), (), (handle,), (1,), (computed,), (len(blocks),), blocks)

    flights = [runner.launch(start(1, 1, [5, 9, 2], ())), runner.launch(start(2, 2, [7, 1, 3], (1,)))]
    flights[0].wait()
    assert runner.land(flights[0]).sampled == (expected["a"][0],)
    runner.check_invariants()
    flights.append(runner.launch(go_on(3, 2, 3)))
    sampled = []
    for flight in flights[1:]:
        flight.wait()
        sampled += runner.land(flight).sampled
    assert sampled == expected["b"][:2]
    assert runner.run(go_on(4, 2, 4)).sampled == (expected["b"][2],)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), StepFailureReason.OUT_OF_MEMORY),
        (ValueError("a fault"), StepFailureReason.INTERNAL),
    ],
)
def test_a_step_that_fails_leaves_the_one_before_it_whole(
    device: FakeDevice, error: Exception, reason: StepFailureReason
) -> None:
    """The failure is told in its turn, behind the step in flight, which keeps its tokens; the stays of its rows are
    lost, and later ones run.
    """

    def fail(number: int) -> None:
        if number == 2:
            raise error

    limits = make_limits()
    expected = expected_of(device, make_sequence(0, [5, 9, 2], max_tokens=6), limits)
    runner = make_pipelined(limits, exact_on(device, limits, before_forward=fail), device, graphs=False)

    def start(step: int, handle: int) -> StepBatch:
        sequence = make_sequence(handle, [5, 9, 2], max_tokens=6)
        return StepBatch(1, step, (), (sequence,), (handle,), (3,), (0,), (1,), (handle,))

    first = runner.launch(start(1, 1))
    failed = runner.launch(StepBatch(1, 2, (), (), (1,), (1,), (3,), (0,), ()))
    refused = None
    for flight in (first, failed):
        flight.wait()
        result = runner.land(flight)
        if flight is first:
            assert result.sampled == (expected[0],)
            refused = runner.refuse(StepBatch(1, 3, (), (), (1,), (1,), (4,), (0,), ()))
        else:
            assert result.failure is not None
            assert result.failure.reason is reason
    assert refused is not None
    refusal = runner.land(refused).failure
    assert refusal is not None
    assert refusal.reason is StepFailureReason.REFUSED
    assert runner.num_sequences == 0
    assert runner.run(start(4, 2)).sampled == (expected[0],)


def test_times_are_the_devices(device: FakeDevice) -> None:
    """Forward and sampling come from events; the wait between two steps is told where the second goes on from the
    first, and not for new sequences.
    """
    limits = make_limits()
    runner = make_pipelined(limits, exact_on(device, limits), device)
    sequence = make_sequence(1, [5, 9, 2], max_tokens=6)
    result = runner.run(StepBatch(1, 1, (), (sequence,), (1,), (3,), (0,), (1,), (1,)))
    assert result.timings.idle is None
    assert result.timings.prepare > 0
    assert result.timings.forward > result.timings.sample > 0
    result = runner.run(StepBatch(1, 2, (), (), (1,), (1,), (3,), (0,), ()))
    assert result.timings.idle is not None
    assert result.timings.idle >= 0
    sequence = make_sequence(2, [5, 9, 2], max_tokens=6)
    result = runner.run(StepBatch(1, 3, (1,), (sequence,), (2,), (3,), (0,), (1,), (1,)))
    assert result.timings.idle is None
