"""Which GGUF files can be served: told before one is hashed, and before one is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from octavo.models.gguf_file import TensorEntry

READABLE_ARCHITECTURES = (
    "gemma",
    "gemma2",
    "gemma3",
    "gpt2",
    "gptneox",
    "granite",
    "llama",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3moe",
    "smollm3",
)
"""Values of general.architecture."""
READABLE_TYPES = {
    0: "F32",
    1: "F16",
    30: "BF16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    20: "IQ4_NL",
    23: "IQ4_XS",
}
"""Element types by their numbers."""


def why_not_read(metadata: Mapping[str, Any], entries: Iterable[TensorEntry]) -> str | None:
    """Return why a file is not read: its architecture, or the type of a tensor, with what is; None where it is."""
    name = metadata.get("general.architecture")
    if name not in READABLE_ARCHITECTURES:
        return f"architecture {name!r} is not supported; supported: {', '.join(READABLE_ARCHITECTURES)}"
    for entry in entries:
        if entry.ggml_type not in READABLE_TYPES:
            found, known = _name_of(entry.ggml_type), ", ".join(READABLE_TYPES.values())
            return (
                f"tensor {entry.name} is {found}; supported: {known}: take a file of this model in one of these types"
            )
    return None


def _name_of(number: int) -> str:
    """Return what the `gguf` package calls an element type that is not read."""
    import gguf

    try:
        return gguf.GGMLQuantizationType(number).name
    except ValueError:
        return f"type {number}"
