"""How text is cut before byte-level BPE, by the name that a GGUF file gives (`tokenizer.ggml.pre`).

A vocabulary's merges were learned on pieces cut in one way; cut in another, the same text gets other tokens and the
model answers worse, without a word. So a name that is not listed here is an error, not a guess. The names are those of
llama.cpp's converter; the patterns are those of the models' own tokenizer.json files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

LLAMA3_PATTERN = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS_AND_SPACES}"
QWEN2_PATTERN = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SIGNS_AND_SPACES}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDS}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED_CODER_PATTERN = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+")


@dataclass(frozen=True)
class PreTokenizer:
    """A way of cutting.

    `pattern` isolates its matches, several one after the other; without one GPT-2's own pattern is used.
    `split_digits` cuts out each digit first. `normalize` composes Unicode (NFC). `ignore_merges` takes a whole piece
    that is a token as it is. `add_bos` is what holds where the file does not say.
    """

    pattern: str | tuple[str, ...] = ()
    split_digits: bool = False
    normalize: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def to_json(self, add_prefix_space: bool) -> dict[str, Any]:
        """Return the pre-tokenizer in the format of tokenizer.json."""
        steps: list[dict[str, Any]] = []
        if self.split_digits:
            steps.append({"type": "Digits", "individual_digits": True})
        for pattern in (self.pattern,) if isinstance(self.pattern, str) else self.pattern:
            split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            steps.append(split)
        steps.append(
            {
                "type": "ByteLevel",
                "add_prefix_space": add_prefix_space,
                "trim_offsets": True,
                "use_regex": not self.pattern,
            }
        )
        return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}


_GPT2 = PreTokenizer()
# The tokenizer of GPT-NeoX, which OLMo, MPT and Pythia have too, composes Unicode.
_NEOX = PreTokenizer(normalize=True)
_DIGITS = PreTokenizer(split_digits=True)
_LLAMA3 = PreTokenizer(pattern=LLAMA3_PATTERN, ignore_merges=True, add_bos=True)
_LLAMA3_BY_MERGES = PreTokenizer(pattern=LLAMA3_PATTERN)
_QWEN2 = PreTokenizer(pattern=QWEN2_PATTERN, normalize=True)
_QWEN2_AS_WRITTEN = PreTokenizer(pattern=QWEN2_PATTERN)

PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "gigachat": _GPT2,
    "a.x-4.0": _GPT2,
    "mellum": _GPT2,
    "trillion": _GPT2,
    "granite-docling": _GPT2,
    "mpt": _NEOX,
    "olmo": _NEOX,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "exaone": _DIGITS,
    "minerva-7b": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "pixtral": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "lfm2": _LLAMA3,
    "smaug-bpe": _LLAMA3_BY_MERGES,
    "dbrx": _LLAMA3_BY_MERGES,
    "qwen2": _QWEN2,
    "megrez": _QWEN2,
    "stablelm2": _QWEN2_AS_WRITTEN,
    "deepseek-r1-qwen": _QWEN2_AS_WRITTEN,
    "kormo": _QWEN2_AS_WRITTEN,
    "tekken": PreTokenizer(pattern=TEKKEN_PATTERN, ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer(pattern=GPT4O_PATTERN),
    "seed-coder": PreTokenizer(pattern=SEED_CODER_PATTERN),
    "deepseek-coder": PreTokenizer(pattern=_DEEPSEEK_CODER, split_digits=True),
}
