"""Whether a folder's config.json describes a model that can be served at all, told before a weight is read.

Whether Octavo has its layers is for the executor to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_QUANTIZATION_FIELDS = ("quantization_config", "compression_config")
_QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""What tools write beside a config.json that does not say it (AutoGPTQ, AutoAWQ, ModelOpt)."""
_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "LMHead", "BertGenerationDecoder")
"""How the names of architectures end that give the next token."""
_OTHERS = {
    "ForSequenceClassification": "it classifies texts",
    "ForTokenClassification": "it classifies tokens",
    "ForQuestionAnswering": "it marks answers in a text",
    "ForMultipleChoice": "it ranks answers",
    "ForNextSentencePrediction": "it compares sentences",
    "ForMaskedLM": "it fills in masked tokens, and reads ahead to do so",
    "ForPreTraining": "it has the heads of its training",
    "ForImageClassification": "it classifies images",
    "RewardModel": "it scores texts",
    "Model": "names like it are of layers without a head that gives tokens, as embedding models are",
}


def why_not_served(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return why a folder's model cannot be served, the field named, and what to do; None where nothing tells."""
    return _quantized(folder, config) or _no_causal_lm(config)


def _quantized(folder: Path, config: Mapping[str, Any]) -> str | None:
    advice = (
        "its weights are quantized in a format that Octavo does not read: serve the model's 16-bit version "
        "(safetensors in bfloat16 or float16), or a GGUF file of it"
    )
    text = config.get("text_config")
    for prefix, fields in (("", config), ("text_config.", text)):
        for name in _QUANTIZATION_FIELDS:
            if isinstance(fields, Mapping) and (value := fields.get(name)):
                method = value.get("quant_method") if isinstance(value, Mapping) else value
                return f"{prefix}{name} (quant_method {method!r}): {advice}"
    found = [name for name in _QUANTIZATION_FILES if (folder / name).is_file()]
    return f"{found[0]} lies beside it: {advice}" if found else None


def _no_causal_lm(config: Mapping[str, Any]) -> str | None:
    architectures = config.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if config.get("is_encoder_decoder") is True:
        return f"is_encoder_decoder is true: {name or 'this'} is an encoder and a decoder; Octavo serves decoders alone"
    if not name or name.endswith(_GENERATING):
        return None
    reason = next((why for end, why in _OTHERS.items() if name.endswith(end)), "its name is not that of one")
    return (
        f"architectures {name!r} is no causal language model: {reason}; Octavo serves models that give the next token, "
        "whose names end in ForCausalLM or LMHeadModel"
    )
