"""Ports of the tests' own processes: a slice for each process, outside those that the system gives."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from ports import PortSlice


@pytest.fixture
def slices() -> Iterator[list[PortSlice]]:
    """Two that live at once, as of two processes."""
    both = [PortSlice(), PortSlice()]
    yield both
    for each in both:
        each.close()


def test_two_slices_never_meet(slices: list[PortSlice]) -> None:
    """However many are taken: what one gives is not given by the other, nor, as Linux is set up, by the system."""
    one, other = ({port for _ in range(1000) for port in each.take(3)} for each in slices)
    assert not one & other
    assert 1024 < min(one | other) <= max(one | other) < 32768


def test_ports_come_again_last(slices: list[PortSlice]) -> None:
    """Whoever still dials a port of a killed service meets nobody for as long as there are others."""
    seen = [port for _ in range(130) for port in slices[0].take(3)]
    assert len(set(seen)) == len(seen) == 390
    assert list(slices[0].take(20)) == list(range(seen[0], seen[0] + 20))


def test_a_port_that_another_has_is_left_out(slices: list[PortSlice]) -> None:
    """Ports are consecutive, and every one of them can be bound."""
    before = slices[0].take(1)[0]
    with socket.create_server(("127.0.0.1", before + 2)):
        assert list(slices[0].take(2)) == [before + 3, before + 4]


def test_more_than_there_are_is_refused(slices: list[PortSlice]) -> None:
    """The search ends."""
    with pytest.raises(RuntimeError, match="no 400 consecutive ports"):
        slices[0].take(400)
