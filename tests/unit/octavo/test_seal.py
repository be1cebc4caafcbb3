"""Checksums of frames: what changes on the way is noticed, whatever it is."""

from __future__ import annotations

import random

from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.rpc.seal import (
    Damaged,
    DamagedRequest,
    SealCheck,
    SealedAnswers,
    opened,
    opened_request,
    seal,
    sealed_request,
)
from octavo.v1 import inference_pb2

OPEN_REQUEST = opened_request(inference_pb2.GenerateRequest.FromString)
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


def changed(data: bytes, draw: random.Random, num_bytes: int) -> bytes:
    """Return bytes some of which are others."""
    result = bytearray(data)
    for _ in range(num_bytes):
        result[draw.randrange(len(result))] ^= draw.randrange(1, 256)
    return bytes(result)


def request_of(text: str) -> inference_pb2.GenerateRequest:
    """A request with a field behind and one before the checksum's number."""
    request = inference_pb2.GenerateRequest(model="m", text=text)
    request.resume_grace.seconds = 30
    return request


def test_a_sealed_request_is_what_it_was() -> None:
    """But for the checksum; its bytes are those that protobuf itself would write, so any language can seal one."""
    read = OPEN_REQUEST(sealed_request(request_of("x")))
    assert read.SerializeToString() == sealed_request(request_of("x"))
    read.ClearField("checksum")
    assert read == request_of("x")
    assert OPEN_REQUEST(request_of("x").SerializeToString()) == request_of("x")


@given(st.text(max_size=20), st.integers(0, 2**32), st.integers(1, 6))
def test_a_changed_request_is_never_taken_for_sealed(text: str, seed: int, num_bytes: int) -> None:
    """It is damaged, no message at all, or one without a seal: that is one of another version, or of a stub's."""
    data = sealed_request(request_of(text))
    other = changed(data, random.Random(seed), num_bytes)
    if other == data:
        return
    try:
        read = OPEN_REQUEST(other)
    except DecodeError:
        return
    assert isinstance(read, DamagedRequest) or not read.HasField("checksum")


def answers(count: int) -> list[inference_pb2.GenerateResponse]:
    """Answers of which many are alike."""
    return [inference_pb2.GenerateResponse(delta=inference_pb2.Delta(token_ids=[5, 6])) for _ in range(count)]


def read_all(request: bytes, datas: list[bytes]) -> list[object]:
    """Read answers up to the first that is damaged."""
    read_one = SealedAnswers.to(request).opened(inference_pb2.GenerateResponse.FromString)
    read: list[object] = []
    for data in datas:
        read.append(read_one(data))
        if isinstance(read[-1], Damaged):
            break
    return read


def test_sealed_answers_are_what_they_were() -> None:
    """In their order; and without seals they are read as they are, until one is sealed."""
    request = sealed_request(request_of("x"))
    sealing = SealedAnswers(OPEN_REQUEST(request).checksum)
    read = read_all(request, [sealing.seal(each) for each in answers(4)])
    for each in read:
        assert isinstance(each, inference_pb2.GenerateResponse)
        each.ClearField("checksum")
    assert read == answers(4)
    plain = [each.SerializeToString() for each in answers(2)]
    assert read_all(request, plain) == answers(2)
    late = SealedAnswers.to(request).seal(answers(1)[0])
    assert isinstance(read_all(request, [late, *plain])[-1], Damaged)


@given(
    st.sampled_from(["missing", "twice", "swapped", "another's", "changed"]), st.integers(1, 8), st.integers(0, 2**32)
)
def test_no_answer_is_missing_changed_or_anothers(fault: str, at: int, seed: int) -> None:
    """The first answer that is not the next one of this very stream is damaged, however alike they all are."""
    request, other_request = sealed_request(request_of("x")), sealed_request(request_of("y"))
    sealing, another = SealedAnswers.to(request), SealedAnswers.to(other_request)
    datas = [sealing.seal(each) for each in answers(10)]
    others = [another.seal(each) for each in answers(10)]
    match fault:
        case "missing":
            del datas[at]
        case "twice":
            datas.insert(at, datas[at - 1])
        case "swapped":
            datas[at], datas[at - 1] = datas[at - 1], datas[at]
            at -= 1
        case "another's":
            datas[at] = others[at]
        case _:
            whole = datas[at]
            datas[at] = changed(whole, random.Random(seed), 2)
            if datas[at] == whole:
                return
    read = read_all(request, datas)
    assert len(read) == at + 1
    assert isinstance(read[-1], Damaged)
