"""Small tokenizers of every kind that decoder-only models use, made without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

BOS, EOS, END_OF_TURN = "<s>", "</s>", "<|end|>"
SPECIAL_TOKENS = (BOS, EOS, END_OF_TURN)
BOS_ID, EOS_ID, END_OF_TURN_ID = 0, 1, 2
# Characters of one to four bytes whose bytes the byte-level merges join across character borders, as real merges do.
BYTE_LEVEL_MERGES = ("h e", "t he", "Ġ t", "Ġt he", "ð Ł", "ðŁ ĺ", "Ã ©", "â Ĥ", "Ĥ ¬", "Ł ĺ", "© Ã")
WORDS = ("the", "cat", "sat", "on", "mat", "a")


@dataclass(frozen=True)
class TokenizerSample:
    """A tokenizer and what is special about its text."""

    name: str
    tokenizer: Tokenizer
    byte_fallback: bool = False

    def save(self, folder: Path) -> Path:
        """Write tokenizer.json and return its path."""
        path = folder / "tokenizer.json"
        self.tokenizer.save(str(path))
        return path


def byte_level(*, add_bos: bool = False) -> TokenizerSample:
    """Return a tokenizer as GPT-2's, Llama-3's, Qwen's: every byte is a token, so any text round-trips."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIAL_TOKENS, *alphabet, *(merge.replace(" ", "") for merge in BYTE_LEVEL_MERGES)]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in BYTE_LEVEL_MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    # Not special, and with a space, which no byte-level piece has.
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return TokenizerSample("byte-level", tokenizer)


def byte_fallback(*, strip: bool = True) -> TokenizerSample:
    """Return a tokenizer as Llama-2's (`strip`) or Gemma's: a space is U+2581, a character outside it becomes bytes."""
    pieces = [
        *SPECIAL_TOKENS,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz.,é",
        "▁t",
        "▁th",
        "▁▁",
    ]
    merges = [("▁", "t"), ("▁t", "h"), ("▁", "▁")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token=None))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if strip else replace
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*stages, decoders.Strip(" ", 1, 0)] if strip else stages)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return TokenizerSample(f"byte-fallback{'' if strip else ' without strip'}", tokenizer, byte_fallback=True)


def metaspace(prepend_scheme: str = "always") -> TokenizerSample:
    """Return a tokenizer as T5's and other SentencePiece unigrams: a space is U+2581, the first one falls off."""
    scores = [(token, 0.0) for token in (*SPECIAL_TOKENS, "<unk>")]
    scores += [
        (piece, -float(index + 2))
        for index, piece in enumerate(("▁the", "▁c", "at", "▁", *"abcdefghijklmnopqrstuvwxyzé😀"))
    ]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=prepend_scheme)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return TokenizerSample(f"metaspace {prepend_scheme}", tokenizer)


def words() -> TokenizerSample:
    """Return a tokenizer without a decoder: tokens are words, and its text has a space between each two."""
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, "<unk>", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return TokenizerSample("words", tokenizer)


def all_samples() -> list[TokenizerSample]:
    """Return one of each."""
    return [
        byte_level(),
        byte_fallback(),
        byte_fallback(strip=False),
        *map(metaspace, ("always", "first", "never")),
        words(),
    ]
