"""From a model on disk to a CausalLM, one tensor at a time: never two copies of the weights in memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from executor_svc.kernels import KernelSet
from executor_svc.kernels.linear import Linear
from executor_svc.layers.attention import SelfAttention
from executor_svc.layers.mlp import GatedMlp
from executor_svc.models.config import ModelConfig
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.decoder import CausalLM, DecoderLayer
from executor_svc.models.registry import find_family
from executor_svc.models.spec import DecoderSpec, LayerSpec, LinearSpec
from executor_svc.weights import Checkpoint, check_tensors, open_checkpoint
from octavo.models.prepared import PreparedModel


def load_model(prepared: PreparedModel, dtype: torch.dtype, device: torch.device, kernels: KernelSet) -> CausalLM:
    """Load a prepared model's weights. Raises ModelLoadError: nothing is allocated before config and tensors fit."""
    return load_weights(prepared.weights, dtype, device, kernels)


def load_weights(path: Path, dtype: torch.dtype, device: torch.device, kernels: KernelSet) -> CausalLM:
    """Load a GGUF file or Hugging Face folder. Raises as load_model does."""
    checkpoint = open_checkpoint(path)
    config, spec = describe(checkpoint)
    check_tensors(checkpoint, spec.tensors(), ignored=spec.ignored)
    return _Loader(checkpoint, config, dtype, device, kernels).load(spec)


def describe(checkpoint: Checkpoint) -> tuple[ModelConfig, DecoderSpec]:
    """Return what the checkpoint's config asks for and which tensors that takes."""
    fields = ConfigFields(checkpoint.path, checkpoint.config)
    family = find_family(fields)
    config = family.read_config(fields)
    return config, family.name_tensors(config)


class _Loader:
    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, device: torch.device, kernels: KernelSet
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._dtype = dtype
        self._device = device
        self._kernels = kernels

    def load(self, spec: DecoderSpec) -> CausalLM:
        embedding = self._tensor(f"{spec.embedding}.weight", (spec.vocab_size, spec.hidden_size))
        return CausalLM(
            self._config,
            self._kernels,
            embedding=embedding,
            layers=[self._layer(layer) for layer in spec.layers],
            final_norm=self._norm(spec.final_norm),
            head=self._kernels.pack_linear(embedding, None) if spec.head is None else self._linear(spec.head),
        )

    def _layer(self, spec: LayerSpec) -> DecoderLayer:
        config, kernels = self._config, self._kernels
        return DecoderLayer(
            input_norm=self._norm(spec.input_norm),
            attention=SelfAttention(
                self._linear(spec.qkv),
                self._linear(spec.attention_output),
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                kernels=kernels,
            ),
            post_attention_norm=self._norm(spec.post_attention_norm),
            mlp=GatedMlp(self._linear(spec.gate_up), self._linear(spec.down), kernels=kernels),
        )

    def _linear(self, spec: LinearSpec) -> Linear:
        weight = self._empty(spec.out_features, spec.in_features)
        bias = self._empty(spec.out_features) if spec.bias else None
        start = 0
        for name, rows in spec.parts:
            self._checkpoint.copy_to(f"{name}.weight", weight[start : start + rows])
            if bias is not None:
                self._checkpoint.copy_to(f"{name}.bias", bias[start : start + rows])
            start += rows
        return self._kernels.pack_linear(weight, bias)

    def _norm(self, name: str) -> Tensor:
        return self._tensor(f"{name}.weight", (self._config.hidden_size,))

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._empty(*shape)
        self._checkpoint.copy_to(name, tensor)
        return tensor

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)
