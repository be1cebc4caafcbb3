"""The floor of a workload: its arithmetic, checked by hand on models and machines of round numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_scripts import load_script

floor, limits, workloads = load_script("floor"), load_script("limits"), load_script("workloads")

SHAPE = floor.Shape(body=1000, head=200, hidden=10, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=5)
KV = 2 * 2 * 2 * 5
"""Elements of a token's keys and values: both, layers, heads, dimensions."""


def machine(read_bandwidth: float, peak_rate: float) -> Any:
    """Return limits of a machine."""
    return limits.Limits(read_bandwidth, read_bandwidth, peak_rate, "float32", 64, 2)


def cost(read_bandwidth: float = 1.0, peak_rate: float = 1e30) -> Any:
    """Return the cost of SHAPE in 16 bits on a machine that by default is bound by memory: seconds are bytes."""
    return floor.Cost(SHAPE, 2, 2, machine(read_bandwidth, peak_rate))


def of_lengths(*lengths: tuple[int, int], num_shared: int = 0, arrivals: tuple[float, ...] = ()) -> Any:
    """Return a workload of prompts and outputs of these lengths."""
    requests = tuple(
        workloads.Request(tuple(range(prompt)), output, arrivals[index] if arrivals else 0.0)
        for index, (prompt, output) in enumerate(lengths)
    )
    return workloads.Workload("made up", requests, num_shared)


@pytest.mark.parametrize(
    ("stored", "served", "sizes"),
    [
        ("bfloat16", "float32", (2, 4)),
        ("float32", "bfloat16", (2, 2)),
        ("float32", "float32", (4, 4)),
        ("float16", "bfloat16", (2, 2)),
    ],
)
def test_weights_take_the_fewer_bytes(tmp_path: Path, stored: str, served: str, sizes: tuple[int, int]) -> None:
    """A bfloat16 needs 2 bytes whatever the arithmetic; keys and values take what is served."""
    config = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 9, "dtype": stored}))
    made = floor.Cost.of(tmp_path, served, machine(1.0, 1.0))
    assert (made.weight_bytes, made.kv_bytes) == sizes


def test_the_shape_of_a_model_is_read_from_its_configuration(tmp_path: Path) -> None:
    """Weights of SmolLM2-135M: 106.2 million in the layers, 28.3 million in the head; 23040 elements of KV a token."""
    config = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = floor.Shape.of(tmp_path)
    assert shape.body + shape.head == 134_515_008
    assert shape.head == 49152 * 576
    assert shape.head_dim == 64
    assert shape.kv_elements() == 2 * 30 * 3 * 64


def test_a_step_takes_the_longer_of_moving_and_computing() -> None:
    """Bytes: layers, head where a row samples, embeddings, KV read and written. Operations: two a weight and token."""
    step = {"tokens": 3, "samples": 1, "kv_read": 7, "kv_written": 3, "attended": 11}
    moved = 2 * (1000 + 200 + 3 * 10) + 2 * (7 + 3) * KV
    assert cost().step(**step) == moved
    operations = 2 * 1000 * 3 + 2 * 200 + 4 * 2 * 4 * 5 * 11
    assert cost(read_bandwidth=1e30, peak_rate=1.0).step(**step) == operations
    assert cost(read_bandwidth=moved, peak_rate=operations / 5).step(**step) == 5
    assert cost().step(**(step | {"samples": 0})) == moved - 2 * 200


def test_wider_elements_cost_as_much_more() -> None:
    """32 bits count twice for weights and for KV, each by its own type."""
    step = {"tokens": 1, "samples": 1, "kv_read": 5, "kv_written": 1, "attended": 6}
    weights, kv = 2 * (1000 + 200 + 10), 2 * 6 * KV
    assert floor.Cost(SHAPE, 4, 2, machine(1.0, 1e30)).step(**step) == 2 * weights + kv
    assert floor.Cost(SHAPE, 4, 4, machine(1.0, 1e30)).step(**step) == 2 * (weights + kv)


def test_one_stream_reads_all_weights_once_a_token() -> None:
    """The prompt and its first token in one step, then a step for each token, each with one more position to read."""
    run = floor.simulate(of_lengths((8, 4)), cost(), 64)
    assert run.num_steps == 4
    prompt = cost().step(tokens=8, samples=1, kv_read=0, kv_written=8, attended=36)
    later = [cost().step(tokens=1, samples=1, kv_read=8 + k, kv_written=1, attended=9 + k) for k in range(3)]
    assert run.ttft == prompt
    assert run.total == run.e2e == prompt + sum(later)
    assert run.tpot == pytest.approx(sum(later) / 3)


def test_sequences_share_the_reading_of_weights() -> None:
    """Many at once take as many steps as the longest of them; memory-bound, that is far from as many times as long."""
    alone, together = (floor.simulate(of_lengths(*[(8, 16)] * count), cost(), 1 << 30) for count in (1, 10))
    assert alone.num_steps == together.num_steps == 16
    assert alone.total < together.total < 10 * alone.total


def test_a_step_has_no_more_tokens_than_its_size() -> None:
    """A prompt goes through in chunks, the later ones read the KV of the earlier; decoding rows go first."""
    run = floor.simulate(of_lengths((20, 1)), cost(), 8)
    chunks = [(8, 0, 36), (8, 8, 8 * 8 + 36), (4, 16, 4 * 16 + 10)]
    steps = [
        cost().step(tokens=tokens, samples=int(index == 2), kv_read=past, kv_written=tokens, attended=attended)
        for index, (tokens, past, attended) in enumerate(chunks)
    ]
    assert run.total == sum(steps)
    assert floor.simulate(of_lengths((4, 9), (20, 1)), cost(), 8).num_steps == 9


def test_a_shared_prefix_is_computed_once_and_read_once_a_step() -> None:
    """With a prefix the others begin behind it; its keys and values are read by all rows together."""
    shared = floor.simulate(of_lengths((20, 2), (20, 2), num_shared=16), cost(), 1 << 30)
    first = cost().step(tokens=24, samples=2, kv_read=16, kv_written=24, attended=210 + 4 * 16 + 10)
    second = cost().step(tokens=2, samples=2, kv_read=16 + 4 + 4, kv_written=2, attended=42)
    assert shared.total == first + second
    assert shared.total < floor.simulate(of_lengths((20, 2), (20, 2)), cost(), 1 << 30).total


def test_nobody_is_served_before_arriving() -> None:
    """Idle time until the next arrival counts in the total and not in the times of the request."""
    late = floor.simulate(of_lengths((8, 4), (8, 4), arrivals=(0.0, 1e6)), cost(), 64)
    alone = floor.simulate(of_lengths((8, 4)), cost(), 64)
    assert late.total == 1e6 + alone.total
    assert late.e2e == pytest.approx(alone.e2e)


def test_of_the_sizes_of_a_step_the_best_one_counts() -> None:
    """The floor is at most any single schedule's time."""
    workload = workloads.build("W2")
    either = cost(read_bandwidth=1e6, peak_rate=1e8)
    best = floor.floor_of(workload, either)
    assert best.total == min(floor.simulate(workload, either, size).total for size in floor.STEP_SIZES)
    assert best.total < floor.simulate(workload, either, 1 << 30).total


def test_limits_are_measured_and_can_be_kept(tmp_path: Path) -> None:
    """Every rate is positive and named; what was printed once stands for a measurement later."""
    measured = limits.measure_apart(1, seconds=0.02, mebibytes=8)
    assert min(measured.read_bandwidth, measured.read_bandwidth_1_thread, measured.peak_rate) > 0
    assert measured.peak_type in ("float32", "bfloat16")
    assert measured.num_threads == 1
    kept = tmp_path / "limits.json"
    kept.write_text(json.dumps(measured.__dict__))
    assert limits.known_or_measured(kept) == measured
