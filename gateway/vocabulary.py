"""The bytes that each token stands for in text, read from the `decoder` of a tokenizer.json.

The decoders of decoder-only models all come to the same: each token gives bytes by itself, and only the first token of
a text is treated otherwise (a leading space falls off). With the bytes in a table, text can be made token by token, in
constant time, and exactly. A decoder that does not fit this form is refused when the model is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.models.errors import ModelError

_Stage = Callable[[str | bytes], str | bytes]


@dataclass(frozen=True)
class LeadingStrip:
    """Up to `count` copies of `character` fall off the start of a text."""

    character: str
    count: int


class Vocabulary:
    """Token ids as bytes. Immutable.

    `pieces[id]` are the bytes of a token inside a text; empty for an id below `size` that stands for no token.
    `visible_pieces` are the same, but empty for `special_ids` too. `leading_strip`, where set, is applied to the start
    of a text. `byte_fallback`: single bytes are tokens of their own, and each byte that belongs to no character becomes
    U+FFFD; otherwise each run of bytes that starts like a character but is none becomes one.
    """

    def __init__(
        self, tokens: Mapping[int, str], special_ids: frozenset[int], decoder: Mapping[str, Any] | None, size: int
    ) -> None:
        """`tokens`: the text of each token in tokenizer.json. `decoder`: its `decoder` section. Raises ModelError."""
        plan = _plan(decoder)
        self.size = size
        self.special_ids = special_ids
        self.leading_strip = plan.leading_strip
        self.byte_fallback = plan.byte_fallback
        self.pieces: list[bytes] = [b""] * size
        for token_id, token in tokens.items():
            if token_id < size:
                self.pieces[token_id] = _apply(plan.inner, token)
        self.visible_pieces = list(self.pieces)
        for token_id in special_ids:
            if token_id < size:
                self.visible_pieces[token_id] = b""
        self._tokens = tokens
        self._first = plan.first

    def token(self, token_id: int) -> str | None:
        """Return a token as tokenizer.json spells it."""
        return self._tokens.get(token_id)

    def is_token(self, token_id: int) -> bool:
        """Tell whether the id stands for a token: a model's vocabulary may be padded."""
        return token_id in self._tokens

    def first_piece(self, token_id: int) -> bytes:
        """Return the bytes of a token that opens a text."""
        return _apply(self._first, self._tokens[token_id])


@dataclass(frozen=True)
class _Plan:
    inner: tuple[_Stage, ...]
    first: tuple[_Stage, ...]
    byte_fallback: bool
    leading_strip: LeadingStrip | None


def _plan(decoder: Mapping[str, Any] | None) -> _Plan:
    """Read a decoder section: stages per token, then Fuse, then what happens to the whole text."""
    if decoder is None:  # without a decoder, tokens are words
        return _Plan(inner=(_prepend_space,), first=(), byte_fallback=False, leading_strip=None)
    stages: Sequence[Mapping[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    inner: list[_Stage] = []
    first: list[_Stage] = []
    byte_fallback = fused = False
    leading_strip: LeadingStrip | None = None
    for stage in stages:
        kind = stage["type"]
        if fused and not (kind == "Strip" and leading_strip is None):
            raise _unsupported(stage)
        if kind == "Replace" and "String" in stage["pattern"]:
            replace = _replacer(stage["pattern"]["String"], stage["content"])
            inner.append(replace)
            first.append(replace)
        elif kind == "Metaspace":
            inner.append(_replacer(stage["replacement"], " "))
            never = stage.get("prepend_scheme", "always") == "never"
            first.append(_replacer(stage["replacement"], " " if never else ""))
        elif kind == "ByteFallback":
            byte_fallback = True
            inner.append(_fallback_byte)
            first.append(_fallback_byte)
        elif kind == "ByteLevel":
            inner.append(_byte_level)
            first.append(_byte_level)
            fused = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and stage["stop"] == 0:
            leading_strip = LeadingStrip(stage["content"], stage["start"])
        else:
            raise _unsupported(stage)
    return _Plan(tuple(inner), tuple(first), byte_fallback, leading_strip)


def _unsupported(stage: Mapping[str, Any]) -> ModelError:
    return ModelError(
        f"tokenizer.json has a decoder step that Octavo cannot stream: {dict(stage)}. Known are ByteLevel, Metaspace, "
        "and Sequence of Replace, Metaspace, ByteFallback, Fuse and a Strip at the start"
    )


def _apply(stages: tuple[_Stage, ...], token: str) -> bytes:
    value: str | bytes = token
    for stage in stages:
        value = stage(value)
    return value.encode() if isinstance(value, str) else value


def _prepend_space(value: str | bytes) -> str | bytes:
    return f" {value}" if isinstance(value, str) else value


def _replacer(old: str, new: str) -> _Stage:
    def replace(value: str | bytes) -> str | bytes:
        return value.replace(old, new) if isinstance(value, str) else value

    return replace


def _fallback_byte(value: str | bytes) -> str | bytes:
    if isinstance(value, str) and len(value) == 6 and value.startswith("<0x") and value.endswith(">"):
        try:
            return bytes.fromhex(value[3:5])
        except ValueError:
            return value
    return value


def _byte_level(value: str | bytes) -> str | bytes:
    """Turn GPT-2's printable stand-ins back into bytes; a token with any other character is taken as it is."""
    if isinstance(value, bytes):
        return value
    try:
        return bytes(map(_BYTE_OF_CHARACTER.__getitem__, value))
    except KeyError:
        return value


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's table: printable Latin-1 bytes stand for themselves, the others for U+0100 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
