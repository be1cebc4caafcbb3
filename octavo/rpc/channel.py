"""Channels with the limits and keepalive of every hop."""

from __future__ import annotations

import grpc.aio

from octavo.rpc.limits import CHANNEL_OPTIONS


def open_channel(address: str) -> grpc.aio.Channel:
    """Return an asyncio channel to `host:port`. Connects on first use."""
    # A pool of its own: channels of equal target would share one connection, and a stalled one would stall all.
    options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
    return grpc.aio.insecure_channel(address, options=options)
