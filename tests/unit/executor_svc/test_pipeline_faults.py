"""Faults planted in the pipelined runner: each is found on the fake device, by its rules or by the tokens."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import fakes_pipeline
import pytest
import torch
from fake_device import FakeDevice
from fakes_executor import Driver, make_limits, make_sequence
from fakes_pipeline import Ahead, ExactModel, exact_on, make_plain

from executor_svc.batch import NewSequence, SamplingParams, StepBatch

LIMITS = make_limits(max_num_seqs=5, num_blocks=60, max_model_len=32)
PARTS = ("columns", "tables", "rows", "sampling", "step_ops", "graphs", "flight", "runner")
FAULTS = {
    "the copy does not wait for the step": ("columns", "device.copy.wait(slip.taken)", "pass"),
    "the step does not wait for its inputs": ("columns", "device.compute.wait(slip.sent)", "pass"),
    "the step waits for what is behind it": ("columns", "slip.taken = device.compute.record()", "slip.taken = None"),
    "columns overlap": ("columns", "at = -(-end // ALIGNMENT) * ALIGNMENT", "at = end // ALIGNMENT * ALIGNMENT"),
    "tokens of a stay are not brought": ("tables", "self.tokens[slot, : len(token_ids)].copy_", "len"),
    "tokens do not move with the tables": ("tables", "tokens[: self.nobody].copy_(", "len("),
    "blocks do not move with the tables": ("tables", "block_tables[: self.nobody].copy_(", "len("),
    "a drawn token goes a place too early": ("rows", "* length + self.places", "* length + self.places - 1"),
    "new blocks are lost": ("rows", 'host["patch_block"][:num_patches] = self', "self"),
    "nobody's rows patch somebody's blocks": ("rows", "= tables.nobody * tables.width", "= 0"),
    "rows of nobody have no place of their own": ("rows", "np.arange(num_rows, all_rows + 1)", "num_rows"),
    "drawn tokens are not left for the next step": (
        "step_ops",
        "self._tables.flat_tokens.scatter_(",
        "(lambda *_: None)(",
    ),
    "blocks are not patched": ("step_ops", "tables.flat_block_tables.scatter_(", "(lambda *_: None)("),
    "tables are cut too short": ("step_ops", "-(-max(context_lens) //", "(max(context_lens) //"),
    "penalties are left out": ("sampling", "bool(state.penalized)", "False"),
    "a graph is captured cold": ("graphs", "            forward()\n            draw()\n", "            pass\n"),
    "a graph that is too small": ("graphs", "graph.where.rows >= rows", "graph.where.rows >= rows - 1"),
    "graphs of steps that are no decode": ("runner", "if step.is_decode else None", "if True else None"),
    "graphs of rows that want more": ("runner", "graph is not None and extras is None", "graph is not None"),
    "graphs are kept though the tables moved": ("runner", "self._graphs.drop()", "pass"),
    "tokens are not expected": ("runner", "table.expect_tokens(step.sample_slots)", "pass"),
    "rows behind an end are told": ("runner", "behind.skipped |= ended", "pass"),
    "a stay that is gone takes a token": ("runner", "== air.slots[sampling]", "> -9"),
    "bad words are judged too early": ("runner", "and not (self._air and self._table.sampler.bad_words)", ""),
}


def _plant(monkeypatch: pytest.MonkeyPatch, part: str, text: str, fault: str) -> None:
    """Have every part of the runner use a module with a changed text."""
    modules = [importlib.import_module(f"executor_svc.pipeline.{name}") for name in PARTS]
    module = modules[PARTS.index(part)]
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert text in source, f"{text!r} is not in {part}"
    made = ModuleType(f"{module.__name__}_planted")
    # dataclasses look their module up.
    monkeypatch.setitem(sys.modules, made.__name__, made)
    exec(compile(source.replace(text, fault), module.__file__, "exec"), made.__dict__)
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) == module.__name__:
            for holder in (*modules, fakes_pipeline):
                if vars(holder).get(name) is value:
                    monkeypatch.setattr(holder, name, vars(made)[name])


def _sequences() -> dict[str, NewSequence]:
    drawn = SamplingParams(temperature=1.0, seed=11)
    tired = SamplingParams(0.0, frequency_penalty=15.0, bias_token_ids=(7,), bias_values=(20.0,))
    words = SamplingParams(0.0, bias_token_ids=(1, 2), bias_values=(40.0, 39.0), bad_words=((1, 1), (2, 2)))
    return {
        "greedy": make_sequence(0, [5, 9, 2], max_tokens=9),
        "penalized": make_sequence(0, [8] * 9, sampling=tired, max_tokens=9),
        "stopped": make_sequence(0, [1, 2], sampling=drawn, max_tokens=20, stop_token_ids=tuple(range(0, 60, 2))),
        "long": make_sequence(0, list(range(13)), sampling=drawn, max_tokens=12, choice=3),
        "words": make_sequence(0, [4, 4], sampling=words, max_tokens=6),
    }


@pytest.fixture(name="expected", scope="module")
def _expected() -> dict[str, list[int]]:
    """The oracle."""
    driver = Driver(make_plain(LIMITS, ExactModel(LIMITS.vocab_size)).run, LIMITS)
    for key, sequence in _sequences().items():
        driver.add(key, sequence)
    return driver.finish()


def _check(expected: dict[str, list[int]]) -> None:
    """Run all sequences ahead, without and with those that keep steps from being graphs; then let the tables grow."""
    for keys in (["greedy", "stopped", "long"], list(expected)):
        device = FakeDevice()
        with device.watching():
            runner = fakes_pipeline.make_pipelined(LIMITS, exact_on(device, LIMITS), device)
            driver = Driver(Ahead(runner).run, LIMITS, depth=2)
            for key in keys:
                driver.add(key, _sequences()[key])
            assert driver.finish() == {key: expected[key] for key in keys}
    _grow(expected)


def _grow(expected: dict[str, list[int]]) -> None:
    limits = make_limits(max_num_seqs=1, num_blocks=60, max_model_len=32)
    device = FakeDevice()
    with device.watching():
        runner = fakes_pipeline.make_pipelined(limits, exact_on(device, limits), device)
        sampled = []
        for step, (handle, computed) in enumerate([(1, 0), (1, 3), (2, 0), (1, 4), (1, 5)], start=1):
            new = () if computed else (make_sequence(handle, [5, 9, 2], max_tokens=9),)
            blocks = (2 * handle + (computed > 0),) if computed in (0, 4) else ()
            scheduled = 1 if computed else 3
            batch = StepBatch(1, step, (), new, (handle,), (scheduled,), (computed,), (len(blocks),), blocks)
            sampled += runner.run(batch).sampled
        tokens = expected["greedy"]
        assert sampled == [*tokens[:2], tokens[0], *tokens[2:4]]


def test_nothing_is_found_where_nothing_is_planted(expected: dict[str, list[int]]) -> None:
    """The check passes."""
    with torch.inference_mode():
        _check(expected)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(expected: dict[str, list[int]], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a rule of the device, an invariant, or another token."""
    _plant(monkeypatch, *FAULTS[name])
    with pytest.raises(Exception):  # noqa: B017 - whatever it runs into
        _check(expected)
