"""The fixed workloads of the benchmarks."""

from __future__ import annotations

import pytest
from bench_scripts import load_script

workloads = load_script("workloads")


@pytest.mark.parametrize(
    ("name", "num_requests", "num_prompt_tokens", "num_output_tokens"),
    [("W1", 1, 128, 128), ("W2", 64, 10133, 6035), ("W3", 64, 64 * 544, 64 * 64), ("W4", 64, 10133, 6035)],
)
def test_sizes_are_the_published_ones(
    name: str, num_requests: int, num_prompt_tokens: int, num_output_tokens: int
) -> None:
    """Figures of different days and machines are about the same work."""
    made = workloads.build(name)
    assert len(made.requests) == num_requests
    assert (made.num_prompt_tokens, made.num_output_tokens) == (num_prompt_tokens, num_output_tokens)
    assert all(100 <= token < workloads.NUM_IDS for request in made.requests for token in request.prompt)


@pytest.mark.parametrize("name", workloads.NAMES)
def test_a_run_is_the_same_each_time_and_unlike_every_other_run(name: str) -> None:
    """Seeded; two repeats have the same lengths and arrivals and share no block of a prefix with one another."""
    once, again, other = (workloads.build(name, repeat) for repeat in (3, 3, 4))
    assert once == again
    lengths = [
        [(len(each.prompt), each.num_output_tokens, each.arrival) for each in made.requests] for made in (once, other)
    ]
    assert lengths[0] == lengths[1]
    starts = {request.prompt[:16] for request in once.requests}
    assert not starts & {request.prompt[:16] for made in (other, workloads.warm_up(0)) for request in made.requests}


def test_only_the_third_shares_a_prefix() -> None:
    """W3: 512 equal tokens, then all different at once; W2: different from the first block on."""
    shared, mixed = workloads.build("W3"), workloads.build("W2")
    assert shared.num_shared == 512
    assert len({request.prompt[:512] for request in shared.requests}) == 1
    assert len({request.prompt[512:528] for request in shared.requests}) == 64
    assert mixed.num_shared == 0
    assert len({request.prompt[:16] for request in mixed.requests}) == 64


def test_arrivals_are_those_of_the_rate() -> None:
    """W4 starts at once; twice the rate means half the times; nothing else differs from W2."""
    slow, fast, at_once = workloads.build("W4", rate=2.0), workloads.build("W4", rate=4.0), workloads.build("W2")
    assert [each.arrival for each in slow.requests] == pytest.approx([2 * each.arrival for each in fast.requests])
    assert slow.requests[0].arrival == 0
    assert slow.requests[-1].arrival == pytest.approx(64 / 2.0, rel=0.3)
    assert [each.prompt for each in slow.requests] == [each.prompt for each in at_once.requests]
    assert all(each.arrival == 0 for each in at_once.requests)


def test_a_small_vocabulary_and_fewer_requests_keep_lengths() -> None:
    """A tiny model gets ids that it has; a quick look gets the first requests of the whole."""
    whole, part = workloads.build("W2"), workloads.build("W2", 5, num_ids=320, num_requests=3)
    assert len(part.requests) == 3
    assert all(100 <= token < 320 for request in part.requests for token in request.prompt)
    assert [len(each.prompt) for each in part.requests] == [len(each.prompt) for each in whole.requests[:3]]


def test_what_is_no_workload_is_refused() -> None:
    """A wrong name is answered with the names; a vocabulary without ordinary ids with its size."""
    with pytest.raises(ValueError, match="W1, W2, W3, W4"):
        workloads.build("W5")
    with pytest.raises(ValueError, match="100 tokens"):
        workloads.build("W1", num_ids=100)
