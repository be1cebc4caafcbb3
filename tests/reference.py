"""What transformers writes: the reference for every exactness test."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

_TIE = 1e-4
"""Logits no further apart than this are equal: a prompt and its tokens one by one are not added up in one order."""


class Reference:
    """A model in transformers, run one prompt at a time."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model.eval()

    @classmethod
    def open(cls, weights: Path) -> Reference:
        """Load a Hugging Face folder or a GGUF file, whose packed weights are unpacked first, in float32."""
        if weights.suffix == ".gguf":
            unpacked = GgufConfig(dequantize=True)
            model = AutoModelForCausalLM.from_pretrained(
                weights.parent, gguf_file=weights.name, dtype=torch.float32, quantization_config=unpacked
            )
        else:
            model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
        return cls(model)

    def in_bfloat16(self) -> Reference:
        """The same weights, rounded."""
        return Reference(copy.deepcopy(self.model).to(torch.bfloat16))

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], max_tokens: int, **generation: Any) -> list[int]:
        """The output of `generate` without sampling: up to max_tokens tokens, an end-of-sequence token included."""
        input_ids = torch.tensor([list(prompt)])
        output = self.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,
            **generation,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    def check_greedy(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Raise AssertionError where an output is not what `greedy` writes, equally likely tokens aside.

        One run over all tokens: far quicker than to write them again.
        """
        rows = self.logits([*prompt, *output])[len(prompt) - 1 : -1]
        chosen = rows[torch.arange(len(output)), torch.tensor(output)]
        behind = rows.amax(dim=1) - chosen
        assert behind.max() <= _TIE, f"token {int(behind.argmax())} of {len(output)} is not the likeliest"

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [len(tokens), vocab]: row i is of the token that follows tokens[: i + 1]."""
        logits: torch.Tensor = self.model(torch.tensor([list(tokens)])).logits[0].float()
        return logits

    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [len(tokens), vocab]: row i is the distribution of the token that follows tokens[: i + 1]."""
        return torch.log_softmax(self.logits(tokens), dim=-1)
