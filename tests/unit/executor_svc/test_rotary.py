"""Rotary angles against transformers' own, in every scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from executor_svc.layers.rotary import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    RotaryAngles,
    RotaryConfig,
    RotaryScaling,
    YarnScaling,
    inverse_frequencies,
)

ORIGINAL = 512
CASES: dict[str, tuple[RotaryScaling | None, dict[str, Any]]] = {
    "plain": (None, {"rope_type": "default"}),
    "linear": (LinearScaling(4.0), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        Llama3Scaling(8.0, 1.0, 4.0, ORIGINAL),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
    "yarn": (
        YarnScaling(4.0, ORIGINAL, attention_factor=1.138629436111989),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    ),
    "yarn, every setting": (
        YarnScaling(3.0, ORIGINAL, attention_factor=0.75, beta_fast=24.0, beta_slow=2.0, truncate=False),
        {
            "rope_type": "yarn",
            "factor": 3.0,
            "original_max_position_embeddings": ORIGINAL,
            "attention_factor": 0.75,
            "beta_fast": 24.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
    ),
}


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [8, 20, 64, 128])
@pytest.mark.parametrize("case", list(CASES))
def test_as_transformers(case: str, head_dim: int, theta: float) -> None:
    """Frequencies, cosines and sines are bit-equal to transformers', at every position."""
    scaling, parameters = CASES[case]
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=int(ORIGINAL * parameters.get("factor", 1.0)),
        rope_parameters={**parameters, "rope_theta": theta},
    )
    theirs = LlamaRotaryEmbedding(config)
    ours = RotaryAngles(RotaryConfig(head_dim, theta, scaling), torch.device("cpu"))
    assert torch.equal(ours.inverse_frequencies, theirs.inv_freq)
    positions = torch.tensor([0, 1, 15, 16, ORIGINAL - 1, ORIGINAL, 4 * ORIGINAL - 1])
    cos, sin = theirs(torch.zeros(1), positions[None])
    for mine, full in zip(ours(positions), (cos[0], sin[0]), strict=True):
        assert torch.equal(mine, full[:, : head_dim // 2])


def test_frequency_factors_divide() -> None:
    """The factors of a GGUF file divide the frequencies one by one: with those of Llama 3 they give its scaling."""
    plain = inverse_frequencies(RotaryConfig(64, 500000.0))
    scaled = inverse_frequencies(RotaryConfig(64, 500000.0, CASES["llama3"][0]))
    factors = FrequencyFactors(tuple((plain / scaled).tolist()))
    torch.testing.assert_close(inverse_frequencies(RotaryConfig(64, 500000.0, factors)), scaled, rtol=1e-6, atol=0)
    assert not torch.allclose(plain, scaled)
