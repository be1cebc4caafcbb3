"""From a model on disk to a CausalLM, a few tensors at a time: never two copies of the weights in memory.

Layers are loaded side by side, each by one thread. Splitting every small operation among the threads instead would
make them wait for one another thousands of times, and for longer the busier the machine is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
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

Progress = Callable[[int, int], None]
"""Takes the elements loaded so far, and those of the whole model. Called from the threads that load, one at a time."""


def load_model(
    prepared: PreparedModel,
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelSet,
    progress: Progress | None = None,
) -> CausalLM:
    """Load a prepared model's weights. Raises ModelLoadError: nothing is allocated before config and tensors fit.

    As many threads take part as torch has when this is called; afterwards it has that number again.
    """
    return load_weights(prepared.weights, dtype, device, kernels, progress)


def read_config(prepared: PreparedModel) -> ModelConfig:
    """Return what a prepared model's files say of it; no weight is read. Raises ModelLoadError."""
    return describe(open_checkpoint(prepared.weights))[0]


def load_weights(
    path: Path, dtype: torch.dtype, device: torch.device, kernels: KernelSet, progress: Progress | None = None
) -> CausalLM:
    """Load a GGUF file or Hugging Face folder. Raises as load_model does."""
    checkpoint = open_checkpoint(path)
    config, spec = describe(checkpoint)
    check_tensors(checkpoint, spec.tensors(), ignored=spec.ignored)
    counter = _Counter(spec.tensors().values(), progress)
    num_threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(num_threads, "loader", initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return _Loader(checkpoint, config, dtype, device, kernels, counter).load(spec, pool)
    finally:
        torch.set_num_threads(num_threads)


def describe(checkpoint: Checkpoint) -> tuple[ModelConfig, DecoderSpec]:
    """Return what the checkpoint's config asks for and which tensors that takes."""
    fields = ConfigFields(checkpoint.path, checkpoint.config)
    family = find_family(fields)
    config = family.read_config(fields)
    return config, family.name_tensors(config)


class _Counter:
    """Adds up what the threads have loaded."""

    def __init__(self, shapes: Iterable[tuple[int, ...]], progress: Progress | None) -> None:
        self._total = sum(map(prod, shapes))
        self._done = 0
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, num_elements: int) -> None:
        with self._lock:
            self._done += num_elements
            if self._progress is not None:
                self._progress(self._done, self._total)


class _Loader:
    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        kernels: KernelSet,
        counter: _Counter,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._dtype = dtype
        self._device = device
        self._kernels = kernels
        self._counter = counter

    def load(self, spec: DecoderSpec, pool: ThreadPoolExecutor) -> CausalLM:
        # The largest first, so that no thread is alone with it at the end.
        ends = pool.submit(self._embedding_and_head, spec)
        layers = [pool.submit(self._layer, layer) for layer in spec.layers]
        try:
            embedding, head = ends.result()
            return CausalLM(
                self._config,
                self._kernels,
                embedding=embedding,
                device=self._device,
                layers=[layer.result() for layer in layers],
                final_norm=self._norm(spec.final_norm),
                head=head,
            )
        finally:
            # Where one has failed the others need not begin.
            _cancel(layers)

    def _embedding_and_head(self, spec: DecoderSpec) -> tuple[Linear, Linear]:
        embedding = self._linear(LinearSpec(((spec.embedding, spec.vocab_size),), spec.hidden_size, bias=False))
        return embedding, embedding if spec.head is None else self._linear(spec.head)

    def _layer(self, spec: LayerSpec) -> DecoderLayer:
        config, kernels = self._config, self._kernels
        return DecoderLayer(
            input_norm=self._norm(spec.input_norm),
            attention=SelfAttention(
                self._linear(spec.qkv),
                self._linear(spec.attention_output),
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
            self._fill(f"{name}.weight", weight[start : start + rows])
            if bias is not None:
                self._fill(f"{name}.bias", bias[start : start + rows])
            start += rows
        return self._kernels.pack_linear(weight, bias)

    def _norm(self, name: str) -> Tensor:
        return self._tensor(f"{name}.weight", (self._config.hidden_size,))

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._empty(*shape)
        self._fill(name, tensor)
        return tensor

    def _fill(self, name: str, out: Tensor) -> None:
        self._checkpoint.copy_to(name, out)
        self._counter.add(out.numel())

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)


def _cancel(futures: Iterable[Future[DecoderLayer]]) -> None:
    for each in futures:
        each.cancel()
