"""A peer that is a server of its own: started on a free port of this machine, waited for, stopped."""

from __future__ import annotations

import ctypes
import http.client
import signal
import socket
import subprocess
import time

_START_SECONDS = 900.0
_STOP_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(command: list[str], port: int, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a server; return it once GET /health is answered with 200. Raises RuntimeError where it ends or hangs."""
    server = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent)
    try:
        _wait(server, command[0], port)
    except BaseException:
        stop(server)
        raise
    return server


def stop(server: subprocess.Popen[bytes]) -> None:
    """End a server, by force where it does not end by itself."""
    server.terminate()
    try:
        server.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _wait(server: subprocess.Popen[bytes], name: str, port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not _is_healthy(port):
        if server.poll() is not None:
            raise RuntimeError(f"{name} ended with code {server.returncode} before it served")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} did not serve within {_START_SECONDS:.0f} s")
        time.sleep(0.1)


def _end_with_parent() -> None:
    """Let the server end where this runner is killed and can stop nobody, by prctl(2)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
