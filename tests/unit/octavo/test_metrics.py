"""The metrics page: made on the event loop, at one moment."""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterable

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry, Counter, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from octavo.rpc.metrics import MetricsServer
from octavo.rpc.server import PortTakenError


class Balance:
    """Two numbers that are always equal between two turns of the loop; says on which thread it was read."""

    def __init__(self) -> None:
        self.left = self.right = 0
        self.threads: set[int] = set()

    def collect(self) -> Iterable[Metric]:
        """Yield both, one after the other."""
        self.threads.add(threading.get_ident())
        yield GaugeMetricFamily("left", "one", value=self.left)
        yield GaugeMetricFamily("right", "the other", value=self.right)


@pytest_asyncio.fixture
async def page() -> AsyncIterator[tuple[CollectorRegistry, MetricsServer]]:
    """A served, empty registry."""
    registry = CollectorRegistry()
    server = MetricsServer(registry, "127.0.0.1", 0)
    server.start()
    yield registry, server
    await server.stop()


async def scrape(server: MetricsServer, query: str = "") -> dict[str, float]:
    """Fetch the page as Prometheus does; samples without labels by name."""

    def fetch() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics{query}", timeout=10) as response:
            text: str = response.read().decode()
        return text

    families = text_string_to_metric_families(await asyncio.to_thread(fetch))
    return {sample.name: sample.value for family in families for sample in family.samples}


@pytest.mark.asyncio
async def test_a_page_is_one_moment_of_the_loop(page: tuple[CollectorRegistry, MetricsServer]) -> None:
    """While the loop changes two numbers together, no scrape ever sees them differ, and none reads off the loop."""
    registry, server = page
    balance = Balance()
    registry.register(balance)
    done = asyncio.Event()

    async def change() -> None:
        while not done.is_set():
            balance.left += 1
            balance.right += 1
            await asyncio.sleep(0)

    changing = asyncio.create_task(change())
    seen = [await scrape(server) for _ in range(20)]
    done.set()
    await changing
    assert all(each["left"] == each["right"] for each in seen)
    assert len({each["left"] for each in seen}) > 1
    assert balance.threads == {threading.get_ident()}


@pytest.mark.asyncio
async def test_some_names_can_be_asked_for(page: tuple[CollectorRegistry, MetricsServer]) -> None:
    """`name[]` restricts the page, and no series tells when a counter was created."""
    registry, server = page
    for name in ("a", "b"):
        Counter(name, "a counter", registry=registry).inc()
    assert await scrape(server) == {"a_total": 1.0, "b_total": 1.0}
    assert await scrape(server, "?name[]=a_total") == {"a_total": 1.0}


@pytest.mark.asyncio
async def test_a_format_that_nobody_knows_is_the_plain_one(page: tuple[CollectorRegistry, MetricsServer]) -> None:
    """A version that is no number, as of a scraper to come, is no failure of the scrape."""
    registry, server = page
    Counter("a", "a counter", registry=registry).inc()
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/metrics")
    request.add_header("accept", "application/openmetrics-text; version=abc")

    def fetch() -> tuple[str, str]:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.headers["content-type"], response.read().decode()

    content_type, text = await asyncio.to_thread(fetch)
    assert content_type.startswith("text/plain; version=0.0.4")
    assert "a_total 1.0" in text


@pytest.mark.asyncio
async def test_connections_left_open_keep_no_thread(
    page: tuple[CollectorRegistry, MetricsServer], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each has a thread, which ends where nothing comes for a while, before a request and within one; nothing is
    printed.
    """
    _, server = page
    monkeypatch.setattr(server._server.RequestHandlerClass, "timeout", 0.2)
    before = set(threading.enumerate())
    opened = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(4)]
    for _, writer in opened[:2]:
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: ")
    async with asyncio.timeout(30):
        for reader, writer in opened:
            assert await reader.read() == b""
            writer.close()
        while set(threading.enumerate()) - before:
            await asyncio.sleep(0.01)
    assert capfd.readouterr().err == ""


@pytest.mark.asyncio
async def test_a_connection_that_cannot_be_taken_is_not_tried_at_once(
    page: tuple[CollectorRegistry, MetricsServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where descriptors have run out: the thread would take a whole core from the event loop."""
    _, server = page
    pauses: list[float] = []
    monkeypatch.setattr("octavo.rpc.metrics.time.sleep", pauses.append)
    server._server.socket.settimeout(0)
    with pytest.raises(OSError, match="unavailable"):
        server._server.get_request()
    assert len(pauses) == 1
    assert pauses[0] > 0
    server._server.socket.settimeout(None)


@pytest.mark.asyncio
async def test_a_taken_port_is_named_with_its_flag() -> None:
    """The error says which address and which flag; after it nothing listens and no thread is left."""
    before = set(threading.enumerate())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"127.0.0.1:{port}.*--metrics-port"):
            MetricsServer(CollectorRegistry(), "127.0.0.1", port).start()
    assert set(threading.enumerate()) == before


@pytest.mark.asyncio
async def test_stop_frees_port_and_thread() -> None:
    """After stop the port can be bound again and the thread is gone."""
    before = set(threading.enumerate())
    server = MetricsServer(CollectorRegistry(), "127.0.0.1", 0)
    server.start()
    await scrape(server)
    await server.stop()
    again = MetricsServer(CollectorRegistry(), "127.0.0.1", server.port)
    again.start()
    await again.stop()
    assert not [each for each in set(threading.enumerate()) - before if "serve_forever" in each.name]
