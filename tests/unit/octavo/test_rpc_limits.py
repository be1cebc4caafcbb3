"""The options of channels and servers."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpc._cython import cygrpc

from octavo.rpc.limits import CHANNEL_OPTIONS, RETRYING_CHANNEL_OPTIONS, SERVER_OPTIONS

_CORE = Path(cygrpc.__file__).read_bytes()


@pytest.mark.parametrize(
    "name", sorted({name for name, _ in CHANNEL_OPTIONS + RETRYING_CHANNEL_OPTIONS + SERVER_OPTIONS})
)
def test_grpc_knows_every_option(name: str) -> None:
    """gRPC ignores an option that it does not know, without a word: a misspelt one would hold nobody to anything."""
    assert name.encode() + b"\0" in _CORE


def test_servers_bear_the_pings_that_channels_send() -> None:
    """A server that takes pings to be too many ends the connection, under an idle chat as under an idle cell."""
    server, channel = dict(SERVER_OPTIONS), dict(CHANNEL_OPTIONS)
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < channel["grpc.keepalive_time_ms"]
    assert server["grpc.keepalive_permit_without_calls"] == 1
