"""Configs with anything in any field: a model is described, or the error names the file; and never for long."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
from gguf_families import GGUF_FAMILIES
from model_variations import RARER, SEEING, VARIATIONS, Variation

from executor_svc.models import ModelLoadError
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.registry import FAMILIES, find_family
from executor_svc.weights import open_checkpoint
from executor_svc.weights.gguf_config import ARCHITECTURES
from executor_svc.weights.gguf_metadata import GgufMetadata
from octavo.models.gguf_file import read_metadata

ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    7,
    (1 << 31) - 1,
    1 << 70,
    10**400,
    -0.5,
    0.5,
    4.0,
    1e-300,
    1e308,
    math.nan,
    math.inf,
    "",
    "x",
    [],
    [1],
    [[], {}],
    [1.0] * 6,
    {},
    {"a": 1},
    {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 1},
    {"rope_type": "longrope", "short_factor": [0.0] * 6, "long_factor": [-1.0] * 6},
    {"rope_type": "llama3", "factor": 2, "low_freq_factor": 1, "high_freq_factor": 1},
    {"rope_type": "frequency_factors", "factors": [0.0] * 6},
)
_PATH = Path("folder/config.json")


def _config(variation: Variation) -> dict[str, Any]:
    """What transformers would save."""
    fields = {**variation.sizes, **variation.fields}
    if variation.config == "Gemma3Config":
        fields = {"text_config": fields}
    config: dict[str, Any] = getattr(transformers, variation.config)(**fields).to_dict()
    names = {"Gemma3TextConfig": "Gemma3ForCausalLM", "GPT2Config": "GPT2LMHeadModel"}
    names |= {config: config.replace("Config", "ForConditionalGeneration") for config in SEEING}
    name = names.get(variation.config, variation.config.replace("Config", "ForCausalLM"))
    return config | {"architectures": [name]}


def _changed(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the config with each field, and each field of an object in it, changed to each of the odd values."""
    for key, value in config.items():
        for odd in ODD:
            yield {**config, key: odd}
        if isinstance(value, Mapping) and not key.startswith("vision"):
            for inner in _changed(value):
                yield {**config, key: inner}


@pytest.mark.parametrize(
    "variation",
    [
        *{each.config: each for each in VARIATIONS}.values(),
        *(pytest.param(each, marks=pytest.mark.full) for each in {each.config: each for each in RARER}.values()),
    ],
    ids=lambda variation: variation.config,
)
def test_any_value_in_any_field(variation: Variation) -> None:
    """Every one ends in a description, tensors named, or in an error that names config.json."""
    older = dict.fromkeys(("rope_scaling", "rope_theta", "partial_rotary_factor", "sliding_window_pattern"))
    config = {**older, **_config(variation)}
    assert config["architectures"][0] in FAMILIES

    def describe(changed: Mapping[str, Any]) -> None:
        fields = ConfigFields(_PATH, changed)
        family = find_family(fields)
        family.name_tensors(family.read_config(fields), ()).tensors()

    refusals = [_refusal(lambda changed=each: describe(changed)) for each in _changed(config)]  # type: ignore[misc]
    assert sum(refusal is not None for refusal in refusals) > 100
    assert all(str(_PATH) in refusal for refusal in refusals if refusal is not None)


@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma 3", "phi 3 longrope", "smollm 3", "gpt 2", "gpt neox"])
def test_any_value_of_any_key(tmp_path: Path, name: str) -> None:
    """So does every key of a GGUF file's metadata."""
    family = GGUF_FAMILIES[name]
    path = family.write(family.make(tmp_path / "folder"), tmp_path / "model.gguf")
    shapes, metadata = open_checkpoint(path).shapes, read_metadata(path)
    own = {key: value for key, value in metadata.items() if not key.startswith("tokenizer.")}
    factors = {"rope_factors_long.weight": [1.0] * 8, "rope_factors_short.weight": [1.0] * 8}
    architecture = ARCHITECTURES[str(own.pop("general.architecture"))]

    def describe(changed: Mapping[str, Any]) -> None:
        named = {**changed, "general.architecture": family.architecture}
        config = architecture.read(GgufMetadata(_PATH, named, shapes, factors if "longrope" in name else {}))
        fields = ConfigFields(_PATH, config)
        find_family(fields).read_config(fields)

    refusals = [_refusal(lambda changed=each: describe(changed)) for each in _changed(own)]  # type: ignore[misc]
    assert sum(refusal is not None for refusal in refusals) > 50
    assert all(str(_PATH) in refusal for refusal in refusals if refusal is not None)


def _refusal(read: Callable[[], None]) -> str | None:
    """Return what a config is refused with; None where it is read."""
    try:
        read()
    except ModelLoadError as error:
        return str(error)
    return None
