"""Penalties: the arithmetic, its place in transformers' terms, and the sets against each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from executor_svc.kernels import KernelSet
from executor_svc.kernels.penalties import reference


def _columns(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _sequences(*sequences: tuple[list[int], list[int]], rest: int = 0) -> dict[str, Any]:
    """Rows of prompts and outputs, in slots of the opposite order; `rest` lies behind each sequence."""
    longest = max(len(prompt) + len(output) for prompt, output in sequences)
    tokens = torch.full((len(sequences) + 2, longest + 3), rest, dtype=torch.int32)
    slots = torch.arange(len(sequences), 0, -1)
    for slot, (prompt, output) in zip(slots.tolist(), sequences, strict=True):
        tokens[slot, : len(prompt) + len(output)] = torch.tensor([*prompt, *output], dtype=torch.int32)
    return {
        "tokens": tokens,
        "slots": slots,
        "num_prompt_tokens": torch.tensor([len(prompt) for prompt, _ in sequences]),
        "num_tokens": torch.tensor([len(prompt) + len(output) for prompt, output in sequences]),
    }


def test_each_penalty_by_hand(any_set: KernelSet) -> None:
    """Repetition divides positive logits and multiplies others; presence counts once, frequency each time. Tokens of
    the prompt alone are repetition's only.
    """
    logits = torch.tensor([[2.0, -2.0, 0.0, 4.0], [2.0, -2.0, 1.0, 4.0], [1.0, 1.0, 1.0, 1.0]])
    any_set.apply_penalties(
        logits,
        **_sequences(([0, 0, 2], [1, 2, 2]), ([1], [3, 3, 3]), ([], [3, 3])),
        repetition=_columns(2.0, 1.0, 0.5),
        presence=_columns(0.5, 0.0, 0.25),
        frequency=_columns(0.0, 0.25, -1.0),
    )
    expected = [[1.0, -4.5, -0.5, 4.0], [2.0, -2.0, 1.0, 3.25], [1.0, 1.0, 1.0, 3.75]]
    assert logits.tolist() == expected


def test_repetition_penalty_as_in_transformers(any_set: KernelSet) -> None:
    """With prompt and output together the result is bit-equal to transformers' own."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 97, generator=generator)
    history = torch.randint(0, 97, (3, 40), generator=generator)
    expected = RepetitionPenaltyLogitsProcessor(penalty=1.3)(history, logits.clone())
    any_set.apply_penalties(
        logits,
        **_sequences(*((row[:15], row[15:]) for row in history.tolist())),
        repetition=torch.full((3,), 1.3),
        presence=torch.zeros(3),
        frequency=torch.zeros(3),
    )
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("tiny", [1e-45, 1e-40, 1e-38])
def test_the_smallest_repetition_leaves_logits_finite(any_set: KernelSet, tiny: float) -> None:
    """Any repetition above 0 is allowed: what it makes of a logit ends at the largest float and is never infinite."""
    logits = torch.tensor([[30.0, -30.0, 0.0, 1.0]])
    any_set.apply_penalties(
        logits,
        **_sequences(([], [0, 1, 2])),
        repetition=_columns(tiny),
        presence=_columns(-2.0),
        frequency=_columns(-2.0),
    )
    assert logits.isfinite().all()
    assert logits.argmax() == 0
    assert logits[0, 3] == 1.0


def test_nothing_seen(any_set: KernelSet) -> None:
    """Without tokens nothing changes, however strong the penalties, and none is read from behind the sequence."""
    logits = torch.randn(2, 5)
    before = logits.clone()
    strong = torch.full((2,), 2.0)
    any_set.apply_penalties(
        logits, **_sequences(([], []), ([], []), rest=3), repetition=strong, presence=strong, frequency=strong
    )
    assert torch.equal(logits, before)


@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 1), (3, 63), (7, 257), (40, 3000)])
def test_compiled_equals_reference(compiled: KernelSet, num_rows: int, vocab: int) -> None:
    """On random logits (some masked), sequences and penalties of either sign, some off, the sets agree bit for bit, one
    call after the other.
    """
    generator = torch.Generator().manual_seed(num_rows)
    for _ in range(2):
        logits = torch.randn(num_rows, vocab, generator=generator) * 4
        logits[0, 0] = float("-inf")
        seen = torch.randint(0, vocab, (num_rows, 300), generator=generator).tolist()
        cuts = torch.randint(0, 300, (num_rows, 2), generator=generator).sort(dim=1).values.tolist()
        sequences = [(row[:first], row[first:second]) for row, (first, second) in zip(seen, cuts, strict=True)]
        arguments = {
            **_sequences(*sequences, rest=vocab - 1),
            "repetition": torch.rand(num_rows, generator=generator) * 1.9 + 0.1,
            "presence": torch.rand(num_rows, generator=generator) * 4 - 2,
            "frequency": torch.rand(num_rows, generator=generator) * 4 - 2,
        }
        arguments["repetition"][::3] = 1
        arguments["presence"][::2] = 0
        arguments["frequency"][::2] = 0
        by_reference, by_compiled = logits.clone(), logits.clone()
        reference.apply_penalties(by_reference, **arguments)
        compiled.apply_penalties(by_compiled, **arguments)
        assert torch.equal(by_reference, by_compiled)
