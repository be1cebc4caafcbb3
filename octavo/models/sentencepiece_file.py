"""Reading tokenizer.model, SentencePiece's own file: Llama 2, Mistral, Gemma and their like were published with one,
some of their descendants with that alone.

The file is one protobuf message; the few fields that matter are taken out of its bytes here, so that nothing but Octavo
has to be installed. Format: SentencePiece's own sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.models.errors import ModelError
from octavo.models.lfs_pointer import check_no_pointer

_UNIGRAM, _BPE = 1, 2
_KINDS = {_UNIGRAM: "unigram", _BPE: "BPE", 3: "word", 4: "char"}
_NORMAL = 1
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SIGN = 1 << 63
# Numbers of fields.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _UNK, _BOS, _EOS = 3, 40, 41, 42
_CHARSMAP, _ADD_DUMMY_PREFIX, _REMOVE_EXTRA_WHITESPACES, _ESCAPE_WHITESPACES = 2, 3, 4, 5

_Value = int | bytes
_Fields = dict[int, _Value]


@dataclass(frozen=True)
class SentencePieceModel:
    """What the file says. `types` have the numbers that GGUF took over. Ids are None where there is no such token."""

    pieces: tuple[str, ...]
    scores: tuple[float, ...]
    types: tuple[int, ...]
    unk_id: int | None
    bos_id: int | None
    eos_id: int | None
    add_dummy_prefix: bool


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read a BPE model that changes nothing in a text but its spaces. Raises ModelError: other kinds, damaged files."""
    check_no_pointer(path)
    try:
        fields = list(_fields(path.read_bytes()))
        pieces = [_piece(_sub(value)) for number, value in fields if number == _PIECES]
        trainer, normalizer = (_merged(fields, number) for number in (_TRAINER, _NORMALIZER))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, IndexError, struct.error):
        raise ModelError(f"{path} is no SentencePiece model, or is damaged: fetch it again") from None
    if not pieces:
        raise ModelError(f"{path} is no SentencePiece model, or is damaged: it has no pieces")
    _check_kind(path, trainer, normalizer)

    def token_id(number: int, default: int) -> int | None:
        value = _signed(trainer.get(number, default))
        return value if 0 <= value < len(pieces) else None

    return SentencePieceModel(
        pieces=tuple(text for text, _, _ in pieces),
        scores=tuple(score for _, score, _ in pieces),
        types=tuple(kind for _, _, kind in pieces),
        unk_id=token_id(_UNK, 0),
        bos_id=token_id(_BOS, 1),
        eos_id=token_id(_EOS, 2),
        add_dummy_prefix=bool(normalizer.get(_ADD_DUMMY_PREFIX, True)),
    )


def _check_kind(path: Path, trainer: _Fields, normalizer: _Fields) -> None:
    kind = trainer.get(_MODEL_TYPE, _UNIGRAM)
    faults = [] if kind == _BPE else [f"it is of the kind {_KINDS.get(int(kind), kind)!r}"]
    if normalizer.get(_CHARSMAP):
        faults.append("it changes characters")
    if normalizer.get(_REMOVE_EXTRA_WHITESPACES, True):
        faults.append("it takes spaces away")
    if not normalizer.get(_ESCAPE_WHITESPACES, True):
        faults.append("it leaves spaces as they are")
    if faults:
        raise ModelError(
            f"{path} is not read ({', '.join(faults)}; Octavo reads BPE models that keep the text): save the tokenizer "
            "as tokenizer.json, with transformers where sentencepiece is installed"
        )


def _piece(fields: _Fields) -> tuple[str, float, int]:
    text, score = fields.get(_TEXT, b""), fields.get(_SCORE, b"\0\0\0\0")
    if not isinstance(text, bytes) or not isinstance(score, bytes):
        raise ValueError
    (number,) = struct.unpack("<f", score)
    kind = fields.get(_TYPE, _NORMAL)
    if not isinstance(kind, int):
        raise ValueError
    return text.decode(), number, kind


def _merged(fields: list[tuple[int, _Value]], number: int) -> _Fields:
    """Return the fields of a message inside; none where it is left out."""
    found: _Fields = {}
    for each, value in fields:
        if each == number:
            found |= _sub(value)
    return found


def _sub(value: _Value) -> _Fields:
    if not isinstance(value, bytes):
        raise ValueError
    return dict(_fields(value))


def _fields(data: bytes) -> Iterator[tuple[int, _Value]]:
    """Yield number and value of each field: whole numbers, bytes, and the bytes of fixed-size numbers."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == _BYTES:
            length, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError
        if at + length > len(data):
            raise ValueError
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError


def _signed(value: _Value) -> int:
    """Return a whole number that protobuf wrote as one without a sign."""
    if not isinstance(value, int):
        return -1
    return value - 2 * _SIGN if value >= _SIGN else value
