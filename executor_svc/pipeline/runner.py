"""Steps launched without waiting for the ones before them.

A step's inputs do not need to know what the step before it samples: drawn tokens stay on the device, where the next
step reads them. So the host counts a token for every row that samples, builds and launches the next step, and learns
the tokens when they land. What it could not know, that a row met a stop token or was not finite, it learns too late
for one step: such a row runs once more for nothing, in blocks that are still its own, and is told as SKIPPED.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor_svc.batch import (
    Limits,
    PromptLogprobs,
    RowStatus,
    StageTimings,
    StepBatch,
    StepResult,
)
from executor_svc.device import Device, is_out_of_memory
from executor_svc.input_batch import InputBatchBuilder
from executor_svc.kernels import KernelSet
from executor_svc.kv_cache import KVCache
from executor_svc.model_runner import CausalLM, failure_of, refusal_of, run_warm_up
from executor_svc.pipeline.columns import DeviceColumns, InputRing, Layout, layout
from executor_svc.pipeline.flight import Airborne, Flight, Marks
from executor_svc.pipeline.graphs import Capture, DecodeGraphs
from executor_svc.pipeline.rows import StepRows, write_nobody
from executor_svc.pipeline.sampling import DeviceSampler, Extras, FetchedLogprobs
from executor_svc.pipeline.step_ops import Computed, StepOps
from executor_svc.pipeline.tables import DeviceTables
from executor_svc.prompt_scorer import PromptScorer
from executor_svc.sequence_state import SequenceTable

logger = logging.getLogger(__name__)

DEPTH = 2
"""Steps on the device at a time: one that runs, and one behind it so that it never waits for the host."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class PipelinedRunner:
    """Runs steps over one model's weights and KV memory on a device. Every method is called on the device's thread.

    `launch` begins a step and `land` ends the oldest, once `Flight.wait` has returned, which any thread may wait for.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache,
        kernels: KernelSet,
        limits: Limits,
        device: Device,
        capture_model: Capture | None = None,
    ) -> None:
        """`capture_model`: see DecodeGraphs."""
        self._device = device
        self._kv_cache = kv_cache
        self._limits = limits
        self._table = SequenceTable(limits)
        self._builder = InputBatchBuilder(self._table, limits)
        self._tables = DeviceTables(device, limits)
        self._sampler = DeviceSampler(kernels, device)
        self._ops = StepOps(model, kv_cache, kernels, self._tables)
        self._scorer = PromptScorer(
            model.compute_logits,
            kernels.gather_logprobs,
            kernels.finite_rows,
            self._table,
            device.put,
            # No method of this runner: a cycle would keep its memory until Python looks for cycles.
            partial(_read_now, device),
        )
        largest = layout(limits.max_num_seqs, limits.max_num_seqs, limits.max_num_batched_tokens)
        self._ring = InputRing(device, largest.size, DEPTH)
        self._graphs = DecodeGraphs(device, self._ops, self._sampler, self._ring.place, capture_model)
        self._air: deque[Flight] = deque()
        self._last: Flight | None = None

    @property
    def limits(self) -> Limits:
        """What it can hold and run."""
        return self._limits

    @property
    def num_sequences(self) -> int:
        """Live stays."""
        return len(self._table)

    @property
    def num_graphs(self) -> int:
        """Sizes of decode steps that are graphs."""
        return len(self._graphs)

    def capture_graphs(self, sizes: Sequence[int]) -> None:
        """Capture decode steps of so many rows. Before the first step; raises what a captured step raises."""

        def fill(where: Layout) -> None:
            write_nobody(self._ring.host_views(where), self._tables, 0, 0)
            self._ring.send(where)
            with self._device.on(self._device.compute):
                self._ring.take(where)

        with torch.inference_mode():
            self._graphs.capture(sizes, fill)

    def warm_up(self) -> None:
        """Run a short prompt, and one token after it. Raises RuntimeError where a step fails."""
        run_warm_up(self.run, self._limits)
        self.reset()

    def reset(self) -> None:
        """Forget every sequence: a session begins. Nothing is in the air."""
        assert not self._air, "a step of the session before is in the air"
        self._last = None
        self._table.clear()

    def refuse(self, batch: StepBatch) -> Flight:
        """Answer a step in flight behind a failed one: released handles take effect, the stays of its rows are lost."""
        return self._over(Flight(batch, result=refusal_of(batch, self._table)))

    def check_invariants(self) -> None:
        """Raise AssertionError where the state of a stay is not what its record gives."""
        self._table.check_invariants()

    def can_launch(self) -> bool:
        """Whether there is room for a step, and it can be built before the last one has landed.

        It cannot where a stay has bad words of several tokens: which token may not come next depends on the last one.
        """
        return len(self._air) < DEPTH and not (self._air and self._table.sampler.bad_words)

    def run(self, batch: StepBatch) -> StepResult:
        """Run one step alone: nothing is in the air before it or after it."""
        flight = self.launch(batch)
        flight.wait()
        return self.land(flight)

    def launch(self, batch: StepBatch) -> Flight:
        """Begin a step, where `can_launch`. What goes wrong becomes its failure, and the stays of its rows are lost.

        Raises where the device has failed.
        """
        started = perf_counter()
        try:
            with torch.inference_mode():
                return self._over(self._launch(batch, started))
        except Exception as error:
            if self._device.is_lost(error):
                raise
            logger.exception("step failed", extra={"fields": {"session": batch.session, "step": batch.step}})
            self._table.lose(batch)
            if is_out_of_memory(error):
                self._device.give_back()
            return self._over(Flight(batch, result=StepResult(batch.session, batch.step, failure=failure_of(error))))

    def land(self, flight: Flight) -> StepResult:
        """End the oldest step that was launched, and learn what it gave. It has been waited for."""
        assert self._air, "nothing is in the air"
        assert self._air[0] is flight, "steps land in the order of their launches"
        self._air.popleft()
        if flight.result is not None:
            return flight.result
        result, ended = self._land(flight)
        for behind in self._air:
            behind.skipped |= ended
        return result

    def _over(self, flight: Flight) -> Flight:
        self._air.append(flight)
        return flight

    def _launch(self, batch: StepBatch, started: float) -> Flight:
        device, table = self._device, self._table
        statuses, rows, slots, scheduled = self._builder.check(batch)
        with device.on(device.compute):
            self._begin(batch)
        if not len(rows):
            return Flight(batch, statuses, result=_without_rows(batch, statuses))
        step = StepRows(table, self._limits.block_size, rows, slots, scheduled, batch.num_new_blocks)
        graph = self._graphs.fitting(len(rows)) if step.is_decode else None
        where = layout(len(rows), len(step.sampling), step.num_tokens) if graph is None else graph.where
        if len(step.patch_at) > where.rows:
            with device.on(device.compute):
                self._tables.patch(step.patch_at, step.patch_block)
            step.patch_at, step.patch_block = step.patch_at[:0], step.patch_block[:0]
        step.write(self._ring.host_views(where), table.sampler.parameters, self._tables)
        self._ring.send(where)
        with device.on(device.compute):
            vocab = self._limits.vocab_size
            extras = self._sampler.extras(table.sampler, step.sample_slots, step.places, vocab)
            prepared = perf_counter() - started
            begun = device.compute.record(timed=True)
            self._ring.take(where)
            columns = where.device_views(self._ring.place) if graph is None else graph.columns
            if graph is None:
                computed = self._ops.compute(columns, step.scheduled.tolist(), step.context_lens.tolist())
            else:
                graph.forward.replay()
                computed = graph.computed
            prompt_sound, prompt_logprobs = self._score(step, computed)
            forwarded = device.compute.record(timed=True)
            if graph is not None and extras is None:
                graph.draw.replay()
                packed, logprobs = graph.packed, None
            else:
                if graph is not None:
                    where = layout(len(rows), len(rows), len(rows))
                    columns, computed = _first(columns, graph.where, len(rows)), computed.first(len(rows))
                drawn, logprobs = self._sample(columns, computed, extras)
                packed = self._ops.finish(columns, drawn, computed)
            done = device.compute.record(timed=True)
            fetched = device.fetch(packed)
            landed = device.compute.record()
        airborne = Airborne(
            rows=rows,
            slots=slots,
            query_start=step.query_start,
            sampling=step.sampling,
            places=step.places,
            where=where,
            packed=fetched,
            landed=landed,
            marks=Marks(begun, forwarded, done),
            prompt_sound=prompt_sound,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        table.num_computed_tokens[slots] += scheduled
        table.expect_tokens(step.sample_slots)
        flight = Flight(batch, statuses, airborne, prepare=prepared)
        # A step of new sequences alone had nothing to go on with: the wait before it was for them to come.
        is_fresh = len(batch.handles) == len(batch.new_sequences)
        if not is_fresh and self._last is not None and self._last.airborne is not None:
            flight.waited = self._last.airborne.marks.done
        self._last = flight
        return flight

    def _begin(self, batch: StepBatch) -> None:
        """Give the device the tokens of the stays that begin."""
        table = self._table
        if self._tables.fit(len(table.num_tokens)) and len(self._graphs):
            logger.warning("more stays than --max-num-seqs: decode steps are no longer launched as graphs")
            self._graphs.drop()
        for sequence in batch.new_sequences:
            slot = int(table.slots((sequence.handle,))[0])
            if slot >= 0:
                self._tables.begin(slot, table.tokens[slot, : len(sequence.token_ids)])

    def _sample(
        self, columns: DeviceColumns, computed: Computed, extras: Extras | None
    ) -> tuple[Tensor, FetchedLogprobs | None]:
        if extras is None:
            return self._sampler.draw(computed.logits, computed.finite_logits, columns), None
        return self._sampler.sample(computed.logits, computed.finite_logits, columns, extras, self._tables.tokens)

    def _score(self, step: StepRows, computed: Computed) -> tuple[Bools | None, dict[int, PromptLogprobs]]:
        """Tell prompts' logprobs, where a stay wants them: the one thing that waits for the device in the middle."""
        if not self._scorer.is_wanted(step.slots):
            return None, {}
        finite = _read_now(self._device, computed.finite_tokens)[: step.num_tokens]
        sound: Bools = np.logical_and.reduceat(finite, step.query_start[:-1])
        told = self._scorer.score_rows(
            step.rows, step.slots, step.query_start, step.context_lens.tolist(), computed.hidden, sound
        )
        return sound, told

    def _land(self, flight: Flight) -> tuple[StepResult, set[int]]:
        """Return what a step gave, and the handles of the stays that turn out to have ended with it."""
        batch, statuses, air, table = flight.batch, flight.statuses, flight.airborne, self._table
        assert air is not None  # land
        tokens, sound = air.read()
        handles = [batch.handles[row] for row in air.rows.tolist()]
        skipped = np.array([handle in flight.skipped for handle in handles], dtype=bool)
        ended: set[int] = set()
        for index in np.flatnonzero(skipped).tolist():
            statuses[air.rows[index]] = RowStatus.SKIPPED
        for index in np.flatnonzero(~sound & ~skipped).tolist():
            statuses[air.rows[index]] = RowStatus.NAN
            fields = {"handle": handles[index], "step": batch.step}
            logger.error("hidden states or logits are not finite", extra={"fields": fields})
            table.end(handles[index])
            ended.add(handles[index])
        told = np.flatnonzero((sound & ~skipped)[air.sampling])
        sampling = air.sampling[told]
        # Since the launch a stay may have been released, and its slot be another's.
        lives = table.slots([handles[index] for index in sampling.tolist()]) == air.slots[sampling]
        if lives.any():
            slots = air.slots[sampling[lives]]
            ended.update(table.settle_tokens(slots, air.places[told[lives]], tokens[told[lives]]))
        sampled: list[int | None] = [None] * len(batch.handles)
        for row, token in zip(air.rows[sampling].tolist(), tokens[told].tolist(), strict=True):
            sampled[row] = token
        logprobs = {} if air.logprobs is None else air.logprobs.read()
        of_row = {index: int(air.rows[air.sampling[index]]) for index in told.tolist()}
        marks, between = air.marks, self._device.seconds_between
        timings = StageTimings(
            prepare=flight.prepare,
            forward=between(marks.begun, marks.forwarded),
            sample=between(marks.forwarded, marks.done),
            idle=flight.idle(self._device),
        )
        result = StepResult(
            batch.session,
            batch.step,
            handles=batch.handles,
            statuses=tuple(statuses),
            sampled=tuple(sampled),
            logprobs={of_row[index]: each for index, each in logprobs.items() if index in of_row},
            prompt_logprobs={
                row: each for row, each in air.prompt_logprobs.items() if batch.handles[row] not in flight.skipped
            },
            timings=timings,
        )
        return result, ended


def _read_now(device: Device, tensor: Tensor) -> npt.NDArray[Any]:
    """Bring a tensor to the host, and wait for it and all that was launched before."""
    fetched = device.fetch(tensor.contiguous())
    device.compute.record().synchronize()
    dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
    return fetched.bytes().view(dtype).reshape(tuple(tensor.shape)).copy()


def _without_rows(batch: StepBatch, statuses: list[RowStatus]) -> StepResult:
    """Return the result of a step of which no row runs."""
    return StepResult(
        batch.session,
        batch.step,
        handles=batch.handles,
        statuses=tuple(statuses),
        sampled=(None,) * len(statuses),
    )


def _first(columns: DeviceColumns, where: Layout, rows: int) -> DeviceColumns:
    """Return the columns of the first rows, of a step each of whose rows is one token and samples."""
    return {name: column[: rows + len(column) - where.rows] for name, column in columns.items()}
