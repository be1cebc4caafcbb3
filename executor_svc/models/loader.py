"""From a model on disk to a CausalLM, a few tensors at a time: never two copies of the weights in memory.

Parameters are loaded side by side, each by one thread. Splitting every small operation among the threads instead would
make them wait for one another thousands of times, and for longer the busier the machine is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from executor_svc.attention import AttentionMetadata
from executor_svc.graph.compiled import CompiledGraph
from executor_svc.graph.optimize import PASSES, optimize
from executor_svc.graph.passes.base import Pass
from executor_svc.kernels import KernelSet
from executor_svc.kv_cache import KVCache
from executor_svc.models.builder import DecoderBuilder, results
from executor_svc.models.config import ModelConfig, ServedConfig
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.decoder import CausalLM
from executor_svc.models.parameters import Counter, Parameters, Progress
from executor_svc.models.plain import capture_decoder
from executor_svc.models.registry import FAMILIES, architecture_of, find_family
from executor_svc.models.sharding import shard_config, shard_spec
from executor_svc.models.spec import DecoderSpec
from executor_svc.parallel.ranks import Ranks
from executor_svc.parallel.vocabulary import divided
from executor_svc.weights import Checkpoint, UnsupportedModelError, WeightsError, check_tensors, open_checkpoint
from octavo.models.prepared import PreparedModel

logger = logging.getLogger(__name__)


class LoadedModel(Protocol):
    """A model that runs steps: a family's decoder, or transformers' own code."""

    @property
    def config(self) -> ServedConfig:
        """What it is."""

    @property
    def code(self) -> str:
        """Whose code it is: octavo or transformers."""

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: KVCache) -> Tensor:
        """Give the last hidden states [T, hidden] of token_ids int64 [T], and write their keys and values."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Give the logits, a new float32 [N, vocab_size], of hidden [N, hidden]."""

    def likeliest(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Give the tokens of the highest logits, int64 [N], and which rows are finite, bool [N], as CausalLM does."""


def load_model(
    prepared: PreparedModel,
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelSet,
    progress: Progress | None = None,
    max_model_len: int | None = None,
    passes: Sequence[Pass] = PASSES,
    ranks: Ranks | None = None,
) -> LoadedModel:
    """Load a prepared model's weights. Raises ModelLoadError: nothing is allocated before config and tensors fit.

    What is none of the families is run by transformers' own code, where it can be. With `ranks` only this rank's part
    is loaded, and the other ranks must do the same.

    max_model_len: the longest sequence that is to run, where one is set. passes: what the graph is fused by. As many
    threads take part as torch has when this is called; afterwards it has that number again.
    """
    path, allow_pickle = prepared.weights, prepared.is_pickled
    if is_family(path, allow_pickle=allow_pickle):
        checkpoint = open_checkpoint(path, allow_pickle=allow_pickle)
        _check_vocabulary(prepared, describe(checkpoint)[0])
        return load_checkpoint(checkpoint, dtype, device, kernels, progress, max_model_len, passes, ranks)
    if ranks is not None:
        raise UnsupportedModelError(
            f"--tensor-parallel {ranks.share.size}: {path} is of none of the families that Octavo's own code runs, and "
            "transformers' code is not divided among ranks"
        )
    # Imported here since few models need it, and it takes seconds.
    from executor_svc.models.transformers_lm import load_transformers_lm

    model = load_transformers_lm(path, dtype, device, kernels, progress, allow_pickle=allow_pickle, passes=passes)
    _check_vocabulary(prepared, model.config)
    return model


def read_config(prepared: PreparedModel) -> ServedConfig:
    """Return what a prepared model's files say of it; no weight is read. Raises ModelLoadError."""
    config = read_served_config(prepared.weights, allow_pickle=prepared.is_pickled)
    _check_vocabulary(prepared, config)
    return config


def read_served_config(path: Path, *, allow_pickle: bool = False) -> ServedConfig:
    """Return what a GGUF file or folder says of its model; no weight is read. Raises ModelLoadError."""
    if is_family(path, allow_pickle=allow_pickle):
        return describe(open_checkpoint(path, allow_pickle=allow_pickle))[0]
    from executor_svc.models.transformers_lm import read_transformers_config

    return read_transformers_config(path)


def is_family(path: Path, *, allow_pickle: bool = False) -> bool:
    """Whether a GGUF file or folder is of a family. A file always is: what it may hold is known to be of one.

    Raises ModelLoadError.
    """
    if not path.is_dir():
        return True
    checkpoint = open_checkpoint(path, allow_pickle=allow_pickle)
    fields = ConfigFields(path, checkpoint.config)
    family = FAMILIES.get(architecture_of(fields))
    return family is not None and family.takes(fields)


def load_weights(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelSet,
    progress: Progress | None = None,
    max_model_len: int | None = None,
    passes: Sequence[Pass] = PASSES,
) -> CausalLM:
    """Load a GGUF file or Hugging Face folder. Raises as load_model does."""
    return load_checkpoint(open_checkpoint(path), dtype, device, kernels, progress, max_model_len, passes)


def load_checkpoint(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelSet,
    progress: Progress | None = None,
    max_model_len: int | None = None,
    passes: Sequence[Pass] = PASSES,
    ranks: Ranks | None = None,
) -> CausalLM:
    """Load what is open. Raises as load_model does."""
    config, spec = describe(checkpoint)
    check_tensors(checkpoint, spec.tensors(), ignored=spec.ignored)
    if ranks is not None:
        whole, config = config, shard_config(config, ranks.share)
        spec = shard_spec(spec, whole, ranks.share)
    counter = Counter(spec.tensors().values(), progress)
    graph = capture_decoder(config, spec, is_shared=ranks is not None)
    runs = optimize(graph, passes)
    logger.info("graph optimized", extra={"fields": {run.name: run.matches for run in runs if run.matches}})
    builder = DecoderBuilder(config, kernels, Parameters(checkpoint, dtype, device, kernels, counter), ranks)
    longest = max_model_len or config.unstretched_length
    num_threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(num_threads, "loader", initializer=torch.set_num_threads, initargs=(1,)) as pool:
            # The largest first, so that no thread is alone with it at the end.
            embedding_and_head = pool.submit(builder.embedding_and_head, spec)
            loading = builder.submit(pool, graph.parameters)
            try:
                embedding, head = embedding_and_head.result()
                layers = CompiledGraph(graph, kernels, results(graph.parameters, loading))
                if ranks is not None:
                    embedding, head = divided(embedding, head, config.vocab_size, ranks)
                ends = builder.ends(spec, embedding, head)
            finally:
                # Where one has failed the others need not begin.
                _cancel(loading.values())
    finally:
        torch.set_num_threads(num_threads)
    return CausalLM(config, kernels, ends=ends, layers=layers, dtype=dtype, device=device, longest=longest)


def describe(checkpoint: Checkpoint) -> tuple[ModelConfig, DecoderSpec]:
    """Return what the checkpoint's config asks for and which tensors that takes."""
    fields = ConfigFields(checkpoint.path, checkpoint.config)
    family = find_family(fields)
    config = family.read_config(fields)
    return config, family.name_tensors(config, checkpoint.shapes.keys())


def _check_vocabulary(prepared: PreparedModel, config: ServedConfig) -> None:
    """Raise WeightsError where the tokenizer may give ids that the embedding has no row for."""
    if prepared.vocab_size > config.vocab_size:
        raise WeightsError(
            f"{prepared.weights}: the tokenizer's vocabulary of {prepared.vocab_size} does not fit the embedding of "
            f"{config.vocab_size} rows"
        )


def _cancel(futures: Iterable[Future[Any]]) -> None:
    for each in futures:
        each.cancel()
