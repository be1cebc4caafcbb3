"""A stand-in for a service, run as a process: it answers health checks and writes down what happens to it.

python fake_service.py NAME PORT EVENTS MODE: NAME and what it did go as lines to the file EVENTS. MODE: "serve"; "die"
ends with code 3 after one log line; "stubborn" ignores SIGTERM; "slow" listens and never serves.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


def main(name: str, port: str, events: str, mode: str) -> int:
    """Behave as `mode` says until SIGTERM."""

    def note(what: str) -> None:
        with Path(events).open("a") as file:
            file.write(f"{name} {what}\n")

    # The bytes of this pipe are the signals. An Event set by a handler can hang: where the signal comes while `wait`
    # holds the Event's lock, and where another thread receives it.
    signals, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: None)
    note("starts")
    if mode == "die":
        record = {"time": "2026-01-01T10:20:30.456+00:00", "level": "error", "message": "no weights", "path": "w.gguf"}
        print(json.dumps(record), file=sys.stderr)
        return 3
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    servicer = health.HealthServicer()
    status = health_pb2.HealthCheckResponse.NOT_SERVING if mode == "slow" else health_pb2.HealthCheckResponse.SERVING
    servicer.set("", status)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    while os.read(signals, 1) and mode == "stubborn":
        note("ignores")
    note("stops")
    server.stop(0).wait()
    note("ended")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
