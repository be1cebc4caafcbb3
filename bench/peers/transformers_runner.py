"""Hugging Face transformers in bfloat16: padded batches of 16 (--mode static), or its continuous batching."""

from __future__ import annotations

import argparse
from typing import Any

import protocol

_BATCH = 16
_ATTENTION = "sdpa"
_PAGE_TOKENS = 256
"""Tokens in a block of the paged cache: its own default."""
_STEP_TOKENS = 2048
_NO_TOKEN = -1
"""An end of sequence that no model emits."""


class Transformers(protocol.Engine):
    """The model, loaded once for either mode."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        import transformers

        torch.set_num_threads(args.threads)
        self._torch, self._transformers = torch, transformers
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            args.model, dtype=torch.bfloat16, attn_implementation=_ATTENTION
        ).eval()
        self.versions = f"transformers {transformers.__version__}, torch {torch.__version__}"

    def config(self, length: int, **more: Any) -> Any:
        """Return the settings of a greedy run of an exact length."""
        return self._transformers.GenerationConfig(
            max_new_tokens=length, do_sample=False, eos_token_id=_NO_TOKEN, pad_token_id=0, use_cache=True, **more
        )


class Static(Transformers):
    """Batches of a fixed number of rows, padded on the left; the whole batch runs until its longest output is there."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.label = f"transformers static, batch {_BATCH}, bf16"

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """See Engine."""
        made: list[list[int]] = [[] for _ in prompts]
        # Equal outputs together: the kindest order for a batch that waits for its longest.
        order = sorted(range(len(prompts)), key=lambda index: -lengths[index])
        for start in range(0, len(order), _BATCH):
            self._generate_batch(order[start : start + _BATCH], prompts, lengths, made)
        return made

    def _generate_batch(
        self, batch: list[int], prompts: list[list[int]], lengths: list[int], made: list[list[int]]
    ) -> None:
        width = max(len(prompts[index]) for index in batch)
        ids = self._torch.zeros(len(batch), width, dtype=self._torch.long)
        mask = self._torch.zeros_like(ids)
        for row, index in enumerate(batch):
            start = width - len(prompts[index])
            ids[row, start:] = self._torch.tensor(prompts[index])
            mask[row, start:] = 1
        config = self.config(max(lengths[index] for index in batch))
        with self._torch.inference_mode():
            got = self._model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        for row, index in enumerate(batch):
            made[index] = got[row, width : width + lengths[index]].tolist()


class Continuous(Transformers):
    """transformers' own scheduler with a paged cache. One manager for all runs, since its start sets memory aside."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.label = "transformers continuous, bf16"
        self._manager = self._model.init_continuous_batching(
            generation_config=self.config(256),
            # Else it takes most of the free memory.
            continuous_batching_config=self._transformers.ContinuousBatchingConfig(
                page_size=_PAGE_TOKENS,
                num_blocks=(args.kv_gib << 30) // (_PAGE_TOKENS * self._kv_bytes_per_token()),
                max_batch_tokens=_STEP_TOKENS,
            ),
        )
        self._manager.start()

    def _kv_bytes_per_token(self) -> int:
        shape = self._model.config
        head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        return 2 * 2 * int(shape.num_hidden_layers * shape.num_key_value_heads * head_dim)

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """See Engine. Raises RuntimeError where the manager has stopped."""
        names = [
            self._manager.add_request(list(prompt), max_new_tokens=length, eos_token_id=_NO_TOKEN)
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        done: dict[str, list[int]] = {}
        while len(done) < len(names):
            result = self._manager.get_result(timeout=5)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("continuous batching has stopped")
            elif result.is_finished():
                done[result.request_id] = list(result.generated_tokens)
        return [done[name] for name in names]

    def stop(self) -> None:
        """See Engine."""
        self._manager.stop(block=True, timeout=30)


def _make(args: argparse.Namespace) -> protocol.Engine:
    return Static(args) if args.mode == "static" else Continuous(args)


if __name__ == "__main__":
    protocol.main(_make, "static", "continuous")
