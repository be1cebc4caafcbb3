"""Settings of the executor's unit tests."""

from __future__ import annotations

import torch

# Tiny tensors gain nothing from threads, and on a busy machine each parallel loop waits for its slowest.
torch.set_num_threads(1)
