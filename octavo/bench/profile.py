"""Where the time of a step goes, from the metrics pages of scheduler and executors before and after a run."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from octavo.bench.records import BenchError

FETCH_TIMEOUT = 10.0
"""Seconds for a page."""
SAMPLING = "sampling"
_OPS = "octavo_executor_op_seconds_total"
_STAGES = "octavo_executor_step_seconds"
_GAP = "octavo_executor_step_gap_seconds"
_NAMES = {"rotary_kv": "rotary, KV write"}
"""Classes of ops whose labels are no words."""
_RANKS = "ranks"
"""What processes that divide a model do together. Told where there are several."""
_AROUND = {
    "schedule": "octavo_schedule_seconds",
    "hop": "octavo_step_hop_seconds",
    "publish": "octavo_publish_seconds",
}

Samples = Mapping[str, float]
"""Values of a page by series, labels as on the page: `name{label="value"}`."""
FetchPage = Callable[[str], str]
"""Returns the text of the page of a service at host:port. Raises OSError."""


@dataclass(frozen=True)
class Profile:
    """Mean seconds of a step, part by part. Steps of everybody's requests count, since the pages tell no one apart."""

    num_steps: int
    num_sequences: float
    """In a step, on average."""
    num_tokens: float
    """Computed by a step, on average."""
    device: Mapping[str, float]
    """What the executor's device thread does, one after the other: from the end of a step to the end of the next."""
    around: Mapping[str, float]
    """What happens outside of the device thread, most of it while another step runs."""
    num_scheduled: int
    """Steps by the scheduler's count. More than num_steps where an executor's page was not read."""

    @property
    def seconds(self) -> float:
        """From the end of a step to the end of the next."""
        return sum(self.device.values())


class Profiler:
    """Reads the pages. `begin` may be called again: what counts is from the last one on."""

    def __init__(self, scheduler: str, executors: Sequence[str], fetch: FetchPage | None = None) -> None:
        """`scheduler` and `executors`: host:port of their metrics pages."""
        self._scheduler = scheduler
        self._executors = executors
        self._fetch = fetch or fetch_page
        self._before: tuple[Samples, Samples] = ({}, {})

    async def begin(self) -> None:
        """Read the pages before a run. Raises BenchError where one cannot be read, or ops are not timed."""
        self._before = await self._read()

    async def end(self) -> Profile:
        """Read the pages after it. Raises BenchError, also where no step was computed."""
        after = await self._read()
        scheduler, executors = (_difference(*pages) for pages in zip(self._before, after, strict=True))
        return profile_of(scheduler, executors)

    async def _read(self) -> tuple[Samples, Samples]:
        """Return the scheduler's samples, and the sums of the executors'."""
        scheduler = await self._page("--scheduler-metrics", self._scheduler, _AROUND["publish"] + "_count")
        executors: dict[str, float] = {}
        for address in self._executors:
            page = await self._page("--executor-metrics", address, _GAP + "_count")
            if not any(series.startswith(_OPS) for series in page):
                raise BenchError(
                    f"--profile: the executor at {address} does not time its ops: start it with --profile-ops, as in "
                    "`octavo up MODEL --profile-ops`"
                )
            for series, value in page.items():
                executors[series] = executors.get(series, 0.0) + value
        return scheduler, executors

    async def _page(self, flag: str, address: str, wanted: str) -> Samples:
        """Return a page that has the series `wanted`."""
        try:
            text = await asyncio.to_thread(self._fetch, address)
            samples = _parse(text)
        except (OSError, ValueError) as error:
            raise BenchError(
                f"--profile: cannot read http://{address}/metrics ({error}): name the page with {flag} HOST:PORT; a "
                "service logs the port as metrics_port when it starts"
            ) from None
        if wanted not in samples:
            service = flag.removeprefix("--").removesuffix("-metrics")
            raise BenchError(
                f"--profile: the page at {address} is not that of {_article(service)} of this version: name it with "
                f"{flag} HOST:PORT"
            )
        return samples


def profile_of(scheduler: Samples, executors: Samples) -> Profile:
    """Return the profile of what was counted meanwhile. Raises BenchError where no step was computed."""
    num_steps = executors.get(f'{_STAGES}_count{{stage="forward"}}', 0.0)
    if not num_steps:
        raise BenchError(
            "--profile: the executors computed no step meanwhile: is --executor-metrics that of this cell?"
        )
    stage = {name: executors[f'{_STAGES}_sum{{stage="{name}"}}'] for name in ("prepare", "forward", "sample")}
    ops = {
        series[len(_OPS) + len('{op="') : -len('"}')]: value
        for series, value in executors.items()
        if series.startswith(_OPS)
    }
    ops.pop(SAMPLING, None)  # the stage holds it, with what is around it
    device = {"idle": executors[f"{_GAP}_sum"], "inputs": stage["prepare"]}
    device |= {_NAMES.get(op, op): seconds for op, seconds in ops.items() if seconds or op != _RANKS}
    # Clocks of ops and stages are read apart: what is left may come out a hair below nothing.
    device["rest of forward"] = max(0.0, stage["forward"] - sum(ops.values()))
    device[SAMPLING] = stage["sample"]
    ahead = executors[f'{_STAGES}_sum{{stage="ahead"}}'] / num_steps
    num_scheduled = scheduler.get(f"{_AROUND['hop']}_count", 0.0)
    return Profile(
        num_steps=round(num_steps),
        num_sequences=executors["octavo_executor_step_rows_sum"] / num_steps,
        num_tokens=executors["octavo_executor_tokens_total"] / num_steps,
        device={part: seconds / num_steps for part, seconds in device.items()},
        around={part: scheduler[f"{name}_sum"] / max(1.0, num_scheduled) for part, name in _AROUND.items()}
        | {"inputs ahead": ahead},
        num_scheduled=round(num_scheduled),
    )


def fetch_page(address: str) -> str:
    """Return a metrics page as Prometheus gets it. Raises OSError."""
    # No proxy: pages are next door, and the variable http_proxy is meant for elsewhere.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}/metrics", timeout=FETCH_TIMEOUT) as response:
        text: str = response.read().decode()
    return text


def _parse(text: str) -> dict[str, float]:
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def _difference(before: Samples, after: Samples) -> dict[str, float]:
    return {series: value - before.get(series, 0.0) for series, value in after.items()}


def _article(service: str) -> str:
    return f"an {service}" if service[0] in "aeiou" else f"a {service}"
