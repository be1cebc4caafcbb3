"""What a gateway is owed: numbering, keeping, redelivery and the bound."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.rpc.errors import ServiceError
from scheduler_svc.batch import Event, RequestDone, StepTokens, TokensOut
from scheduler_svc.convert import Frame
from scheduler_svc.output_streams import MAX_REMEMBERED_GATEWAYS, OutputStream, OutputStreams
from scheduler_svc.request_record import ChoiceEnd, FinishReason

GATEWAY = "g"
LIMIT = 1_000_000


def tokens(counter: int, first: int, *ids: int, choice: int = 0, end: ChoiceEnd | None = None) -> TokensOut:
    """An output of gateway g."""
    return TokensOut((GATEWAY, counter), choice, first, ids, None, end)


def done(counter: int, error: ServiceError | None = None) -> RequestDone:
    """An end of gateway g."""
    return RequestDone((GATEWAY, counter), error)


def add(stream: OutputStream, *events: Event) -> None:
    """Add the events of one step."""
    for event in events:
        stream.add(event)
    stream.flush()


def drain(stream: OutputStream) -> list[Frame]:
    """Take all frames there are."""
    frames = []
    while (frame := stream.next_frame()) is not None:
        frames.append(frame)
    return frames


def shape(frames: list[Frame]) -> list[tuple[int, list[tuple[int, int, list[int]]] | int]]:
    """Return each frame's number with its outputs, or with the request that it finishes."""
    return [
        (frame.finished.sequence, frame.finished.request)
        if frame.HasField("finished")
        else (
            frame.step_outputs.sequence,
            [(output.request, output.choice, list(output.token_ids)) for output in frame.step_outputs.outputs],
        )
        for frame in frames
    ]


def plain(*rows: tuple[int, int]) -> StepTokens:
    """One token for each of some requests' first choices, with its index."""
    counters, indexes = zip(*rows, strict=True)
    return StepTokens(GATEWAY, counters, [0] * len(rows), indexes, [100 + index for index in indexes])


def rows_of(frame: Frame) -> list[tuple[int, int, int]]:
    """Return the rows of a frame: request, index, token."""
    step = frame.step_outputs
    return list(zip(step.requests, step.token_indexes, step.token_ids, strict=True))


def test_steps_share_a_frame_while_no_choice_is_in_it_twice() -> None:
    """Rows of several steps go into one frame; a second row or output of a choice starts the next, in order."""
    stream = OutputStream(1, LIMIT)
    add(stream, plain((1, 0), (2, 4)))
    add(stream, plain((3, 7)))
    add(stream, plain((3, 8), (4, 0)))
    add(stream, tokens(4, 1, 50), plain((5, 2)))
    add(stream, plain((4, 2)))
    frames = drain(stream)
    assert [rows_of(frame) for frame in frames] == [
        [(1, 0, 100), (2, 4, 104), (3, 7, 107)],
        [(3, 8, 108), (4, 0, 100)],
        [(5, 2, 102)],
        [(4, 2, 102)],
    ]
    assert [len(frame.step_outputs.outputs) for frame in frames] == [0, 0, 1, 0]


def test_a_step_is_one_frame_and_ends_follow_it() -> None:
    """However outputs and ends are mixed in a step, all outputs share one frame and the ends come after it."""
    stream = OutputStream(1, LIMIT)
    length = ChoiceEnd(FinishReason.LENGTH)
    add(stream, tokens(1, 0, 5, end=length), done(1), tokens(2, 3, 6), tokens(3, 0, 7, choice=1, end=length), done(3))
    frames = drain(stream)
    assert shape(frames) == [(1, [(1, 0, [5]), (2, 0, [6]), (3, 1, [7])]), (2, 1), (3, 3)]
    assert [output.HasField("end") for output in frames[0].step_outputs.outputs] == [True, False, True]


def test_steps_of_different_executors_share_a_frame_that_is_not_taken_yet() -> None:
    """Outputs wait for the writer in one frame, until a choice would be in it twice."""
    stream = OutputStream(1, LIMIT)
    add(stream, tokens(1, 0, 5))
    add(stream, tokens(2, 0, 6))
    add(stream, tokens(1, 1, 7))
    assert shape(drain(stream)) == [(1, [(1, 0, [5]), (2, 0, [6])]), (2, [(1, 0, [7])])]


def test_rewinding_sends_again_what_is_not_acknowledged_and_nothing_else() -> None:
    """After an acknowledgement and a new stream the frames after it come again, the same, in order,
    then the new ones.
    """
    stream = OutputStream(1, LIMIT)
    for step in range(5):
        add(stream, tokens(1, step, step))
    first = drain(stream)
    add(stream, tokens(1, 5, 5), done(1))
    stream.acknowledge(2)
    stream.rewind()
    again = drain(stream)
    assert again[:3] == first[2:]
    assert [number for number, _ in shape(again)] == [3, 4, 5, 6, 7]


def test_a_frame_that_waits_to_be_sent_again_can_be_acknowledged() -> None:
    """An acknowledgement that was late for the old stream counts on the new one."""
    stream = OutputStream(1, LIMIT)
    for step in range(4):
        add(stream, tokens(1, step, step))
    drain(stream)
    stream.rewind()
    stream.acknowledge(3)
    assert [number for number, _ in shape(drain(stream))] == [4]
    stream.acknowledge(4)
    assert stream.num_bytes == 0


def test_what_was_never_sent_cannot_be_acknowledged() -> None:
    """Such an acknowledgement is INVALID_ARGUMENT and forgets nothing."""
    stream = OutputStream(1, LIMIT)
    add(stream, tokens(1, 0, 5))
    drain(stream)
    add(stream, tokens(1, 1, 5))
    with pytest.raises(ServiceError) as raised:
        stream.acknowledge(2)
    assert raised.value.code is grpc.StatusCode.INVALID_ARGUMENT
    stream.rewind()
    assert [number for number, _ in shape(drain(stream))] == [1, 2]


def test_an_ended_request_is_known_until_its_end_is_acknowledged() -> None:
    """From the event on, framed or not, and not after the acknowledgement of its Finished."""
    stream = OutputStream(1, LIMIT)
    add(stream, tokens(1, 0, 5), done(1))
    assert stream.owes_finish_of(1)
    drain(stream)
    stream.acknowledge(1)
    assert stream.finished_requests == {1}
    stream.acknowledge(2)
    assert not stream.owes_finish_of(1)


def test_past_the_bound_everything_is_dropped_and_the_writer_is_told() -> None:
    """A gateway that acknowledges nothing costs no more than the bound; the stream lapses and stays so."""
    stream = OutputStream(1, 10_000)
    told: list[bool] = []
    stream.notify = lambda: told.append(stream.lapsed)
    for step in range(2_000):
        add(stream, tokens(1, step, *range(100)))
        assert stream.num_bytes <= 10_000
    assert told[0] is False
    assert told[-1] is True
    assert stream.next_frame() is None
    assert stream.finished_requests == frozenset()


def test_streams_are_apart() -> None:
    """Events reach their own gateway's stream; those of a gateway without one are dropped."""
    streams = OutputStreams(LIMIT)
    mine = streams.open(GATEWAY)
    other = streams.open("other")
    streams.publish(
        [
            tokens(1, 0, 5),
            TokensOut(("other", 1), 0, 0, (9,), None, None),
            TokensOut(("nobody", 1), 0, 0, (9,), None, None),
        ]
    )
    assert shape(drain(mine)) == [(1, [(1, 0, [5])])]
    assert shape(drain(other)) == [(1, [(1, 0, [9])])]
    assert streams.open(GATEWAY) is mine


def test_numbers_go_on_after_a_stream_is_discarded() -> None:
    """A gateway that comes back never sees a number twice; of how many departed ones that is remembered is bounded."""
    streams = OutputStreams(LIMIT)
    stream = streams.open(GATEWAY)
    streams.publish([tokens(1, 0, 5)])
    drain(stream)
    streams.discard(GATEWAY)
    streams.publish([tokens(1, 1, 6)])
    again = streams.open(GATEWAY)
    assert again.next_frame() is None
    streams.publish([tokens(2, 0, 7)])
    assert shape(drain(again)) == [(2, [(2, 0, [7])])]
    for number in range(MAX_REMEMBERED_GATEWAYS + 1):
        streams.open(str(number))
        streams.discard(str(number))
    assert len(streams._next_sequences) == MAX_REMEMBERED_GATEWAYS


@given(st.lists(st.sampled_from(["step", "end", "write", "ack", "rewind"]), max_size=80), st.randoms())
def test_what_arrives_is_complete_and_in_order(actions: list[str], draw: object) -> None:
    """Whatever the order of steps, writes, acknowledgements and new streams, each token and end comes once, in order.

    The gateway drops frames whose number it has had.
    """
    stream = OutputStream(1, LIMIT)
    sent = dict.fromkeys(range(1, 4), 0)
    ended: list[int] = []
    got: dict[int, list[int]] = {counter: [] for counter in sent}
    got_ends: list[int] = []
    applied = 0

    def write() -> None:
        nonlocal applied
        frame = stream.next_frame()
        if frame is None:
            return
        number = frame.step_outputs.sequence or frame.finished.sequence
        assert number <= applied + 1
        if number == applied + 1:
            applied = number
            if frame.HasField("finished"):
                got_ends.append(frame.finished.request)
            for output in frame.step_outputs.outputs:
                assert output.first_token_index == len(got[output.request])
                got[output.request] += output.token_ids

    for action in actions:
        live = [counter for counter in sent if counter not in ended]
        if action == "step":
            add(stream, *(tokens(counter, sent[counter], sent[counter]) for counter in live))
            for counter in live:
                sent[counter] += 1
        elif action == "end" and live:
            add(stream, tokens(live[0], sent[live[0]], end=ChoiceEnd(FinishReason.CANCELLED)), done(live[0]))
            ended.append(live[0])
        elif action == "write":
            write()
        elif action == "ack":
            stream.acknowledge(draw.randint(0, applied))  # type: ignore[attr-defined]
        elif action == "rewind":
            stream.rewind()
    stream.rewind()
    for _ in range(200):
        write()
    assert got == {counter: list(range(count)) for counter, count in sent.items()}
    assert got_ends == ended
    stream.acknowledge(applied)
    assert stream.num_bytes == 0
