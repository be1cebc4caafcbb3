"""The families that can be run."""

from __future__ import annotations

from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.llama import LLAMA
from executor_svc.models.mistral import MISTRAL
from executor_svc.models.qwen2 import QWEN2
from executor_svc.weights import ModelLoadError

FAMILIES = {family.architecture: family for family in (LLAMA, QWEN2, MISTRAL)}


def find_family(fields: ConfigFields) -> Family:
    """Return the family that config.json names. UnsupportedModelError lists the known ones where it is none of them."""
    architectures = fields.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ModelLoadError(f"{fields.path}: architectures is missing: this is no causal language model")
    family = FAMILIES.get(architectures[0])
    if family is None:
        raise fields.refuse("architectures", ", ".join(FAMILIES))
    return family
