"""Llama 2, 3 and all that share its shape (SmolLM 2 among them)."""

from __future__ import annotations

from executor_svc.models.config import ModelConfig
from executor_svc.models.config_fields import ConfigFields, read_rotary
from executor_svc.models.family import Family
from executor_svc.models.spec import DecoderSpec, LayerSpec, LinearSpec
from executor_svc.weights import ModelLoadError


def read_llama_like(fields: ConfigFields, architecture: str, *, qkv_bias: bool, output_bias: bool) -> ModelConfig:
    """Read the fields that Llama and its relatives share."""
    if fields.get("hidden_act", "silu") != "silu":
        raise fields.refuse("hidden_act", "silu")
    if fields.get("quantization_config"):
        raise fields.refuse("quantization_config", "none (weights in F32, F16 or BF16, or a GGUF file)")
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", hidden_size // max(num_heads, 1))
    try:
        return ModelConfig(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            max_position_embeddings=fields.integer("max_position_embeddings"),
            rotary=read_rotary(fields, head_dim),
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            mlp_bias=fields.flag("mlp_bias"),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
        )
    except ValueError as error:
        raise ModelLoadError(f"{fields.path}: {error}") from None


def read_llama(fields: ConfigFields) -> ModelConfig:
    """Llama's bias, where it has one, is on all four attention projections."""
    bias = fields.flag("attention_bias")
    return read_llama_like(fields, "LlamaForCausalLM", qkv_bias=bias, output_bias=bias)


def name_llama_tensors(config: ModelConfig) -> DecoderSpec:
    """Name the tensors as Llama's checkpoints do, and its relatives'."""
    return DecoderSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        embedding="model.embed_tokens",
        layers=tuple(_layer(config, f"model.layers.{index}") for index in range(config.num_layers)),
        final_norm="model.norm",
        head=None
        if config.tie_word_embeddings
        else LinearSpec((("lm_head", config.vocab_size),), config.hidden_size, bias=False),
        ignored=_ignored(config),
    )


def _layer(config: ModelConfig, prefix: str) -> LayerSpec:
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = ((f"{attention}.q_proj", query_size), (f"{attention}.k_proj", kv_size), (f"{attention}.v_proj", kv_size))
    gate_up = tuple((f"{mlp}.{name}_proj", config.intermediate_size) for name in ("gate", "up"))
    return LayerSpec(
        input_norm=f"{prefix}.input_layernorm",
        qkv=LinearSpec(qkv, config.hidden_size, config.qkv_bias),
        attention_output=LinearSpec(((f"{attention}.o_proj", config.hidden_size),), query_size, config.output_bias),
        post_attention_norm=f"{prefix}.post_attention_layernorm",
        gate_up=LinearSpec(gate_up, config.hidden_size, config.mlp_bias),
        down=LinearSpec(((f"{mlp}.down_proj", config.hidden_size),), config.intermediate_size, config.mlp_bias),
    )


def _ignored(config: ModelConfig) -> frozenset[str]:
    """Return what older checkpoints hold beside the weights: rotary tables, and a copy of a tied head."""
    tables = {f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(config.num_layers)}
    return frozenset(tables | ({"lm_head.weight"} if config.tie_word_embeddings else set()))


LLAMA = Family("LlamaForCausalLM", read_llama, name_llama_tensors)
