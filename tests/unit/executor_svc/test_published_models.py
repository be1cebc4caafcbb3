"""Models in the shape in which they were published, against transformers, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from paged import PagedLoop, PagedSequence
from published_llamas import LLAMAS
from published_others import OTHERS

from executor_svc.kernels import build_kernels
from executor_svc.models import load_weights

PUBLISHED = {**LLAMAS, **OTHERS}
BOUND = 1e-5
"""Of the largest logit."""
PROMPT = torch.randint(3, 320, (40,), generator=torch.Generator().manual_seed(5)).tolist()
"""Longer than every window."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits(tmp_path: Path, name: str) -> None:
    """The config as it was written, with tensors that nobody needs and names that have changed since, gives the logits
    of transformers, the prompt whole and its end token by token.
    """
    published = PUBLISHED[name]
    theirs = published.save(tmp_path)
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([PROMPT])).logits[0]
    bound = BOUND * float(expected.abs().max())
    model = load_weights(
        tmp_path, torch.float32, torch.device("cpu"), build_kernels("cpu"), max_model_len=published.max_model_len
    )
    loop, sequence = PagedLoop(model, num_blocks=8), PagedSequence(PROMPT)
    first = loop.step([(sequence, 30)])[0]
    torch.testing.assert_close(first, expected[29], rtol=0, atol=bound)
    rest = torch.cat([loop.step([(sequence, 1)]) for _ in PROMPT[30:]])
    torch.testing.assert_close(rest, expected[30:], rtol=0, atol=bound)
