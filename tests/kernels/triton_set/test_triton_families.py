"""Every family by the Triton set, interpreted, against transformers in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_variations import FIRSTS, RARER, VARIATIONS, WINDOW, Variation, save_variation
from paged import PagedLoop, PagedSequence

from executor_svc.kernels import KernelSet
from executor_svc.models import load_weights

BOUND = 1e-5
"""Of the largest logit."""
LENGTH = WINDOW + 5


def _check(folder: Path, variation: Variation, kernels: KernelSet) -> None:
    theirs = save_variation(folder, variation)
    prompt = torch.randint(3, 320, (LENGTH,), generator=torch.Generator().manual_seed(11)).tolist()
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([prompt])).logits[0]
    model = load_weights(folder, torch.float32, torch.device("cpu"), kernels, max_model_len=variation.max_model_len)
    loop, sequence = PagedLoop(model, num_blocks=8), PagedSequence(prompt)
    rows = [loop.step([(sequence, count)])[0] for count in (LENGTH - 2, 1, 1)]
    torch.testing.assert_close(torch.stack(rows), expected[-3:], rtol=0, atol=BOUND * float(expected.abs().max()))


@pytest.mark.parametrize("variation", FIRSTS, ids=lambda variation: variation.family)
def test_every_family(tmp_path: Path, triton_set: KernelSet, variation: Variation) -> None:
    """A prompt past the window and two tokens after it: logits agree to 1e-5 of the largest."""
    _check(tmp_path, variation, triton_set)


@pytest.mark.full
@pytest.mark.parametrize(
    "variation", [each for each in VARIATIONS + RARER if each not in FIRSTS], ids=lambda variation: variation.id
)
def test_every_other_variation(tmp_path: Path, triton_set: KernelSet, variation: Variation) -> None:
    """So do those of all other variations."""
    _check(tmp_path, variation, triton_set)


def test_ops_by_the_reference_are_named(triton_set: KernelSet) -> None:
    """The set says which of its ops are the reference's: sums, multiples and products, which torch does on a GPU."""
    names = {"pack_linear", "norm_query_key", "add_to", "scale", "record", "on_host", "linear_activation"}
    names |= {"route_experts", "join_experts", "add", "multiply", "silu", "rotary", "write_kv"}
    assert {name for name in vars(triton_set) if name in triton_set.by_reference} == names
