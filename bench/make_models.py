"""The models of the benchmarks, as folders that every engine reads (bfloat16): python bench/make_models.py [NAME ...].

smollm2-135m      the demo model's 4-bit file, taken to bfloat16: the weights are those of the file, to that precision
llama-1b-random   random weights in the shape of Llama 3.2 1B, with the vocabulary of smollm2-135m

They lie in .bench/models. What is there is not made again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / ".bench" / "models"
SMOLLM2, LLAMA_1B = "smollm2-135m", "llama-1b-random"
NAMES = (SMOLLM2, LLAMA_1B)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_LLAMA_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
}


def ensure(name: str, report: Callable[[str], None] = print) -> Path:
    """Return the folder of a benchmark's model, made now where it is missing; any other name is a path, returned as is.

    Raises ModelError where the demo model cannot be fetched.
    """
    if name not in NAMES:
        return Path(name)
    folder = FOLDER / name
    if folder.is_dir():
        return folder
    report(f"making {folder}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: an interrupted run leaves nothing that looks like a model.
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=FOLDER) as scratch:
        fresh = Path(scratch) / name
        if name == SMOLLM2:
            _from_gguf(fresh)
        else:
            make_llama(fresh, _LLAMA_1B, tokenizer_of=ensure(SMOLLM2, report))
        fresh.rename(folder)
    return folder


def _from_gguf(folder: Path) -> None:
    # Imported here: they take seconds, and a folder that is there needs none of them.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from octavo.models.catalog import DEFAULT_MODEL
    from octavo.models.ensure import ensure_prepared

    file = ensure_prepared(DEFAULT_MODEL, report=lambda line: print(line, file=sys.stderr)).weights
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=unpacked
    )
    # What is saved is no longer quantized, and must not say so.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_llama(folder: Path, config: dict[str, Any], *, tokenizer_of: Path) -> None:
    """Write a Llama of random bfloat16 weights, always the same, with another model's tokenizer."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    for name in _TOKENIZER_FILES:
        if (tokenizer_of / name).is_file():
            shutil.copyfile(tokenizer_of / name, folder / name)
    ids = json.loads((tokenizer_of / "config.json").read_text(encoding="utf-8"))
    special = {name: ids[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in ids}
    (folder / "config.json").write_text(json.dumps(config | special, indent=2) + "\n", encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    weights = {
        # Norms keep the scale; 0.02 is the deviation that Llamas are trained from.
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)
        for name, shape in _shapes(config).items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def main() -> int:
    """Make the models asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} [default: all]")
    for name in parser.parse_args().names or NAMES:
        if name not in NAMES:
            parser.error(f"{name}: there are {', '.join(NAMES)}")
        print(ensure(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
