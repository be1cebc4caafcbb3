"""Prepared models for the gateway's tests: a tokenizer and no weights, which a gateway never opens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from tokenizer_samples import BOS_ID, END_OF_TURN_ID, EOS_ID, TokenizerSample, byte_level

from octavo.models.manifest import GenerationConfig, Manifest, WeightFile, revision_of, write_files
from octavo.models.prepared import PreparedModel, open_prepared

VOCAB_SIZE = 320
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('system messages go first') }}{% endif %}"
    "{{ bos_token }}{{ message['role'] }}\n{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}assistant\n{% endif %}"
)

MakePrepared = Callable[..., PreparedModel]
"""Takes the arguments of `write_prepared`, less the folder."""


def write_prepared(
    folder: Path,
    name: str = "tiny",
    *,
    sample: TokenizerSample | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    max_position_embeddings: int = 4096,
    generation: GenerationConfig | None = None,
) -> PreparedModel:
    """Write a prepared folder below `folder` and open it."""
    prepared = folder / name / "octavo"
    prepared.mkdir(parents=True)
    tokenizer = (sample or byte_level()).save(folder).read_bytes()
    generation = generation or GenerationConfig(eos_token_ids=(EOS_ID, END_OF_TURN_ID), bos_token_id=BOS_ID)
    weights = (WeightFile("model.safetensors", 1, hashlib.sha256(name.encode()).hexdigest()),)
    manifest = Manifest(
        name=name,
        revision=revision_of(weights, tokenizer, chat_template, generation),
        tokenizer_hash=hashlib.sha256(tokenizer).hexdigest(),
        weights="..",
        weight_files=weights,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=max_position_embeddings,
    )
    write_files(prepared, manifest, tokenizer, chat_template, generation)
    return open_prepared(str(prepared))
