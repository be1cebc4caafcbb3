"""Channels with the limits and keepalive of every hop."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio

from octavo.rpc.limits import CHANNEL_OPTIONS, RETRYING_CHANNEL_OPTIONS

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def open_channel(address: str, service_config: Mapping[str, Any] | None = None) -> grpc.aio.Channel:
    """Return an asyncio channel to `host:port`. Connects on first use.

    `service_config`: gRPC's own form. It alone decides on retries; without one nothing is ever sent twice.
    """
    return grpc.aio.insecure_channel(address, options=_options(address, service_config))


def open_sync_channel(address: str, service_config: Mapping[str, Any] | None = None) -> grpc.Channel:
    """Return a blocking channel to `host:port`, for any number of threads. Else as `open_channel`."""
    return grpc.insecure_channel(address, options=_options(address, service_config))


def _options(address: str, service_config: Mapping[str, Any] | None) -> tuple[tuple[str, int | str], ...]:
    # A pool of its own: channels of equal target would share one connection, and a stalled one would stall all.
    options: list[tuple[str, int | str]] = [("grpc.use_local_subchannel_pool", 1)]
    if address.rpartition(":")[0] in _LOOPBACK:
        # gRPC sends even these through the proxy that the variable http_proxy names, which cannot reach them.
        options.append(("grpc.enable_http_proxy", 0))
    if service_config is None:
        return (*CHANNEL_OPTIONS, *options)
    return (*RETRYING_CHANNEL_OPTIONS, *options, ("grpc.service_config", json.dumps(service_config)))
