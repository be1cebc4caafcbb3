"""What the device knows of each stay: its tokens and its blocks, by slot, kept up to date by what changed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor_svc.batch import Limits
from executor_svc.device import Device

Ints = npt.NDArray[np.int64]


class DeviceTables:
    """The device's copy of SequenceTable's tokens and block tables, and the first to have sampled tokens.

    One more row than there are slots is nobody's: what rows without a sequence read and write. Entries behind a
    sequence's own are whatever was there. Changed on the compute stream alone.
    """

    def __init__(self, device: Device, limits: Limits) -> None:
        self._device = device
        self.max_model_len = limits.max_model_len
        self.width = -(-limits.max_model_len // limits.block_size)
        """Blocks of the longest sequence."""
        self.nobody = limits.max_num_seqs
        """The row that is nobody's."""
        self.tokens, self.block_tables = self._make(limits.max_num_seqs)

    @property
    def flat_tokens(self) -> Tensor:
        """int32 [rows * max_model_len]."""
        return self.tokens.view(-1)

    @property
    def flat_block_tables(self) -> Tensor:
        """int32 [rows * width]."""
        return self.block_tables.view(-1)

    def fit(self, num_slots: int) -> bool:
        """Make room for so many slots; return whether the tables have moved, and with them all that holds addresses."""
        if num_slots <= self.nobody:
            return False
        tokens, block_tables = self._make(num_slots)
        tokens[: self.nobody].copy_(self.tokens[: self.nobody])
        block_tables[: self.nobody].copy_(self.block_tables[: self.nobody])
        self.tokens, self.block_tables, self.nobody = tokens, block_tables, num_slots
        return True

    def begin(self, slot: int, token_ids: npt.NDArray[np.int32]) -> None:
        """Take in the tokens of a stay that begins."""
        self.tokens[slot, : len(token_ids)].copy_(self._device.put(token_ids))

    def patch(self, places: Ints, blocks: npt.NDArray[np.int32]) -> None:
        """Put blocks at places of flat_block_tables."""
        self.flat_block_tables.scatter_(0, self._device.put(places), self._device.put(blocks))

    def _make(self, num_slots: int) -> tuple[Tensor, Tensor]:
        with self._device.on(self._device.compute):
            return (
                torch.zeros((num_slots + 1, self.max_model_len), dtype=torch.int32, device=self._device.torch_device),
                torch.zeros((num_slots + 1, self.width), dtype=torch.int32, device=self._device.torch_device),
            )
