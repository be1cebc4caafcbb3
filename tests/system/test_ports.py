"""Ports of the tests' own processes: a slice for each process."""

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
    """However many are taken: what one gives is not given by the other."""
    one, other = ({port for _ in range(1000) for port in each.take(3)} for each in slices)
    assert not one & other


def test_ports_come_again_last(slices: list[PortSlice]) -> None:
    """Whoever still dials a port of a killed service meets nobody for as long as there are others."""
    first = slices[0].take(1)[0]
    between = 0
    while slices[0].take(1)[0] != first:
        between += 1
    assert between > 300


def test_a_port_that_another_has_is_left_out(slices: list[PortSlice]) -> None:
    """Ports are consecutive, and every one of them can be bound."""
    with socket.create_server(("127.0.0.1", slices[0].take(20)[10])) as taken:
        for _ in range(1000):
            ports = slices[0].take(4)
            assert list(ports) == list(range(ports[0], ports[0] + 4))
            assert taken.getsockname()[1] not in ports


def test_more_than_there_are_is_refused(slices: list[PortSlice]) -> None:
    """The search ends."""
    with pytest.raises(RuntimeError, match="no 400 consecutive ports"):
        slices[0].take(400)
