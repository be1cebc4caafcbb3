"""What `octavo prepare` learns from a model's own files, whatever their format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.models.manifest import GenerationConfig


@dataclass(frozen=True)
class ModelSource:
    """A model as its files describe it. `files` decide what it computes: the weights, and config.json beside them.

    `defaults` is what they say of generation, by the names of generation_config.json. None among the end ids is no id.
    """

    files: tuple[Path, ...]
    tokenizer: str
    chat_template: str | None
    defaults: Mapping[str, Any]
    eos_token_ids: tuple[int | None, ...]
    bos_token_id: int | None
    vocab_size: int
    max_position_embeddings: int

    def generation(self, recommended: Mapping[str, float]) -> GenerationConfig:
        """Return the resolved defaults. `recommended` speaks where the files are silent, by the same names.

        Values that are absent, or outside the range that a request could ask for, take Octavo's defaults. `do_sample:
        false` means greedy.
        """
        said = {**recommended, **self.defaults}

        def number(name: str, default: float, least: float, most: float) -> float:
            value = said.get(name)
            known = isinstance(value, int | float) and math.isfinite(value) and least <= value <= most
            return float(value) if known else default  # type: ignore[arg-type]

        is_greedy = said.get("do_sample") is False
        positive = 1e-6
        return GenerationConfig(
            eos_token_ids=tuple(sorted({token for token in self.eos_token_ids if token is not None})),
            bos_token_id=self.bos_token_id,
            temperature=0.0 if is_greedy else number("temperature", 1.0, 0.0, 2.0),
            top_p=number("top_p", 1.0, positive, 1.0),
            top_k=int(number("top_k", 0, 0, 2**31 - 1)),
            min_p=number("min_p", 0.0, 0.0, 1.0),
            repetition_penalty=number("repetition_penalty", 1.0, positive, 2.0),
        )
