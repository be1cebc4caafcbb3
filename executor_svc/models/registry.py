"""The families that can be run."""

from __future__ import annotations

from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.gemma import GEMMA
from executor_svc.models.gemma2 import GEMMA2
from executor_svc.models.gemma3 import GEMMA3, GEMMA3_CONDITIONAL
from executor_svc.models.gpt2 import GPT2
from executor_svc.models.gpt_neox import GPT_NEOX
from executor_svc.models.granite import GRANITE
from executor_svc.models.llama import LLAMA
from executor_svc.models.mistral import MISTRAL
from executor_svc.models.mixtral import MIXTRAL
from executor_svc.models.olmo2 import OLMO2
from executor_svc.models.opt import OPT
from executor_svc.models.phi3 import PHI3
from executor_svc.models.qwen2 import QWEN2
from executor_svc.models.qwen3 import QWEN3
from executor_svc.models.qwen3_moe import QWEN3_MOE
from executor_svc.models.smollm3 import SMOLLM3
from executor_svc.weights import ModelLoadError

FAMILIES = {
    family.architecture: family
    for family in (
        LLAMA,
        MISTRAL,
        MIXTRAL,
        QWEN2,
        QWEN3,
        QWEN3_MOE,
        GEMMA,
        GEMMA2,
        GEMMA3,
        GEMMA3_CONDITIONAL,
        PHI3,
        OLMO2,
        GRANITE,
        SMOLLM3,
        GPT2,
        OPT,
        GPT_NEOX,
    )
}


def architecture_of(fields: ConfigFields) -> str:
    """Return the architecture that config.json names. Raises ModelLoadError where it names none."""
    architectures = fields.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ModelLoadError(f"{fields.path}: architectures is missing: this is no causal language model")
    return str(architectures[0])


def find_family(fields: ConfigFields) -> Family:
    """Return the family that config.json names. UnsupportedModelError lists the known ones where it is none of them."""
    family = FAMILIES.get(architecture_of(fields))
    if family is None:
        raise fields.refuse("architectures", ", ".join(FAMILIES))
    return family
