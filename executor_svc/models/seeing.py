"""Models that see, of whose text part, which is a model of a family, text alone is asked: images are not taken."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from executor_svc.models.config import ModelConfig
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.family import LLAMA_NAMES, Family
from executor_svc.models.llama import LLAMA
from executor_svc.models.mistral import MISTRAL
from executor_svc.models.naming import Names, find_prefix
from executor_svc.models.qwen2 import QWEN2
from executor_svc.models.qwen3 import QWEN3
from executor_svc.models.spec import DecoderSpec

_LAYERS = {"num_hidden_layers": 32, "num_attention_heads": 32}
_SIZES: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_LAYERS, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008},
    "mistral": {**_LAYERS, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336},
}
"""Those of transformers' classes: older files leave out what is not other than these."""
_TEXT_FAMILIES = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen2_vl": QWEN2,
    "qwen2_vl_text": QWEN2,
    "qwen2_5_vl": QWEN2,
    "qwen2_5_vl_text": QWEN2,
    "qwen3": QWEN3,
    "qwen3_vl_text": QWEN3,
}
"""By the text part's model_type. All name their tensors as Llama does."""
_PREFIXES = ("language_model.model", "model.language_model", "model.text_model", "model")


@dataclass(frozen=True)
class SeeingFamily(Family):
    """One architecture."""

    def name_tensors(self, config: ModelConfig, found: Collection[str]) -> DecoderSpec:
        """See Family. The head is the embedding where the file has none of its own, whatever its config leaves out."""
        names = _names(found)
        has_head = f"{names.head}.weight" in found
        return super().name_tensors(
            replace(config, tie_word_embeddings=config.tie_word_embeddings and not has_head), found
        )


def _reader(architecture: str, text_type: str) -> Callable[[ConfigFields], ModelConfig]:
    """Return what reads the text part, which older files of Qwen have beside the other fields."""

    def read(fields: ConfigFields) -> ModelConfig:
        text = fields.part("text_config") if fields.has("text_config") else fields
        model_type = text.get("model_type", text_type)
        family = _TEXT_FAMILIES.get(model_type) if isinstance(model_type, str) else None
        if family is None:
            raise text.refuse("model_type", ", ".join(_TEXT_FAMILIES))
        defaults = {**_SIZES.get(model_type, {}), **family.defaults, "tie_word_embeddings": True}
        text = text.within(defaults, family.aliases)
        tied = fields.flag("tie_word_embeddings", text.flag("tie_word_embeddings"))
        return replace(family.read_fields(text), architecture=architecture, tie_word_embeddings=tied)

    return read


def _names(found: Collection[str]) -> Names:
    base = find_prefix(found, _PREFIXES, ".embed_tokens.weight")
    head = "language_model.lm_head" if base.startswith("language_model.") else "lm_head"
    own = (
        (f"{base}.", f"{head}.")
        if base != "model"
        else ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")
    )
    return replace(
        LLAMA_NAMES,
        embedding=f"{base}.embed_tokens",
        layers=f"{base}.layers",
        final_norm=f"{base}.norm",
        head=head,
        ignored_parts=tuple(name for name in found if not name.startswith(own)),
    )


SEEING = tuple(
    SeeingFamily(architecture, _reader(architecture, text_type), names=_names)
    for architecture, text_type in (
        ("Mistral3ForConditionalGeneration", "mistral"),
        ("LlavaForConditionalGeneration", "llama"),
        ("LlavaNextForConditionalGeneration", "llama"),
        ("LlavaOnevisionForConditionalGeneration", "qwen2"),
        ("Idefics3ForConditionalGeneration", "llama"),
        ("SmolVLMForConditionalGeneration", "llama"),
        ("InternVLForConditionalGeneration", "qwen2"),
        ("Qwen2VLForConditionalGeneration", "qwen2_vl"),
        ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"),
        ("Qwen3VLForConditionalGeneration", "qwen3_vl_text"),
    )
)
