"""Reading GGUF metadata."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFReader
from gguf_samples import byte_level_metadata, write_gguf

from octavo.models import ModelError
from octavo.models.gguf_file import read_header, read_metadata


def test_every_field_equals_what_the_gguf_package_reads(tmp_path: Path) -> None:
    """Our reader and the reference reader agree on every key and value, of every type that appears."""
    metadata = byte_level_metadata() | {"a.float": 1.5, "a.bool": True, "a.ints": [1, -2, 3], "a.floats": [0.5, 2.0]}
    path = write_gguf(tmp_path / "m.gguf", metadata)
    reference = {key: field.contents() for key, field in GGUFReader(path).fields.items() if not key.startswith("GGUF.")}
    assert read_metadata(path) == reference
    assert reference.keys() >= metadata.keys()


def test_a_file_cut_short_anywhere_is_an_error_that_names_it(tmp_path: Path) -> None:
    """No prefix of a metadata section is taken for whole, and none raises anything but ModelError."""
    whole = write_gguf(tmp_path / "m.gguf", {"a.text": "héllo", "a.list": ["x", "yy"], "a.number": 7}).read_bytes()
    cut = tmp_path / "cut.gguf"
    end = whole.index(b"a.number") + len(b"a.number") + 4 + 4
    for length in range(end):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            read_metadata(cut)
    cut.write_bytes(whole[:end])
    assert read_metadata(cut)["a.number"] == 7


def test_the_header_is_the_metadata_without_lists_of_strings(tmp_path: Path) -> None:
    """Who loads tensors is spared the vocabulary; every other field is as the full reading gives it, to the last."""
    metadata = byte_level_metadata() | {"a.list": ["x", "yy"], "a.text": "héllo", "a.ints": [1, 2], "z.last": 7}
    path = write_gguf(tmp_path / "m.gguf", metadata)
    whole = read_metadata(path)
    strings = {key for key, value in whole.items() if isinstance(value, list) and isinstance(value[0], str)}
    assert {"a.list", "tokenizer.ggml.tokens"} <= strings
    assert read_header(path)[0] == {key: value for key, value in whole.items() if key not in strings}
    cut = tmp_path / "cut.gguf"
    data = path.read_bytes()
    cut.write_bytes(data[: data.index(b"yy") + 1])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        read_header(cut)


@pytest.mark.parametrize("count", [2**40, 2**63])
def test_a_damaged_array_length_asks_for_no_memory(tmp_path: Path, count: int) -> None:
    """A count beyond the end of the file is refused before anything of its size is made."""
    path = write_gguf(tmp_path / "m.gguf", {"a.numbers": [1, 2, 3]})
    data = bytearray(path.read_bytes())
    at = data.index(b"a.numbers") + len(b"a.numbers") + 4 + 4
    data[at : at + 8] = count.to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(ModelError, match="damaged or incomplete"):
        read_metadata(path)


def test_other_files_and_other_versions_are_named_as_such(tmp_path: Path) -> None:
    """What is no GGUF file, or one of a version this reader does not know, is told apart from damage."""
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(64))
    with pytest.raises(ModelError, match="not a GGUF file"):
        read_metadata(path)
    path.write_bytes(b"GGUF" + (9).to_bytes(4, "little") + bytes(64))
    with pytest.raises(ModelError, match="version 9"):
        read_metadata(path)
    with pytest.raises(ModelError, match="No such file"):
        read_metadata(tmp_path / "none.gguf")
