"""The metrics page that every service serves for Prometheus.

A page is made on the event loop in one go. Whatever the loop's code changes together is therefore on the page together:
accepted = finished + failed + cancelled + live holds in every scrape, not only on average. Gauges are not kept: a
collector reads the live state when it is asked.

Names follow the Prometheus conventions (base units, `_total`), with the prefix `octavo_`. Labels take their values from
sets that Octavo fixes, never from what a client sends.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import prometheus_client
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from octavo.rpc.server import PortTakenError

SCRAPE_TIMEOUT = 10.0
"""Seconds that a scrape waits for the event loop; then it fails, as it should: the service is stuck."""

IDLE_TIMEOUT = 30.0
"""Seconds that a connection to a page of its own may say nothing."""

_ACCEPT_PAUSE = 0.1

TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
"""Bounds for the time between two tokens, and for a step."""
REQUEST_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
"""Bounds for the waits and the life of a request."""
HOP_SECONDS = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
"""Bounds for the time between two processes, and for the small parts of a step."""

# The start time of each series, as a series of its own, would double the page.
prometheus_client.disable_created_metrics()


_Encode = Callable[[Any], bytes]


def encoder_for(accept: str) -> tuple[_Encode, str]:
    """Return what writes a page in the format that an Accept header asks for, and its content type; where the header
    says nothing that can be understood, the plain text format.
    """
    return choose_encoder(_understood(accept))


class Distribution:
    """How often each range of values was seen. Changed on the event loop alone.

    An observation costs a fifth of what prometheus_client's own histogram takes, since there is no lock and the bucket
    is found by bisection; a step makes eight of them, and a gateway one for every token.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: upper ends of the buckets, included, ascending, without +Inf."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Put it on a page under these values of the family's labels."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        family.add_metric(labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)


class DistributionFamily(Collector):
    """One Distribution for each value of a label, or a single one where there is no label."""

    def __init__(
        self, name: str, documentation: str, bounds: Sequence[float], *, label: str = "", values: Iterable[str] = ()
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = (label,) if label else ()
        keys = [(value,) for value in values] if label else [()]
        self._members: dict[tuple[str, ...], Distribution] = {key: Distribution(bounds) for key in keys}

    def member(self, *values: str) -> Distribution:
        """Return the distribution of a value of the label."""
        return self._members[values]

    def describe(self) -> Iterable[Metric]:
        """Yield the family without its values."""
        yield HistogramMetricFamily(self._name, self._documentation, labels=self._labels)

    def collect(self) -> Iterable[Metric]:
        """Yield the family."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, distribution in self._members.items():
            distribution.add_to(family, values)
        yield family


class MetricsServer:
    """Serves a registry at http://BIND:PORT/metrics. Make it anywhere; `start` and `stop` on the event loop."""

    def __init__(self, registry: CollectorRegistry, bind: str, port: int) -> None:
        """`port` 0 picks a free one."""
        self.port = port
        self._registry = registry
        self._bind = bind

    def start(self) -> None:
        """Listen, on a thread of its own. Raises PortTakenError."""
        collector = _OnLoop(self._registry, asyncio.get_running_loop())
        try:
            # An address in brackets is how gRPC wants IPv6; sockets want it bare.
            self._server, self._thread = prometheus_client.start_wsgi_server(
                self.port, self._bind.strip("[]"), collector
            )
        except OSError as error:
            address = f"{self._bind}:{self.port}"
            raise PortTakenError(
                f"cannot listen on {address} for metrics ({error.strerror}): choose another port with --metrics-port "
                "(0 picks a free one)"
            ) from error
        self.port = self._server.server_port
        self._server.set_app(_app_of(self._server.get_app()))
        self._server.RequestHandlerClass = _patient(self._server.RequestHandlerClass)
        self._server.get_request = _unhurried(self._server.get_request)  # type: ignore[method-assign]

    async def stop(self) -> None:
        """Stop listening. Scrapes under way are answered while the loop still runs."""
        ended = asyncio.ensure_future(asyncio.to_thread(self._server.shutdown))
        while not (await asyncio.wait({ended}, timeout=0.005))[0]:
            # A connection wakes the server up, which would look for its end twice a second only.
            with contextlib.suppress(OSError):
                socket.create_connection((self._bind.strip("[]"), self.port), timeout=1).close()
        await ended
        self._server.server_close()
        self._thread.join()


def _app_of(app: Any) -> Any:
    """Return prometheus_client's application, asked for nothing that it fails on."""

    def asked(environ: dict[str, Any], start_response: Any) -> Any:
        return app({**environ, "HTTP_ACCEPT": _understood(environ.get("HTTP_ACCEPT", ""))}, start_response)

    return asked


def _understood(accept: str) -> str:
    try:
        choose_encoder(accept)
    except Exception:  # it compares versions, whatever they are
        return ""
    return accept


def _patient(handler: Any) -> Any:
    """Return a handler whose connections are closed where nothing comes for a while: each has a thread."""

    class Handler(handler):  # type: ignore[misc]  # the class is private to prometheus_client
        timeout = IDLE_TIMEOUT

        def handle(self) -> None:
            with contextlib.suppress(OSError):
                super().handle()

    return Handler


def _unhurried(accept: Callable[[], Any]) -> Callable[[], Any]:
    """Return what takes a connection in, or waits a while: without a descriptor for it, it would be tried again at once
    and for ever.
    """

    def accept_or_wait() -> Any:
        try:
            return accept()
        except OSError:
            time.sleep(_ACCEPT_PAUSE)
            raise

    return accept_or_wait


class _Collects(Protocol):
    def collect(self) -> Iterable[Metric]: ...


class _OnLoop:
    """What prometheus_client asks from a thread of its own, answered on the event loop."""

    def __init__(self, source: _Collects, loop: asyncio.AbstractEventLoop) -> None:
        self._source = source
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        """Return every metric, taken at one moment of the loop."""
        answer = asyncio.run_coroutine_threadsafe(self._collect(), self._loop)
        try:
            return answer.result(SCRAPE_TIMEOUT)
        except concurrent.futures.TimeoutError:
            answer.cancel()
            raise

    def restricted_registry(self, names: Iterable[str]) -> _OnLoop:
        """Return the same for some names only (`?name[]=`)."""
        assert isinstance(self._source, CollectorRegistry)
        return _OnLoop(self._source.restricted_registry(names), self._loop)

    async def _collect(self) -> list[Metric]:
        # No await inside: nothing else runs while the page is made.
        return list(self._source.collect())
