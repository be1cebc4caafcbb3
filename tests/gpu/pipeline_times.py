"""The executor's own decode steps, two of them in flight: how long one takes, and how much of that is no kernel's."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter

import torch
from random_decoder import BLOCK_SIZE, Shape
from random_llama import RandomCheckpoint
from step_times import Rates, floor_seconds

from executor_svc.batch import Limits, NewSequence, SamplingParams, StageTimings, StepBatch, StoppingParams
from executor_svc.device import Device
from executor_svc.kernels import KernelSet
from executor_svc.kv_cache import KVCache
from executor_svc.models.decoder import CausalLM
from executor_svc.models.loader import load_checkpoint
from executor_svc.pipeline.flight import Flight
from executor_svc.pipeline.profile import Profile, measure
from executor_svc.pipeline.runner import PipelinedRunner

CONTEXT = 1024
STEPS, UNTIMED = 72, 8
"""Steps of a measurement, and how many of the first do not count."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 256)
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=1.0, top_p=0.9, seed=5)
NUM_TOKENS = 2048
"""--max-num-batched-tokens."""


@dataclass(frozen=True)
class PipelineTime:
    """Decode steps of so many rows, each launched while the one before it is computed."""

    model: str
    rows: int
    context: int
    sampling: str
    graph: bool
    step_seconds: float
    """From the end of a step to the end of the next one, on average."""
    device_seconds: float
    """From the beginning of a step to its end on the device, by events; the median."""
    idle_seconds: float
    """From the end of the step before to its beginning, likewise."""
    prepare_seconds: float
    """Of the host, from the step to its launch; the median."""
    floor_seconds: float

    @property
    def over_floor(self) -> float:
        """How many times the floor."""
        return self.step_seconds / self.floor_seconds

    @property
    def outside_seconds(self) -> float:
        """What of a step lies outside of its kernels."""
        return max(0.0, self.step_seconds - self.device_seconds)


def make_limits(shape: Shape, batches: Sequence[int], context: int, num_steps: int = STEPS) -> Limits:
    """What holds the largest of the measurements."""
    length = context + num_steps + 2 * BLOCK_SIZE
    blocks = 1 + max(batches) * -(-length // BLOCK_SIZE)
    return Limits(BLOCK_SIZE, blocks, max(batches), max(NUM_TOKENS, max(batches)), length, shape.vocab)


def decode_steps(rows: int, context: int, sampling: SamplingParams, num_steps: int) -> list[StepBatch]:
    """Steps of rows whose contexts are in KV memory already but for a token, as far as they are told."""
    cached = (context - 1) // BLOCK_SIZE * BLOCK_SIZE
    per_row = -(-(cached + num_steps) // BLOCK_SIZE)
    draw, stopping = sampling, StoppingParams(max_tokens=num_steps + 1)
    handles = tuple(range(1, rows + 1))
    steps = []
    for number in range(num_steps):
        computed, first = cached + number, 0 if not number else -(-(cached + number) // BLOCK_SIZE)
        end = -(-(computed + 1) // BLOCK_SIZE)
        blocks = [1 + row * per_row + block for row in range(rows) for block in range(first, end)]
        new = [NewSequence(handle, (7,) * (cached + 1), cached + 1, 0, draw, stopping, cached) for handle in handles]
        steps.append(
            StepBatch(
                session=1,
                step=number + 1,
                new_sequences=() if number else tuple(new),
                handles=handles,
                num_scheduled_tokens=(1,) * rows,
                num_computed_tokens=(computed,) * rows,
                num_new_blocks=(end - first,) * rows,
                new_blocks=tuple(blocks),
            )
        )
    return steps


def run_ahead(runner: PipelinedRunner, steps: Sequence[StepBatch]) -> tuple[list[float], list[StageTimings]]:
    """Run steps with as many in flight as the runner takes; return when each ended and what it told of its stages.

    Raises RuntimeError where one fails.
    """
    air: deque[Flight] = deque()
    ends: list[float] = []
    timings: list[StageTimings] = []

    def land() -> None:
        flight = air.popleft()
        flight.wait()
        ends.append(perf_counter())
        result = runner.land(flight)
        if result.failure is not None:
            raise RuntimeError(f"step {result.step} failed: {result.failure.message}")
        assert None not in result.sampled, "a row has no token"
        timings.append(result.timings)

    for step in steps:
        while not runner.can_launch():
            land()
        air.append(runner.launch(step))
    while air:
        land()
    return ends, timings


def load(shape: Shape, kernels: KernelSet, dtype: torch.dtype, device: Device) -> CausalLM:
    """A model of random weights on the device."""
    model = load_checkpoint(RandomCheckpoint(shape, dtype), dtype, device.torch_device, kernels)
    device.synchronize()
    return model


def profile_of(model: CausalLM, kernels: KernelSet, limits: Limits, device: Device) -> Profile:
    """What the pass that measures memory at the start finds."""
    return measure(model, model.config, kernels, limits, model.dtype, device, has_graphs=True)


def pipeline_times(
    model: CausalLM,
    shape: Shape,
    kernels: KernelSet,
    rates: Rates,
    device: Device,
    *,
    batches: Sequence[int] = BATCHES,
    context: int = CONTEXT,
    num_steps: int = STEPS,
) -> Iterator[PipelineTime]:
    """Greedy decode as graphs and launch by launch, and drawn tokens as graphs."""
    limits = make_limits(shape, batches, context, num_steps)
    with device.on(device.compute):
        cache = KVCache.allocate(model.config, limits.num_blocks, BLOCK_SIZE, model.dtype, device.torch_device)
        for tensor in (*cache.keys, *cache.values):
            tensor.zero_()
    for graph in (True, False):
        runner = PipelinedRunner(model, cache, kernels, limits, device)
        if graph:
            runner.capture_graphs(batches)
        for name, sampling in (("greedy", GREEDY), ("top_p", DRAWN)) if graph else (("greedy", GREEDY),):
            for rows in batches:
                runner.reset()
                ends, timings = run_ahead(runner, decode_steps(rows, context, sampling, num_steps))
                counted = timings[UNTIMED:]
                # Half of the measured tokens lie behind the context on average.
                contexts = [context + num_steps // 2] * rows
                yield PipelineTime(
                    model=shape.name,
                    rows=rows,
                    context=context,
                    sampling=name,
                    graph=graph,
                    step_seconds=(ends[-1] - ends[UNTIMED - 1]) / len(counted),
                    device_seconds=statistics.median(each.forward + each.sample for each in counted),
                    idle_seconds=statistics.median(each.idle or 0.0 for each in counted),
                    prepare_seconds=statistics.median(each.prepare for each in counted),
                    floor_seconds=floor_seconds(shape, model.dtype.itemsize, rates, [1] * rows, contexts),
                )


def bytes_needed(shape: Shape, dtype: torch.dtype, batches: Sequence[int] = BATCHES) -> int:
    """Weights and KV memory."""
    tokens = make_limits(shape, batches, CONTEXT).num_blocks * BLOCK_SIZE
    return shape.weight_bytes(dtype.itemsize) + tokens * shape.kv_token_bytes(dtype.itemsize)


def as_rows(times: Sequence[PipelineTime]) -> list[dict[str, object]]:
    """For JSON."""
    return [asdict(each) | {"over_floor": each.over_floor, "outside_seconds": each.outside_seconds} for each in times]
