"""The rotary settings of a GGUF file, in the words of config.json."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from executor_svc.weights.gguf_metadata import GgufMetadata
from executor_svc.weights.gguf_names import ROTARY_FACTORS

_FREQS, _LONG, _SHORT = ROTARY_FACTORS
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
"""What every Llama 3.1 and later has; files keep only the factors that follow from it."""


def rope_parameters(metadata: GgufMetadata, head_dim: int, *, default_theta: float = 10000.0) -> dict[str, Any]:
    """Return `rope_parameters`: base, share of a head that turns, and scaling. UnsupportedModelError names a scaling
    that is not known.
    """
    dimensions = metadata.integer("rope.dimension_count", head_dim)
    if not 0 < dimensions <= head_dim or dimensions % 2:
        raise metadata.refuse(f"{metadata.name('rope.dimension_count')} {dimensions} of a head of {head_dim}")
    theta = metadata.number("rope.freq_base", default_theta)
    if theta <= 0:
        raise metadata.refuse(f"{metadata.name('rope.freq_base')} {theta}")
    partial = {} if dimensions == head_dim else {"partial_rotary_factor": _share(dimensions, head_dim)}
    return {"rope_theta": theta, **partial, **_scaling(metadata, theta, dimensions)}


def _share(dimensions: int, head_dim: int) -> float:
    """Return a share that, times head_dim and rounded down, is `dimensions` again, as whoever reads it computes."""
    share = dimensions / head_dim
    return share if int(head_dim * share) == dimensions else math.nextafter(share, 1.0)


def _scaling(metadata: GgufMetadata, theta: float, dimensions: int) -> dict[str, Any]:
    kind = metadata.text("rope.scaling.type", "linear")
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0))
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise metadata.refuse(f"rotary scaling {kind!r} is not supported; supported: none, linear, yarn, longrope")
    if factor <= 0:
        raise metadata.refuse(f"{metadata.name('rope.scaling.factor')} {factor}")
    if kind == "none":
        factor = 1.0
    for name, factors in metadata.factors.items():
        if len(factors) != dimensions // 2 or not all(value > 0 and math.isfinite(value) for value in factors):
            raise metadata.refuse(f"tensor {name} has no {dimensions // 2} positive factors, one for each rotary pair")
    if _LONG in metadata.factors or _SHORT in metadata.factors:
        return _longrope(metadata)
    if _FREQS in metadata.factors:
        if kind not in ("none", "linear") or factor != 1.0:
            raise metadata.refuse(f"rotary scaling {kind!r} together with {_FREQS}")
        return _frequency_factors(metadata.factors[_FREQS], theta, dimensions)
    if kind == "longrope":
        raise metadata.refuse(f"rotary scaling 'longrope' without {_LONG}")
    if kind == "yarn":
        return _yarn(metadata, factor)
    return {"rope_type": "linear", "factor": factor} if factor != 1.0 else {"rope_type": "default"}


def _yarn(metadata: GgufMetadata, factor: float) -> dict[str, Any]:
    given = metadata.number("rope.scaling.attn_factor", metadata.number("rope.scaling.yarn_attn_factor", 1.0))
    fields = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.count("rope.scaling.original_context_length"),
        "attention_factor": given * (0.1 * math.log(factor) + 1.0),
    }
    for name in ("beta_fast", "beta_slow"):
        if metadata.has(f"rope.scaling.yarn_{name}"):
            fields[name] = metadata.number(f"rope.scaling.yarn_{name}")
    return fields


def _longrope(metadata: GgufMetadata) -> dict[str, Any]:
    missing = [name for name in (_LONG, _SHORT) if name not in metadata.factors]
    if missing:
        raise metadata.refuse(f"there is no tensor {missing[0]} beside the other one")
    fields = {
        "rope_type": "longrope",
        "long_factor": metadata.factors[_LONG],
        "short_factor": metadata.factors[_SHORT],
        "original_max_position_embeddings": metadata.count("rope.scaling.original_context_length"),
    }
    if metadata.has("rope.scaling.attn_factor"):
        fields["attention_factor"] = metadata.number("rope.scaling.attn_factor")
    return fields


def _frequency_factors(factors: Sequence[float], theta: float, dimensions: int) -> dict[str, Any]:
    """Return the Llama-3 scaling where that is what made the factors, as in every file of a published model."""
    largest = max(factors)
    expected = llama3_factors(largest, theta, dimensions)
    if all(math.isclose(found, value, rel_tol=1e-4) for found, value in zip(factors, expected, strict=True)):
        return {
            "rope_type": "llama3",
            # Stored in float32 they are hardly ever whole; the factor that they were made with is.
            "factor": float(round(largest)) if math.isclose(largest, round(largest), rel_tol=1e-5) else largest,
            "low_freq_factor": _LLAMA3_LOW,
            "high_freq_factor": _LLAMA3_HIGH,
            "original_max_position_embeddings": _LLAMA3_CONTEXT,
        }
    return {"rope_type": "frequency_factors", "factors": list(factors)}


def llama3_factors(factor: float, theta: float, dimensions: int) -> list[float]:
    """Return the divisors of the frequencies that the scaling of Llama 3.1 comes to, one for each rotary pair."""
    divisors = []
    for pair in range(dimensions // 2):
        turns = _LLAMA3_CONTEXT * theta ** (-2 * pair / dimensions) / (2 * math.pi)
        kept = min(max((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0), 1.0)
        divisors.append(1.0 / ((1.0 - kept) / factor + kept))
    return divisors
