"""The contract's messages in the executor's words and back."""

from __future__ import annotations

import numpy as np
import pytest

from executor_svc import convert
from executor_svc.batch import (
    NewSequence,
    PromptLogprobs,
    RowStatus,
    SamplingParams,
    StageTimings,
    StepBatch,
    StepFailure,
    StepFailureReason,
    StepResult,
    StoppingParams,
    TokenLogprobs,
)
from octavo.internal.executor.v1 import executor_pb2 as pb
from octavo.internal.executor.v1 import sequence_pb2
from octavo.rpc.logprobs import unpack_floats, unpack_ids


def test_every_field_of_a_batch_arrives() -> None:
    """No field of StepBatch and the records in it is lost or swapped; an unset number of logprobs is not 0."""
    sampling = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.75,
        "seed": 2**64 - 1,
        "typical_p": 0.375,
        "bias_token_ids": (2**32 - 1, 3),
        "bias_values": (-1.5, 2.0),
    }
    words = ((4, 2**32 - 1), (5,))
    stopping = sequence_pb2.StoppingParams(max_tokens=9, min_tokens=2, stop_token_ids=[3, 4])
    message = pb.StepBatch(
        session=2**63,
        step=4,
        released_handles=[8, 9],
        new_sequences=[
            pb.NewSequence(
                handle=5,
                token_ids=[1, 2, 2**32 - 1],
                num_prompt_tokens=2,
                choice=6,
                sampling=sequence_pb2.SamplingParams(
                    **sampling,
                    top_logprobs=0,
                    prompt_logprobs=0,
                    bad_words=[sequence_pb2.TokenSequence(token_ids=word) for word in words],
                ),
                stopping=stopping,
            ),
            pb.NewSequence(
                handle=6, token_ids=[1], sampling=sequence_pb2.SamplingParams(**sampling), stopping=stopping
            ),
        ],
        handles=[5, 6],
        num_scheduled_tokens=[3, 1],
        num_computed_tokens=[0, 10],
        num_new_blocks=[2, 1],
        new_blocks=[11, 12, 13],
    )
    stops = StoppingParams(9, 2, (3, 4))
    expected = StepBatch(
        session=2**63,
        step=4,
        released_handles=(8, 9),
        new_sequences=(
            NewSequence(
                5,
                (1, 2, 2**32 - 1),
                2,
                6,
                SamplingParams(**sampling, top_logprobs=0, prompt_logprobs=0, bad_words=words),
                stops,
            ),
            NewSequence(6, (1,), 0, 0, SamplingParams(**sampling), stops),
        ),
        handles=(5, 6),
        num_scheduled_tokens=(3, 1),
        num_computed_tokens=(0, 10),
        num_new_blocks=(2, 1),
        new_blocks=(11, 12, 13),
    )
    assert convert.step_batch(pb.StepBatch.FromString(message.SerializeToString())) == expected


def test_an_older_gateways_typical_p_is_off() -> None:
    """typical_p 0, which a gateway that does not know the field sends, is 1."""
    message = pb.StepBatch(handles=[5], num_scheduled_tokens=[1], num_computed_tokens=[0], num_new_blocks=[0])
    message.new_sequences.add(handle=5, token_ids=[1], sampling=sequence_pb2.SamplingParams(top_p=1))
    (sequence,) = convert.step_batch(message).new_sequences
    assert sequence.sampling == SamplingParams(temperature=0, repetition_penalty=0)


def test_every_field_of_a_result_leaves() -> None:
    """Columns, packed logprobs of outputs and prompts under their row, and the timings come out of a frame."""
    # As the op gives them: a part of a wider array.
    top_ids = np.array([[7, 3, 2**32 - 1, 0], [1, 2, 3, 0]])[:, :3]
    logprobs = TokenLogprobs(-0.5, np.array([7, 3]), np.array([-0.25, -1.5], dtype=np.float32))
    result = StepResult(
        session=1,
        step=2,
        handles=(4, 5, 6, 7, 8),
        statuses=tuple(RowStatus),
        sampled=(9, None, None, None, None),
        logprobs={0: logprobs},
        prompt_logprobs={
            3: PromptLogprobs(2, np.array([-2.0, -4.0], dtype=np.float32), top_ids, -top_ids.astype(np.float32) / 8),
            1: PromptLogprobs(
                1,
                np.array([-0.75], dtype=np.float32),
                np.zeros((1, 0), dtype=np.int64),
                np.zeros((1, 0), dtype=np.float32),
            ),
        },
        timings=StageTimings(queue=1.5, prepare=0.25, forward=0.125, sample=1e-9, idle=2e-5, ahead=3e-4),
    )
    message = convert.step_result(result).step_result
    assert (message.session, message.step, list(message.handles)) == (1, 2, [4, 5, 6, 7, 8])
    assert list(message.statuses) == [
        pb.ROW_STATUS_OK,
        pb.ROW_STATUS_SKIPPED,
        pb.ROW_STATUS_NAN,
        pb.ROW_STATUS_BAD_INPUT,
        pb.ROW_STATUS_DESYNC,
    ]
    assert (list(message.num_sampled_tokens), list(message.token_ids)) == ([1, 0, 0, 0, 0], [9])
    (entry,) = message.logprobs
    assert (entry.row, entry.columns.num_top, unpack_floats(entry.columns.sampled)) == (0, 2, (-0.5,))
    assert (unpack_ids(entry.columns.top_token_ids), unpack_floats(entry.columns.top_logprobs)) == (
        (7, 3),
        (-0.25, -1.5),
    )
    plain, wide = message.prompt_logprobs
    assert (plain.row, plain.first_token_index, plain.columns.num_top) == (1, 1, 0)
    assert (unpack_floats(plain.columns.sampled), plain.columns.top_token_ids) == ((-0.75,), b"")
    assert (wide.row, wide.first_token_index, wide.columns.num_top) == (3, 2, 3)
    assert unpack_floats(wide.columns.sampled) == (-2.0, -4.0)
    assert unpack_ids(wide.columns.top_token_ids) == (7, 3, 2**32 - 1, 1, 2, 3)
    assert unpack_floats(wide.columns.top_logprobs) == (-0.875, -0.375, -(2.0**29), -0.125, -0.25, -0.375)
    assert message.timings.queue.ToNanoseconds() == 1_500_000_000
    assert message.timings.prepare.ToNanoseconds() == 250_000_000
    assert message.timings.forward.ToNanoseconds() == 125_000_000
    assert message.timings.sample.ToNanoseconds() == 1
    assert message.timings.idle.ToNanoseconds() == 20_000
    assert message.timings.ahead.ToNanoseconds() == 300_000
    unknown = convert.step_result(StepResult(1, 2)).step_result
    assert not unknown.timings.HasField("idle")
    assert not unknown.timings.HasField("ahead")
    assert not message.HasField("failure")


@pytest.mark.parametrize("reason", list(StepFailureReason))
def test_failures_keep_their_kind(reason: StepFailureReason) -> None:
    """Every kind of whole-step failure has its value on the wire, with the message."""
    message = convert.step_result(StepResult(1, 2, failure=StepFailure(reason, "why"))).step_result
    name = pb.StepFailureReason.Name(message.failure.reason)
    assert (name, message.failure.message) == (f"STEP_FAILURE_REASON_{reason.name}", "why")
    assert not message.handles
