"""Checksums of frames: what changes on the way is noticed, whatever it is."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.rpc.seal import Damaged, SealCheck, opened, seal

OPEN = opened(scheduler_pb2.AttachResponse.FromString)


def frame(*token_ids: int) -> scheduler_pb2.AttachResponse:
    """One step's outputs."""
    outputs = scheduler_pb2.StepOutputs(sequence=7, requests=[1] * len(token_ids), token_ids=token_ids)
    return scheduler_pb2.AttachResponse(step_outputs=outputs)


def test_a_sealed_frame_is_what_it_was() -> None:
    """But for the checksum, which is a field of the contract."""
    read = OPEN(seal(frame(5, 6)))
    assert read.HasField("checksum")
    read.ClearField("checksum")
    assert read == frame(5, 6)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=8), st.integers(0, 2**32), st.integers(1, 12))
def test_a_changed_frame_never_passes(token_ids: list[int], seed: int, num_bytes: int) -> None:
    """Bytes of it changed anywhere: it is Damaged, or it lost its seal, which a stream with seals refuses."""
    draw = random.Random(seed)
    data = bytearray(seal(frame(*token_ids)))
    for _ in range(num_bytes):
        data[draw.randrange(len(data))] ^= draw.randrange(1, 256)
    if bytes(data) == seal(frame(*token_ids)):
        return
    check = SealCheck()
    assert check.is_whole(OPEN(seal(frame(1))))
    assert not check.is_whole(OPEN(bytes(data)))


def test_peers_without_seals_are_understood() -> None:
    """A stream on which no frame is sealed is read as it is; from the first sealed one on all must be."""
    check = SealCheck()
    plain = frame(5).SerializeToString()
    assert check.is_whole(OPEN(plain))
    assert check.is_whole(OPEN(seal(frame(5))))
    assert not check.is_whole(OPEN(plain))
    assert isinstance(OPEN(b"\xff\xff"), Damaged)
