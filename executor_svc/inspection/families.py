"""Families and formats, from the registries that loading itself uses."""

from __future__ import annotations

from typing import Any

from executor_svc.models.registry import FAMILIES
from executor_svc.weights.gguf_config import ARCHITECTURES
from executor_svc.weights.gguf_types import ELEMENT_TYPES
from executor_svc.weights.safetensors_file import FLOAT_TYPES


def supported() -> dict[str, Any]:
    """Return the families, each with GGUF's names for it, and the formats, each with its element types."""
    by_family: dict[str, list[str]] = {name: [] for name in FAMILIES}
    for name, architecture in ARCHITECTURES.items():
        for family in architecture.families:
            by_family.setdefault(family, []).append(name)
    return {
        "families": [{"architecture": name, "gguf": by_family[name]} for name in FAMILIES],
        "formats": [
            {"format": "safetensors", "files": "a folder: config.json, one file or shards", "types": [*FLOAT_TYPES]},
            {
                "format": "GGUF",
                "files": "one file, or all its parts",
                "types": [kind.name for kind in ELEMENT_TYPES.values()],
            },
            {
                "format": "PyTorch",
                "files": "a folder: pytorch_model.bin, only with `octavo prepare --allow-pickle`",
                "types": [*FLOAT_TYPES],
            },
        ],
    }
