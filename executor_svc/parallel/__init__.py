"""One executor over several processes, its ranks: docs/decisions/tensor-parallel.md."""
