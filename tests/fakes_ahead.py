"""A runner whose inputs are built ahead without a thread, each compared with what is built in its turn."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from fakes_executor import Driver, RecallModel, make_runner
from torch import Tensor

from executor_svc.attention import AttentionMetadata
from executor_svc.batch import Limits, StepBatch, StepResult
from executor_svc.input_batch import InputBatch, InputBatchBuilder
from executor_svc.kv_cache import KVCache
from executor_svc.model_runner import ModelRunner


class PlanningModel(RecallModel):
    """RecallModel that takes a plan: what its metadata were."""

    def plan(self, metadata: AttentionMetadata, block_size: int) -> tuple[AttentionMetadata, int]:
        """See PlannedModel."""
        return metadata, block_size

    def forward_planned(
        self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: KVCache, plan: tuple[AttentionMetadata, int]
    ) -> Tensor:
        """See PlannedModel."""
        assert plan == (metadata, kv_cache.block_size)
        return self.forward(token_ids, metadata, kv_cache)


class AheadRunner:
    """Builds the next step's inputs in the middle of a step's forward pass, by the thread that runs it.

    What is built ahead must be what would be built in its turn, and leave the sequence table in the same state.
    """

    def __init__(self, limits: Limits, *, nan_token: int | None = None) -> None:
        self.num_adopted = 0
        """Steps whose inputs were built ahead."""
        self.before_forward = lambda _: None
        model = PlanningModel(limits.vocab_size, nan_token=nan_token, before_forward=self._before_forward)
        self.runner = make_runner(limits, model, builds_ahead=True)
        self._limits = limits

    def announce(self, batch: StepBatch) -> None:
        """See StepRunner."""
        self.runner.announce(batch)

    def run(self, batch: StepBatch) -> StepResult:
        """Run a step and compare; the invariants are checked behind it."""
        table = copy.deepcopy(self.runner._table)
        built = InputBatchBuilder(table, self._limits).build(batch)
        taken: list[InputBatch] = []
        forward = ModelRunner._forward

        def watched(runner: ModelRunner, inputs: InputBatch) -> Any:
            taken.append(inputs)
            assert_same(inputs.layout, built.layout)
            for name in ("statuses", "rows", "slots", "token_ids"):
                assert_same(getattr(inputs, name), getattr(built, name), name)
            for name in ("tokens", "block_tables", "num_tokens", "num_computed_tokens", "num_blocks"):
                assert_same(getattr(runner._table, name), getattr(table, name), name)
            return forward(runner, inputs)

        self.runner._forward = watched.__get__(self.runner)  # type: ignore[method-assign]
        result = self.runner.run(batch)
        self.num_adopted += result.timings.ahead is not None
        assert [each.ahead for each in taken] == [result.timings.ahead] * len(taken)
        self.runner.check_invariants()
        return result

    def _before_forward(self, number: int) -> None:
        assert self.runner.ahead is not None
        self.runner.ahead.build_next()
        self.before_forward(number)


class AheadDriver(Driver):
    """A driver over it."""

    def __init__(self, limits: Limits, *, depth: int, chunk: int = 64) -> None:
        self.ahead = AheadRunner(limits)
        super().__init__(self.ahead.run, limits, depth=depth, chunk=chunk, announce=self.ahead.announce)


def assert_same(one: Any, other: Any, name: str = "") -> None:
    """Raise AssertionError where two values differ: arrays by type, shape and content, dataclasses field by field."""
    assert type(one) is type(other), name
    if is_dataclass(one):
        for each in fields(one):
            assert_same(getattr(one, each.name), getattr(other, each.name), each.name)
    elif isinstance(one, Tensor):
        assert_same(one.numpy(), other.numpy(), name)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype, name
        np.testing.assert_array_equal(one, other, err_msg=name)
    else:
        assert one == other, name
