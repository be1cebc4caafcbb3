"""What a rank is to do to be one part of a model: check that the model divides, find the others, run the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from executor_svc.graph.passes.base import Pass
from executor_svc.kernels import KernelSet
from executor_svc.models import ModelConfig, ServedConfig, UnsupportedModelError, shard_config
from executor_svc.parallel.connect import connect
from executor_svc.parallel.lead import ConnectedRanks
from executor_svc.parallel.place import Place
from executor_svc.parallel.share import Share
from executor_svc.parallel.start import StartedRanks
from octavo.models import PreparedModel
from octavo.settings import ExecutorSettings

_ALIKE = (
    "tensor_parallel",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "kv_memory",
    "deterministic",
    "ops",
    "device",
    "gpu_memory_utilization",
    "enforce_eager",
)
"""Settings that all ranks must have alike."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class RanksPlan:
    """Of one rank."""

    place: Place
    started: StartedRanks | None = None
    """The processes that rank 0 has started."""
    on_connected: Callable[[], None] = _nothing
    """Called once the ranks have come together."""

    def check(self, prepared: PreparedModel, config: ServedConfig) -> ServedConfig:
        """Return what this rank computes of a model. Raises UnsupportedModelError where it does not divide."""
        if not isinstance(config, ModelConfig):
            raise UnsupportedModelError(
                f"--tensor-parallel {self.place.share.size}: {prepared.weights} is of none of the families that "
                "Octavo's own code runs, and transformers' code is not divided among ranks"
            )
        return shard_config(config, self.place.share)

    def widest(self, config: ServedConfig) -> ServedConfig:
        """Return what the rank computes that has most of a model, the last: by it all of them count their KV blocks."""
        assert isinstance(config, ModelConfig)  # check
        return shard_config(config, Share(self.place.share.size - 1, self.place.share.size))

    def connect(
        self,
        settings: ExecutorSettings,
        prepared: PreparedModel,
        dtype: torch.dtype,
        device: torch.device,
        kernels: KernelSet,
        passes: Sequence[Pass],
    ) -> ConnectedRanks:
        """Find the other ranks. Raises RanksError where they do not come, or run something else."""
        facts: dict[str, object] = {
            "model": prepared.revision,
            "dtype": str(dtype).removeprefix("torch."),
            "kernels": kernels.build,
            "passes": [each.name for each in passes],
            **{name: getattr(settings, name) for name in _ALIKE},
        }
        dead = dict if self.started is None else self.started.dead
        ranks = connect(self.place, facts, in_order=kernels.batch_invariant, device=device, dead=dead)
        self.on_connected()
        return ranks
