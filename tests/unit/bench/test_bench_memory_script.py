"""What bench/memory.py counts."""

from __future__ import annotations

import itertools

from bench_scripts import load_script
from fakes import FakeExecutor, make_record, make_spec

bench = load_script("memory")


def test_the_ledger_is_read_at_every_step() -> None:
    """A sequence of 20 tokens owns two blocks of 16; its slots are counted as filled once a row computes them."""
    engine = bench.SampledEngine()
    spec = make_spec(num_blocks=5, max_num_batched_tokens=15)
    session = engine.add_executor(spec)
    executor = FakeExecutor(spec, session)
    for counter in (1, 2):
        engine.submit(make_record(counter, range(1, 21), max_tokens=44), 0.0)
    for _ in range(2):
        batch = engine.schedule(session, 0.0)
        assert batch is not None
        engine.update(session, executor.run(batch), 0.0)
    first, second = engine.samples
    assert (first.num_running, first.num_waiting, first.num_owned_slots, first.num_filled_slots) == (1, 1, 32, 15)
    assert second.num_owned_slots - second.num_filled_slots < first.num_owned_slots - first.num_filled_slots


def test_the_workload_is_mixed_and_fits() -> None:
    """Requests are always the same, of all kinds of the mix, and none is longer than a sequence may get."""
    once, again = ([*itertools.islice(bench.workload(1000), 100)] for _ in range(2))
    assert once == again
    lengths = [(len(request.token_ids.ids), request.stopping.max_tokens) for request in once]
    assert all(prompt + output <= bench.MAX_MODEL_LEN for prompt, output in lengths)
    for _, inputs, outputs in bench.MIX:
        assert any(inputs[0] <= prompt <= inputs[1] and outputs[0] <= out <= outputs[1] for prompt, out in lengths)
