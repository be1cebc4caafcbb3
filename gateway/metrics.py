"""What the gateway counts, and the metrics page made of it.

Counts are plain numbers, changed on the event loop together with the state that they describe; the page is made on the
loop too. So accepted = finished + failed + cancelled + live on every page, and a token costs a fraction of a
microsecond, where prometheus_client's own counters and histograms, which lock, take several times that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import grpc
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from gateway.ending import ALL_ENDINGS, FAILED, Ending
from octavo.rpc.metrics import REQUEST_SECONDS, TOKEN_SECONDS, Distribution


class ModelMetrics:
    """The counts of one model's requests. Changed by LiveRequests and its records alone."""

    def __init__(self) -> None:
        self.num_accepted = 0
        self.num_ended = dict.fromkeys(ALL_ENDINGS, 0)
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.first_token = Distribution(REQUEST_SECONDS)
        self.inter_token = Distribution(TOKEN_SECONDS)
        self.whole = Distribution(REQUEST_SECONDS)

    def accept(self, prompt_tokens: int) -> None:
        """Count a request whose record has just been made."""
        self.num_accepted += 1
        self.prompt_tokens += prompt_tokens

    def take(self, num_tokens: int, gap: float | None) -> None:
        """Count tokens that arrived for one choice, `gap` seconds after those before them; None: its first."""
        self.completion_tokens += num_tokens
        if gap is not None:
            self.inter_token.observe(gap)

    def end(self, ending: Ending, seconds: float) -> None:
        """Count the end of a request that was accepted `seconds` ago."""
        self.num_ended[ending] += 1
        self.whole.observe(seconds)


class GatewayMetrics:
    """The counts of a gateway. The labels are fixed when it is made: nothing that a client sends adds one."""

    def __init__(self, models: Iterable[str]) -> None:
        """`models`: the names of those served."""
        self.by_model = {name: ModelMetrics() for name in models}
        self.num_refused = dict.fromkeys(FAILED, 0)

    def refuse(self, code: grpc.StatusCode) -> None:
        """Count a request that was refused before its acceptance."""
        self.num_refused[code if code in self.num_refused else grpc.StatusCode.UNKNOWN] += 1


class PermitCount(Protocol):
    """How many choices may be served at once, and how many more there is room for."""

    maximum: int

    @property
    def num_free(self) -> int:
        """Permits that nobody holds."""


class GatewayCollector(Collector):
    """The page: what was counted, and what is live at the moment of the scrape."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        live_by_model: Callable[[], Mapping[str, int]],
        permits: PermitCount,
        is_connected: Callable[[], bool],
    ) -> None:
        """`live_by_model`: live requests, models with none left out. `is_connected`: the scheduler is attached."""
        self._metrics = metrics
        self._permits = permits
        self._live_by_model = live_by_model
        self._is_connected = is_connected

    def describe(self) -> Iterable[Metric]:
        """Return what `collect` does: a registry wants the names."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Yield every series, those that are still 0 too."""
        by_model = self._metrics.by_model
        yield _counter(
            "octavo_requests_accepted",
            "Requests that passed every check and got a record in this gateway, which is when they go to the "
            "scheduler; one that the scheduler then rejects has failed, one that is submitted again is the same "
            "request. Always finished + failed + cancelled + live",
            ("model",),
            {(name,): each.num_accepted for name, each in by_model.items()},
        )
        yield _counter(
            "octavo_requests_ended",
            "Accepted requests that have ended, by outcome (finished, failed, cancelled) and reason: stop or length "
            "(of any choice); the gRPC code of the error; who wanted the end",
            ("model", "outcome", "reason"),
            {
                (name, ending.outcome.value, ending.reason): count
                for name, each in by_model.items()
                for ending, count in each.num_ended.items()
            },
        )
        live = self._live_by_model()
        yield _gauge(
            "octavo_requests_live",
            "Accepted requests that have not ended",
            ("model",),
            {(name,): live.get(name, 0) for name in by_model},
        )
        yield _counter(
            "octavo_requests_refused",
            "Requests refused before acceptance, by the gRPC code of the error",
            ("code",),
            {(code.name.lower(),): count for code, count in self._metrics.num_refused.items()},
        )
        yield _counter(
            "octavo_prompt_tokens",
            "Tokens of the prompts of accepted requests",
            ("model",),
            {(name,): each.prompt_tokens for name, each in by_model.items()},
        )
        yield _counter(
            "octavo_completion_tokens",
            "Tokens that came from the scheduler for live requests, whether they ended well or not",
            ("model",),
            {(name,): each.completion_tokens for name, each in by_model.items()},
        )
        yield _histogram(
            "octavo_time_to_first_token_seconds",
            "Time from acceptance to the arrival of a request's first token",
            {name: each.first_token for name, each in by_model.items()},
        )
        yield _histogram(
            "octavo_inter_token_seconds",
            "Time between two arrivals of tokens of one choice; an arrival has several tokens where they came at once",
            {name: each.inter_token for name, each in by_model.items()},
        )
        yield _histogram(
            "octavo_request_seconds",
            "Time from acceptance to the end of the call, however it ended",
            {name: each.whole for name, each in by_model.items()},
        )
        permits = self._permits
        what = "Choices that may be served at once (--max-requests)"
        yield GaugeMetricFamily("octavo_permits_maximum", what, value=permits.maximum)
        what = "Choices that there is room for now; an answer holds its permits until it has left"
        yield GaugeMetricFamily("octavo_permits_free", what, value=permits.num_free)
        connected = "1 while the scheduler is attached, else 0"
        yield GaugeMetricFamily("octavo_scheduler_connected", connected, value=int(self._is_connected()))


def _counter(
    name: str, text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _gauge(name: str, text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _histogram(name: str, text: str, by_model: Mapping[str, Distribution]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=("model",))
    for model, distribution in by_model.items():
        distribution.add_to(family, (model,))
    return family
