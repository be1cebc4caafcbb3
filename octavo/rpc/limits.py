"""Limits of every hop, set once and used by servers and channels alike.

A message limit that differs between the two ends of a hop shows up as a failure of large requests only: there is one.
"""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message on any hop. A million token ids take 3 MB packed."""

MAX_METADATA_BYTES = 16 * 1024
"""Most bytes of metadata in one call: refused by the transport before anything of it is parsed."""

MAX_TERM = 2**63 - 1
"""Highest term a peer may tell, far above any clock's nanoseconds. One at the end of uint64 would leave no next one,
and no scheduler could ever start again beside whoever remembers it."""

_PING_SECONDS = 20
_PING_TIMEOUT_SECONDS = 10

MESSAGE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    # Above this the transport refuses for certain; between the two sizes it may refuse at random.
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
)

KEEPALIVE_OPTIONS: tuple[tuple[str, int], ...] = (
    # A peer that vanished without closing its socket is noticed within 30 seconds.
    ("grpc.keepalive_time_ms", _PING_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_SECONDS * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *MESSAGE_OPTIONS,
    *KEEPALIVE_OPTIONS,
    # Accept the keepalive pings that our own channels and common proxies send.
    ("grpc.http2.min_ping_interval_without_data_ms", _PING_SECONDS * 1000 // 2),
    # Two servers on one port would each take a share of the calls; the second must fail to start instead.
    ("grpc.so_reuseport", 0),
)

_CONNECTING_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also what one attempt may take, and set for that: a busy peer needs more than the pause between attempts.
    ("grpc.min_reconnect_backoff_ms", 5000),
    # Whoever waits for a service that starts again waits for this, too.
    ("grpc.max_reconnect_backoff_ms", 500),
    # gRPC's own is half a minute, in which the address of a pod that has been replaced would be tried in vain.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *MESSAGE_OPTIONS,
    *KEEPALIVE_OPTIONS,
    *_CONNECTING_OPTIONS,
    # Retries that re-send a started stream could repeat a request; our clients resume by record instead.
    ("grpc.enable_retries", 0),
)

RETRYING_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *MESSAGE_OPTIONS,
    *KEEPALIVE_OPTIONS,
    *_CONNECTING_OPTIONS,
    ("grpc.enable_retries", 1),
    # A request larger than the buffer is never sent again, and gRPC's own 256 KiB is less than a long prompt.
    ("grpc.per_rpc_retry_buffer_size", MAX_MESSAGE_BYTES),
)
"""For public clients, whose service config says what may be sent again. gRPC does so only before the answer has begun,
and the gateway begins none before it has accepted a request."""
