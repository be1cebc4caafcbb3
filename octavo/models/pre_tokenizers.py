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


@dataclass(frozen=True)
class PreTokenizer:
    """A way of cutting.

    `pattern` isolates its matches; without one GPT-2's own pattern is used. `split_digits` cuts out each digit first.
    `normalize` composes Unicode (NFC). `ignore_merges` takes a whole piece that is a token as it is. `add_bos` is what
    holds where the file does not say.
    """

    pattern: str | None = None
    split_digits: bool = False
    normalize: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def to_json(self, add_prefix_space: bool) -> dict[str, Any]:
        """Return the pre-tokenizer in the format of tokenizer.json."""
        steps: list[dict[str, Any]] = []
        if self.split_digits:
            steps.append({"type": "Digits", "individual_digits": True})
        if self.pattern is not None:
            split = {"type": "Split", "pattern": {"Regex": self.pattern}, "behavior": "Isolated", "invert": False}
            steps.append(split)
        steps.append(
            {
                "type": "ByteLevel",
                "add_prefix_space": add_prefix_space,
                "trim_offsets": True,
                "use_regex": self.pattern is None,
            }
        )
        return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}


_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(split_digits=True)
_LLAMA3 = PreTokenizer(pattern=LLAMA3_PATTERN, ignore_merges=True, add_bos=True)

PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": PreTokenizer(pattern=LLAMA3_PATTERN),
    "qwen2": PreTokenizer(pattern=QWEN2_PATTERN, normalize=True),
    "deepseek-r1-qwen": PreTokenizer(pattern=QWEN2_PATTERN),
    "tekken": PreTokenizer(pattern=TEKKEN_PATTERN, ignore_merges=True, add_bos=True),
}
