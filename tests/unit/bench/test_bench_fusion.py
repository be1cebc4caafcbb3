"""What bench/fusion.py measures and counts, on models of a few thousand weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from bench_scripts import load_script

from executor_svc.graph.optimize import PASSES, choose_passes
from executor_svc.kernels import build_kernels

fusion, models, memory = load_script("fusion"), load_script("fusion_models"), load_script("fusion_memory")

TINY: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {**models.SHAPES["gpt2"], "vocab_size": 320, "n_embd": 48, "n_layer": 2, "n_head": 4},
    "llama": {
        **models.SHAPES["llama"],
        "vocab_size": 320,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that take no time."""
    monkeypatch.setattr(models, "SHAPES", TINY)
    monkeypatch.setattr(fusion, "PROFILED_ROUNDS", 2)


def test_a_reduction_is_the_median_of_rounds() -> None:
    """One slow step on either side changes no figure."""
    taken = {"off": [10.0, 10.0, 10.0, 90.0], "on": [8.0, 8.0, 80.0, 8.0]}
    figures = fusion.figures_of(taken, "on")
    assert figures["latency_reduction"] == pytest.approx(0.2)
    assert figures["off_ms"] == 10_000


def test_the_sides_take_turns() -> None:
    """After warming up, as many calls of each, and each is first as often as the others."""
    calls: list[str] = []
    taken = fusion.take_turns({name: partial(calls.append, name) for name in ("off", "on", "torch")}, 3)
    assert calls[9:] == ["off", "on", "torch", "on", "torch", "off", "torch", "off", "on"]
    assert [len(each) for each in taken.values()] == [3, 3, 3]


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_both_sides_compute_the_same(shape: str) -> None:
    """The same weights, bit for bit, whichever passes are on: logits agree as far as bfloat16 does."""
    kernels = build_kernels("cpu")
    logits = []
    for passes in ("none", "all"):
        step = models.Step.decode(models.make_model(shape, kernels, choose_passes(passes), TINY), 2, context=40)
        logits.append(step.run())
    assert float((logits[0] - logits[1]).abs().max()) < 0.03 * float(logits[0].abs().max())


@pytest.mark.usefixtures("_tiny")
def test_the_figures_are_whole() -> None:
    """Every key that is promised, shares between 0 and 1, and less memory at each stage."""
    figures = fusion.run(["gpt2", "llama"], 1, 4, with_torch=False)
    names = {"gpt2_b1", "gpt2_b32", "llama_b1", "llama_b32"}
    assert figures["latency_reduction"].keys() == figures["share_outside_linears"].keys() == names
    assert all(0 <= share <= 1 for share in figures["share_outside_linears"].values())
    assert figures["passes"] == [each.name for each in PASSES]
    for taken in figures["activation_bytes"].values():
        assert taken["on"] <= taken["freed"] < taken["kept"]
    # GPT-2's activation is done in place.
    assert figures["activation_bytes"]["gpt2"]["on"] < figures["activation_bytes"]["gpt2"]["freed"]
    assert 0 <= figures["activation_memory_reduction_of_freed"] < figures["activation_memory_reduction"] < 1
    assert figures["explained"]["figure"] in names
    assert {"linear", "attention", "norms"} <= figures["explained"]["saved_ms"].keys()


def test_memory_is_counted_by_storage() -> None:
    """Views take none, what goes is taken off, and what was there before does not count."""
    before = torch.empty(1000, dtype=torch.uint8)

    def run() -> torch.Tensor:
        first = torch.empty(100, dtype=torch.uint8)
        view = first[:50]
        del first
        second = torch.empty(30, dtype=torch.uint8)
        del view
        third = torch.empty(70, dtype=torch.uint8)
        return torch.empty_like(before)[: len(second) + len(third)]

    assert memory.peak_of(run) == 1100


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # Inductor's own code uses what torch has deprecated
def test_torch_compiles_the_unfused_graph() -> None:
    """Inductor's side computes what the others do."""
    by_torch = load_script("fusion_torch")
    kernels = build_kernels("cpu")
    with torch.inference_mode():
        step = models.Step.decode(by_torch.compiled_by_torch("llama", kernels, shapes=TINY), 2, context=40)
        plain = models.Step.decode(models.make_model("llama", kernels, choose_passes("none"), TINY), 2, context=40)
        given, expected = step.run(), plain.run()
    assert float((given - expected).abs().max()) < 0.03 * float(expected.abs().max())
