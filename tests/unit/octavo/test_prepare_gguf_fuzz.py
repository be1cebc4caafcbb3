"""Damaged GGUF files as sources for `octavo prepare`: whatever bytes they hold, a source or a ModelError."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_samples import CONTROL, byte_level_metadata, sentencepiece_metadata, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.models import ModelError
from octavo.models.gguf_source import read_gguf
from octavo.models.tokenizer_fit import fit_tokenizer


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the bytes of a file of each kind of vocabulary."""
    byte_level = byte_level_metadata(extra_tokens=(("<|end|>", CONTROL),))
    metadata = byte_level if request.param == "byte-level" else sentencepiece_metadata()
    metadata |= {"tokenizer.chat_template": "{{ messages }}", "general.sampling.temp": 0.5}
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", metadata).read_bytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    at=st.integers(0, 1 << 16) | st.integers(0, 400),
    new=st.binary(min_size=1, max_size=12) | st.sampled_from([b"\xff" * 8, b"\0" * 8]),
    keep=st.none() | st.integers(0, 1 << 16),
)
def test_a_damaged_file_is_read_or_refused(sound: bytes, tmp_path: Path, at: int, new: bytes, keep: int | None) -> None:
    """Bytes changed or cut anywhere in the metadata: never another error, and the error names the file."""
    at %= len(sound)
    damaged = sound[:at] + new + sound[at + len(new) :]
    path = tmp_path / "model.gguf"
    path.write_bytes(damaged if keep is None else damaged[: keep % (len(damaged) + 1)])
    refusal = None
    try:
        fit_tokenizer(read_gguf(path), print)
    except ModelError as error:
        refusal = str(error)
    assert refusal is None or "model.gguf" in refusal
