"""Folders whose config.json, or what lies beside it, says that they cannot be served: refused wherever they are met."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from factories import make_llama

from executor_svc.inspection.model_report import Question, report_on
from executor_svc.models import UnsupportedModelError
from executor_svc.models.loader import read_served_config
from octavo.models import ModelError
from octavo.models.prepare import prepare

_ADVICE = "serve the model's 16-bit version"
QUANTIZED = ("awq", "gptq", "fp8", "bitsandbytes", "compressed-tensors", "mxfp4")
NO_CAUSAL_LM = {
    "LlamaForSequenceClassification": "it classifies texts",
    "Qwen2ForTokenClassification": "it classifies tokens",
    "BertForMaskedLM": "it fills in masked tokens",
    "Qwen2ForRewardModel": "it scores texts",
    "MistralModel": "names like it are of layers without a head",
    "ViTForImageClassification": "it classifies images",
    "StableDiffusionPipeline": "its name is not that of one",
}


def _change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")


def _refused_everywhere(folder: Path, *words: str) -> None:
    """Refused by prepare, by inspect and by what the executor reads first (of a model that an older prepare took)."""
    with pytest.raises(ModelError) as at_prepare:
        prepare(str(folder))
    config = next(each for each in report_on(Question(str(folder)))["checks"] if each["check"] == "config")
    assert config["ok"] is False
    with pytest.raises(UnsupportedModelError) as at_load:
        read_served_config(folder)
    for message in (str(at_prepare.value), config["text"], str(at_load.value)):
        assert str(folder) in message
        assert all(word in message for word in words), message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound model. Its head is tied: a model without one would load."""
    return make_llama(tmp_path, tie=True)


@pytest.mark.parametrize("method", QUANTIZED)
def test_quantized_weights(folder: Path, method: str) -> None:
    """The field, the method and what to do are named."""
    _change(folder, quantization_config={"quant_method": method, "bits": 4})
    _refused_everywhere(folder, "quantization_config", repr(method), _ADVICE, "GGUF")


def test_quantized_text_part(folder: Path) -> None:
    """So is a field inside the text part of a model that sees."""
    _change(folder, text_config={"compression_config": {"quant_method": "compressed-tensors"}})
    _refused_everywhere(folder, "text_config.compression_config", _ADVICE)


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json", "hf_quant_config.json"])
def test_a_file_of_a_quantizer(folder: Path, name: str) -> None:
    """Older tools leave config.json as it was and write a file of their own."""
    (folder / name).write_text("{}", encoding="utf-8")
    _refused_everywhere(folder, name, _ADVICE)


@pytest.mark.parametrize("name", list(NO_CAUSAL_LM))
def test_no_causal_language_model(folder: Path, name: str) -> None:
    """It is refused by its name: with a tied head its tensors would do."""
    _change(folder, architectures=[name])
    _refused_everywhere(folder, name, NO_CAUSAL_LM[name])


def test_an_encoder_with_a_decoder(folder: Path) -> None:
    """Its decoder reads what lies in no block."""
    _change(folder, architectures=["T5ForConditionalGeneration"], model_type="t5", is_encoder_decoder=True)
    _refused_everywhere(folder, "is_encoder_decoder", "an encoder and a decoder")


def test_a_family_by_its_model_type_alone(folder: Path) -> None:
    """Without `architectures` a model of transformers' own is not refused for that."""
    _change(folder, architectures=None, model_type="olmo")
    report = report_on(Question(str(folder)))
    assert report["checks"][1]["ok"], report["checks"]
