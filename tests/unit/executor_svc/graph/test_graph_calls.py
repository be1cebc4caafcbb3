"""The fused graph makes the calls that the decoder made when its fusions were written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from graph_models import described, load, saved_folder, step_of
from hand_fused import HandFused
from model_variations import VARIATIONS, Variation
from native_calls import calls_of

from executor_svc.kernels import build_kernels
from executor_svc.models.parameters import Counter, Parameters
from executor_svc.weights import open_checkpoint

CPU = torch.device("cpu")
DENSE = [each for each in VARIATIONS if "MoE" not in each.family and each.family != "Mixtral"]


@pytest.mark.parametrize("one", DENSE, ids=lambda one: one.id)
def test_the_calls_are_those_of_the_code_written_by_hand(root: Path, one: Variation) -> None:
    """The same kernels, in the same order, with the same numbers, and so the same program; and the same bits."""
    folder, kernels = saved_folder(root, one), build_kernels("cpu")
    config, spec = described(folder)
    model = load(folder, one, kernels)
    counter = Counter(spec.tensors().values(), None)
    parameters = Parameters(open_checkpoint(folder), torch.float32, CPU, kernels, counter)
    by_hand = HandFused(config, spec, kernels, parameters)

    def graph() -> torch.Tensor:
        step = step_of(config, kernels, torch.float32)
        return model._run(step.kv_cache, step.inputs, step.attention)  # type: ignore[arg-type]

    def hand() -> torch.Tensor:
        step = step_of(config, kernels, torch.float32)
        return by_hand.run(step.kv_cache, step.inputs, step.attention)

    with torch.inference_mode():
        assert calls_of(graph) == calls_of(hand)
        assert torch.equal(graph(), hand())
