"""What config.json may say: defaults, older spellings, and refusals that name the field and what is supported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoConfig

from executor_svc.layers.rotary import LinearScaling, Llama3Scaling, LongRopeScaling, RotaryConfig, YarnScaling
from executor_svc.models import ModelConfig, ModelLoadError, UnsupportedModelError
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.registry import FAMILIES, find_family

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}
MISTRAL = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 4}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 48,
    "n_head": 4,
    "n_layer": 2,
    **dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"), "absent"),
}
GEMMA2 = {"architectures": ["Gemma2ForCausalLM"]}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"]}
GRANITE4 = {"architectures": ["GraniteMoeHybridForCausalLM"], "num_local_experts": 0}


def _read(**changes: Any) -> ModelConfig:
    fields = {name: value for name, value in (BASE | changes).items() if value != "absent"}
    wrapped = ConfigFields(Path("config.json"), fields)
    return find_family(wrapped).read_config(wrapped)


def _rope(**parameters: Any) -> Any:
    return _rotary(_read(rope_scaling=parameters)).scaling


def _rotary(config: ModelConfig) -> RotaryConfig:
    (rotary,) = config.rotaries
    return rotary


def test_defaults_are_those_of_transformers() -> None:
    """Fields that config.json leaves out mean what they mean to transformers."""
    config = _read()
    theirs = AutoConfig.for_model("llama", **{k: v for k, v in BASE.items() if k != "architectures"})
    assert config.num_kv_heads == theirs.num_key_value_heads == 4
    assert config.head_dim == theirs.head_dim == 16
    assert config.norm_eps == theirs.rms_norm_eps
    assert _rotary(config).theta == theirs.rope_parameters["rope_theta"]
    assert _rotary(config).scaling is None
    assert config.tie_word_embeddings is theirs.tie_word_embeddings is False
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (False, False, False)


def test_biases_by_family() -> None:
    """Llama's attention_bias is on all four projections, Qwen2's on three without asking, Mistral has none."""
    llama = _read(attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)
    qwen2 = _read(**QWEN2)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.mlp_bias) == (True, False, False)
    mistral = _read(**MISTRAL, sliding_window=None)
    assert (mistral.qkv_bias, mistral.output_bias, mistral.mlp_bias) == (False, False, False)


def test_rotary_spellings() -> None:
    """rope_parameters and rope_scaling, rope_type and type, theta inside or outside: all are read."""
    linear = {"factor": 4.0}
    for fields in (
        {"rope_scaling": {"type": "linear", **linear}},
        {"rope_scaling": {"rope_type": "linear", **linear}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, **linear}},
    ):
        assert _rotary(_read(**fields)).scaling == LinearScaling(4.0)
    assert _rotary(_read(rope_theta=5e5)).theta == 5e5
    assert _rotary(_read(rope_parameters={"rope_type": "default", "rope_theta": 5e5})).theta == 5e5
    assert _rotary(_read(rope_scaling=None)).scaling is None
    assert _rotary(_read(rope_scaling={"type": "default"})).scaling is None


def test_rotary_scalings() -> None:
    """Every scaling's fields arrive, with transformers' defaults for those left out."""
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert _rope(**llama3, original_max_position_embeddings=512) == Llama3Scaling(8.0, 1.0, 4.0, 512)
    assert _rope(**llama3) == Llama3Scaling(8.0, 1.0, 4.0, 2048)
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 512}
    assert _rope(**yarn, factor=4.0) == YarnScaling(4.0, 512, attention_factor=pytest.approx(1.1386294361))
    assert _rope(**yarn) == _rope(**yarn, factor=4.0)
    assert _rope(**yarn, factor=4.0, attention_factor=0.5).attention_factor == 0.5
    assert _rope(**yarn, factor=4.0, mscale=1.0, mscale_all_dim=1.0).attention_factor == 1.0
    assert _rope(**yarn, factor=0.5).attention_factor == 1.0
    tuned = _rope(**yarn, factor=4.0, beta_fast=16, beta_slow=2, truncate=False)
    assert (tuned.beta_fast, tuned.beta_slow, tuned.truncate) == (16.0, 2.0, False)


@pytest.mark.parametrize(
    "fields",
    [
        MISTRAL | {"sliding_window": None},
        MISTRAL | {"sliding_window": 2048},
        MISTRAL | {"sliding_window": "absent"},
        QWEN2 | {"sliding_window": 64, "use_sliding_window": False},
        QWEN2 | {"sliding_window": 2048, "use_sliding_window": True, "max_window_layers": 0},
        QWEN2 | {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2},
        QWEN2 | {"sliding_window": 64, "use_sliding_window": True, "layer_types": ["full_attention"] * 2},
    ],
)
def test_a_window_that_never_bites_is_accepted(fields: dict[str, Any]) -> None:
    """A sliding window that is off, on no layer, or as wide as the context is no window."""
    assert _read(**fields).max_position_embeddings == 2048


def test_windows_by_layer() -> None:
    """One window for all of Mistral's layers, one for those of Qwen's that come late or are named."""
    assert [layer.window for layer in _read(**MISTRAL, sliding_window=1024).layers] == [1024, 1024]
    assert [layer.window for layer in _read(**MISTRAL | {"max_position_embeddings": 8192}).layers] == [4096, 4096]
    on = QWEN2 | {"use_sliding_window": True, "sliding_window": 64}
    assert [layer.window for layer in _read(**on, max_window_layers=1).layers] == [0, 64]
    named = _read(**on, layer_types=["sliding_attention", "full_attention"])
    assert [layer.window for layer in named.layers] == [64, 0]
    assert (named.window, _read(**on, max_window_layers=0).window) == (0, 64)


def test_longrope() -> None:
    """Both sets of factors arrive; the scale follows from how far the context is stretched."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    for name in ("longrope", "su", "yarn"):
        read = _rope(type=name, **factors, original_max_position_embeddings=512)
        assert read == LongRopeScaling((1.0,) * 8, (2.0,) * 8, 512, pytest.approx(1.1055415967851334))
    assert _rope(type="longrope", **factors, factor=1.0).attention_factor == 1.0
    config = _read(rope_scaling={"type": "longrope", **factors, "original_max_position_embeddings": 512})
    assert (config.unstretched_length, config.max_position_embeddings) == (512, 2048)
    assert _read().unstretched_length == 2048
    with pytest.raises(ModelLoadError, match="long_factor has 7 entries, not 8"):
        _rope(type="longrope", short_factor=[1.0] * 8, long_factor=[1.0] * 7)


def test_heads_that_turn_in_part() -> None:
    """The factor is found inside and outside of the rotary settings, and under GPT-NeoX's name."""
    assert _rotary(_read(partial_rotary_factor=0.5)).rotary_dim == 8
    assert _rotary(_read(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.25})).rotary_dim == 4
    neox = {"architectures": ["GPTNeoXForCausalLM"]}
    assert _rotary(_read(**neox)).rotary_dim == 4
    assert _rotary(_read(**neox, rotary_pct=1.0, rotary_emb_base=50)) == RotaryConfig(16, 50.0)


def test_dynamic_scaling_begins_where_no_sequence_gets() -> None:
    """Within max_position_embeddings it scales nothing."""
    assert _rope(rope_type="dynamic", factor=2.0) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["BloomForCausalLM"]}, r"architectures \['BloomForCausalLM'\].*supported: Llama"),
        ({"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' is not supported; supported: silu"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; supported: silu"),
        (GPT2 | {"activation_function": "silu"}, "activation_function 'silu' is not supported; supported: gelu"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention True"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config .*gptq"),
        ({"rope_scaling": {"rope_type": "spiral"}}, r"rope_scaling\.rope_type 'spiral'.*default, linear"),
        ({"rope_parameters": {"full_attention": {}}}, r"rope_parameters\.full_attention .*one set"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window 0 is not supported; supported: null"),
        (
            QWEN2 | {"use_sliding_window": True, "layer_types": ["chunked_attention", "full_attention"]},
            "layer_types .*chunked_attention.*supported: full_attention, sliding_attention",
        ),
        (GEMMA2 | {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        (GEMMA3 | {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping 30.0"),
        (GRANITE4 | {"layer_types": ["attention", "mamba"]}, "layer_types .*recurrent state"),
        (
            {"architectures": ["GPTNeoForCausalLM"], "attention_types": [[["global", "local"], 2]]},
            "attention_types .*for each of 2 layers",
        ),
        (GRANITE4, "layer_types .*recurrent state"),
        (
            GRANITE4 | {"layer_types": ["attention"] * 2, "num_local_experts": 4},
            "num_local_experts 4 .*supported: none",
        ),
    ],
)
def test_what_is_not_supported_is_refused(fields: dict[str, Any], message: str) -> None:
    """The error names the field, its value and what is supported."""
    with pytest.raises(UnsupportedModelError, match=message):
        _read(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"vocab_size": 12.5}, r"vocab_size is 12\.5, not a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, not a whole number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, not a number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', not true or false"),
        ({"architectures": "absent"}, "architectures is missing, and model_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling\.factor is missing"),
        ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"num_attention_heads": 0}, "num_heads is 0"),
        ({"head_dim": 15}, "head_dim is 15 and 15 of it turn with the position: that must be even"),
        ({"partial_rotary_factor": 0.1}, "head_dim is 16 and 1 of it turn"),
        (
            QWEN2 | {"use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types is .* at least 2 entries",
        ),
        (GPT2 | {"n_head": "absent"}, "n_head is missing"),
    ],
)
def test_a_config_that_makes_no_sense_is_an_error(fields: dict[str, Any], message: str) -> None:
    """A missing field, a wrong kind of value or sizes that do not fit stop the load with the field's name."""
    with pytest.raises(ModelLoadError, match=message):
        _read(**fields)


def test_every_family_goes_by_its_architecture() -> None:
    """The registry finds each family under the name that it gives itself."""
    assert {name: family.architecture for name, family in FAMILIES.items()} == {name: name for name in FAMILIES}
    assert len(FAMILIES) == 41


NOT_THERE = {"Gemma3ForConditionalGeneration", "InternLM3ForCausalLM", "ExaoneForCausalLM"}
"""The defaults of the first are those of its parts; the others' code comes with their models."""


@pytest.mark.parametrize("architecture", [name for name in FAMILIES if name not in NOT_THERE])
def test_defaults_are_those_of_the_class(architecture: str) -> None:
    """Every default that a family names is that of transformers' config class."""
    theirs = getattr(transformers, architecture).config_class
    for name, value in FAMILIES[architecture].defaults.items():
        # transformers has one expert count under two names.
        assert getattr(theirs, name if hasattr(theirs, name) else name.replace("local_", "")) == value, name
