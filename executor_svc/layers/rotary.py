"""Rotary angles: which frequency each pair of a head turns at, plain and with the scalings that stretch a model's
context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): every frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """The scaling of Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between.

    A pair is kept where it turns more than `high_freq_factor` times in `original_max_position_embeddings` tokens,
    scaled where it turns less than `low_freq_factor` times.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): a ramp by pair index from kept to divided by `factor`.

    The ramp lies between the pairs that turn `beta_fast` and `beta_slow` times in `original_max_position_embeddings`
    tokens, rounded outwards to whole pairs if `truncate`. Cosines and sines are multiplied by `attention_factor`.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024), as Phi-3 has it: one divisor for each frequency, rotary_dim / 2 of them in a set.

    The short set is for sequences of at most `original_max_position_embeddings` tokens, the long set for others. Keys
    in KV memory are turned already, so one set serves all sequences: the long one if any may get longer. Cosines and
    sines are multiplied by `attention_factor` under both.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float


@dataclass(frozen=True)
class FrequencyFactors:
    """One divisor for each frequency, rotary_dim / 2 of them."""

    factors: tuple[float, ...]


RotaryScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | FrequencyFactors


@dataclass(frozen=True)
class RotaryConfig:
    """Pair i of rotary_dim / 2 turns by position * theta ** (-2 i / rotary_dim), scaled."""

    rotary_dim: int
    """How many elements of a head turn, from the first on."""
    theta: float
    scaling: RotaryScaling | None = None

    @property
    def unstretched_length(self) -> int | None:
        """The longest sequence under LongRoPE's short factors; None where nothing depends on the longest."""
        scaling = self.scaling
        return scaling.original_max_position_embeddings if isinstance(scaling, LongRopeScaling) else None


class RotaryAngles:
    """Cosines and sines by position. They are computed, not looked up: once a step costs less than a table's memory."""

    def __init__(self, config: RotaryConfig, device: torch.device, longest: int = 0) -> None:
        """`longest`: tokens that a sequence may get."""
        scaling = config.scaling
        self.inverse_frequencies = inverse_frequencies(config, longest).to(device)
        """float32 [rotary_dim / 2]."""
        self._attention_factor = 1.0
        if isinstance(scaling, YarnScaling | LongRopeScaling):
            self._attention_factor = scaling.attention_factor

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Give cosines and sines, float32 [T, rotary_dim / 2] each, of positions int64 [T]."""
        angles = positions[:, None].float() * self.inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._attention_factor != 1.0:
            cos *= self._attention_factor
            sin *= self._attention_factor
        return cos, sin


def inverse_frequencies(config: RotaryConfig, longest: int = 0) -> Tensor:
    """Give the angle that each pair turns by per position, float32 [rotary_dim / 2]. `longest`: see RotaryAngles.

    A last bit of difference grows with the position, so the operations come in the order that the models' own code has.
    """
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    powers = config.theta**exponents
    plain = 1.0 / powers
    match config.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case FrequencyFactors(factors):
            return plain / torch.tensor(factors, dtype=torch.float32)
        case LongRopeScaling() as scaling:
            is_long = longest > scaling.original_max_position_embeddings
            divisors = scaling.long_factor if is_long else scaling.short_factor
            return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * powers)
        case Llama3Scaling() as scaling:
            wavelengths = 2 * math.pi / plain
            turns = scaling.original_max_position_embeddings / wavelengths
            kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            kept = kept.clamp(0, 1)
            return (1 - kept) * plain / scaling.factor + kept * plain
        case YarnScaling() as scaling:
            kept = _yarn_kept(scaling, config)
            return 1.0 / (scaling.factor * powers) * (1 - kept) + plain * kept


def _yarn_kept(scaling: YarnScaling, config: RotaryConfig) -> Tensor:
    """Give the share, 0 to 1, by which each pair keeps its frequency."""

    def pair_that_turns(times: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (2 * math.pi * times)
        return config.rotary_dim * math.log(wavelength) / (2 * math.log(config.theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The upper bound counts dimensions, not pairs: the models were trained so.
    first, last = max(first, 0), min(last, config.rotary_dim - 1)
    pairs = torch.arange(config.rotary_dim // 2, dtype=torch.float32)
    scaled = (pairs - first) / (last - first if last != first else 0.001)
    return 1 - scaled.clamp(0, 1)
