"""The families that can be run."""

from __future__ import annotations

from executor_svc.models.cohere import COHERE, COHERE2
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.exaone import EXAONE, EXAONE4
from executor_svc.models.family import Family
from executor_svc.models.gemma import GEMMA
from executor_svc.models.gemma2 import GEMMA2
from executor_svc.models.gemma3 import GEMMA3, GEMMA3_CONDITIONAL
from executor_svc.models.glm import GLM, GLM4
from executor_svc.models.gpt2 import GPT2
from executor_svc.models.gpt_neo import GPT_NEO
from executor_svc.models.gpt_neox import GPT_NEOX
from executor_svc.models.granite import GRANITE, GRANITE_HYBRID
from executor_svc.models.llama import INTERNLM3, LLAMA
from executor_svc.models.mistral import MINISTRAL, MISTRAL
from executor_svc.models.mixtral import MIXTRAL
from executor_svc.models.nemotron import NEMOTRON
from executor_svc.models.olmo2 import OLMO2
from executor_svc.models.olmo3 import OLMO3
from executor_svc.models.opt import OPT
from executor_svc.models.phi3 import PHI3
from executor_svc.models.qwen2 import QWEN2
from executor_svc.models.qwen3 import QWEN3
from executor_svc.models.qwen3_moe import QWEN3_MOE
from executor_svc.models.seeing import SEEING
from executor_svc.models.smollm3 import SMOLLM3
from executor_svc.models.stablelm import STABLELM
from executor_svc.models.starcoder2 import STARCODER2
from executor_svc.weights import ModelLoadError, UnsupportedModelError
from octavo.models.servable import why_not_served

FAMILIES = {
    family.architecture: family
    for family in (
        LLAMA,
        INTERNLM3,
        MISTRAL,
        MINISTRAL,
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
        OLMO3,
        GRANITE,
        GRANITE_HYBRID,
        SMOLLM3,
        GPT2,
        GPT_NEO,
        OPT,
        GPT_NEOX,
        COHERE,
        COHERE2,
        EXAONE,
        EXAONE4,
        GLM,
        GLM4,
        NEMOTRON,
        STABLELM,
        STARCODER2,
        *SEEING,
    )
}


_BY_MODEL_TYPE = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gemma3": GEMMA3_CONDITIONAL,
    "phi3": PHI3,
    "olmo2": OLMO2,
    "granite": GRANITE,
    "granitemoehybrid": GRANITE_HYBRID,
    "smollm3": SMOLLM3,
    "gpt2": GPT2,
    "gpt_neo": GPT_NEO,
    "opt": OPT,
    "gpt_neox": GPT_NEOX,
    "internlm3": INTERNLM3,
    "ministral": MINISTRAL,
    "olmo3": OLMO3,
    "cohere": COHERE,
    "cohere2": COHERE2,
    "exaone": EXAONE,
    "exaone4": EXAONE4,
    "glm": GLM,
    "glm4": GLM4,
    "nemotron": NEMOTRON,
    "stablelm": STABLELM,
    "starcoder2": STARCODER2,
}
_UNDER_ANOTHER_NAME = ("exaone", "internlm3")
"""Of what transformers saves as LlamaForCausalLM though names or fields are not Llama's."""


def architecture_of(fields: ConfigFields) -> str:
    """Return the architecture that config.json names, by its model_type where it has no `architectures`.

    Raises ModelLoadError where it names none, UnsupportedModelError where it is none that can be served.
    """
    reason = why_not_served(fields.path, {name: fields.get(name) for name in fields.names()})
    if reason is not None:
        raise UnsupportedModelError(f"{fields.path}: {reason}")
    architectures, model_type = fields.get("architectures"), fields.get("model_type")
    if model_type in _UNDER_ANOTHER_NAME:
        return _BY_MODEL_TYPE[model_type].architecture
    if isinstance(architectures, list) and architectures:
        return str(architectures[0])
    if isinstance(model_type, str) and model_type:
        family = _BY_MODEL_TYPE.get(model_type)
        return model_type if family is None else family.architecture
    raise ModelLoadError(f"{fields.path}: architectures is missing, and model_type: this is no causal language model")


def find_family(fields: ConfigFields) -> Family:
    """Return the family that config.json names. UnsupportedModelError lists the known ones where it is none of them."""
    family = FAMILIES.get(architecture_of(fields))
    if family is None:
        raise fields.refuse("architectures", ", ".join(FAMILIES))
    return family
