"""The gateway's metrics: what is counted when, and that every page adds up."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from gateway_page import check_requests_balance, endings_of, labelled, value_of
from metrics_page import Page, page_of
from prometheus_client import CollectorRegistry

from gateway.ending import ALL_ENDINGS, FINISHED, Ending
from gateway.live_request import LiveRequest
from gateway.live_requests import LiveRequests
from gateway.metrics import GatewayCollector, GatewayMetrics
from gateway.permits import Permits
from gateway.requests import ChoiceEnd, FinishReason, SamplingParams, StoppingParams

LENGTH = ChoiceEnd(FinishReason.LENGTH)
END_KINDS = {
    "finished": {"stop", "length"},
    "cancelled": {"client", "deadline", "queue_ttl", "first_token_target", "operator", "shutdown"},
}


class Bench:
    """Live requests of two models on a clock of the test's own, and the page that tells of them."""

    def __init__(self) -> None:
        self.now = 100.0
        metrics = GatewayMetrics(["one", "two"])
        self.live = LiveRequests("ab" * 16, lambda: self.now, metrics)
        self.registry = CollectorRegistry()
        self.registry.register(GatewayCollector(metrics, self.live.count_by_model, Permits(8, metrics), lambda: False))

    def page(self) -> Page:
        """Scrape; the requests balance."""
        page = page_of(self.registry)
        check_requests_balance(page)
        self.live.check_invariants()
        return page

    def add(self, model: str = "one", num_choices: int = 1) -> LiveRequest:
        """Start a request with a prompt of three tokens."""
        return self.live.add(
            label="",
            model=model,
            model_revision="r",
            tenant="default",
            prompt_token_ids=[1, 2, 3],
            sampling=SamplingParams(1.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, seed=7, top_logprobs=None),
            stopping=StoppingParams(1000, 0, (1,)),
            num_choices=num_choices,
            deadline=None,
            traceparent="",
        )

    def apply(self, request: LiveRequest, choice: int, num_tokens: int, end: ChoiceEnd | None = None) -> None:
        """Let a choice have more tokens."""
        first = len(request.choices[choice].token_ids)
        self.live.apply(request.counter, choice, first, [5] * num_tokens, None, end)


def test_everything_is_on_the_page_from_the_start() -> None:
    """Before any request each series is there, as zero, so that a rate is right from the first one on."""
    page = Bench().page()
    assert page.pop("octavo_permits_maximum") == page.pop("octavo_permits_free") == 8
    assert set(page.values()) == {0}
    endings = {
        (labels["model"], labels["outcome"], labels["reason"])
        for labels, _ in labelled(page, "octavo_requests_ended_total")
    }
    assert endings == {(model, each.outcome.value, each.reason) for model in ("one", "two") for each in ALL_ENDINGS}
    reasons = {kind: {reason for _, outcome, reason in endings if outcome == kind} for kind in END_KINDS}
    assert reasons == END_KINDS
    assert ("one", "failed", "unavailable") in endings
    assert ("one", "failed", "ok") not in endings


@pytest.mark.parametrize("seed", range(5))
def test_every_page_adds_up(seed: int) -> None:
    """Through random traffic requests balance, tokens are those of the records, and each end is told once (F9)."""
    draw = random.Random(seed)
    bench = Bench()
    held: list[LiveRequest] = []
    prompts, tokens, endings = 0, 0, Counter[tuple[str, str]]()
    for event_number in range(1, 301):
        event = draw.random()
        if event < 0.3 or not held:
            held.append(bench.add(draw.choice(["one", "two"]), draw.randint(1, 3)))
            prompts += 3
        elif event < 0.8:
            request = draw.choice(held)
            before = request.num_output_tokens
            end = LENGTH if draw.random() < 0.2 else None
            bench.apply(request, draw.randrange(len(request.choices)), draw.randint(1, 4), end)
            tokens += request.num_output_tokens - before
        else:
            request = held.pop(draw.randrange(len(held)))
            ending: Ending = draw.choice(ALL_ENDINGS)
            for _ in range(draw.randint(1, 2)):
                bench.live.remove(request, ending)
            endings[ending.outcome.value, ending.reason] += 1
        bench.now += draw.random()
        bench.live.check_invariants()
        if event_number % 20:
            continue
        page = bench.page()
        assert value_of(page, "octavo_requests_live") == len(held)
        assert value_of(page, "octavo_prompt_tokens_total") == prompts
        assert value_of(page, "octavo_completion_tokens_total") == tokens
        assert endings_of(page) == endings


def test_times_of_a_request() -> None:
    """The first token and the end count from acceptance, other tokens from those before them in their choice."""
    bench = Bench()
    request = bench.add(num_choices=2)
    for pause, choice, num_tokens in ((0.5, 0, 1), (0.25, 1, 1), (0.125, 0, 2), (0.0625, 1, 1)):
        bench.now += pause
        bench.apply(request, choice, num_tokens)
    bench.live.apply(request.counter, 0, 0, [5], None, None)  # known already
    bench.now += 1
    bench.live.remove(request, FINISHED[FinishReason.STOP])
    page = bench.page()
    assert (
        value_of(page, "octavo_time_to_first_token_seconds_count"),
        value_of(page, "octavo_inter_token_seconds_count"),
    ) == (
        1,
        2,
    )
    assert value_of(page, "octavo_time_to_first_token_seconds_sum") == 0.5
    assert value_of(page, "octavo_inter_token_seconds_sum") == (0.25 + 0.125) + (0.125 + 0.0625)
    assert value_of(page, "octavo_request_seconds_sum", model="one") == 0.5 + 0.25 + 0.125 + 0.0625 + 1
    assert value_of(page, "octavo_request_seconds_count", model="two") == 0
