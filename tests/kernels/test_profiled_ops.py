"""Timed kernel sets: the same results, each op's time under its class."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from factories import make_llama
from metrics_page import scrape

from executor_svc.kernels import KERNEL_SETS, build_kernels
from executor_svc.kernels.profiled import OP_OF_FIELD, OPS, OpTimes, profiled
from executor_svc.kernels.record.reference import record
from executor_svc.server import ExecutorServer
from octavo.models.prepare import prepare
from octavo.settings import ExecutorSettings


@pytest.mark.parametrize("name", KERNEL_SETS)
def test_every_op_has_a_class(name: str) -> None:
    """No op of a set is left untimed, each has a class that the page knows, no class is empty; and nothing is recorded:
    a program would pass the clocks by.
    """
    kernels = build_kernels(name)
    timed = profiled(kernels, OpTimes())
    ops = [each.name for each in dataclasses.fields(kernels) if callable(getattr(kernels, each.name))]
    ops.remove("record")
    assert timed.record is record
    assert set(ops) == set(OP_OF_FIELD)
    assert {*OP_OF_FIELD.values(), "embedding"} == {*OPS}
    assert all(getattr(timed, op) is not getattr(kernels, op) for op in ops)
    assert (timed.name, timed.build) == (kernels.name, kernels.build)


@pytest.mark.parametrize("name", KERNEL_SETS)
def test_timed_ops_compute_the_same(name: str) -> None:
    """Linear, its rows and attention, which are made of other calls, give the bits of the plain set and are timed."""
    kernels, times = build_kernels(name), OpTimes()
    timed = profiled(kernels, times)
    weight, x = torch.randn(32, 16), torch.randn(3, 16)
    plain_linear, timed_linear = kernels.pack_linear(weight, None), timed.pack_linear(weight, None)
    assert times.seconds == dict.fromkeys(OPS, 0.0)
    assert torch.equal(plain_linear(x), timed_linear(x))
    rows = torch.tensor([4, 0, 31])
    assert torch.equal(plain_linear.weight_rows(rows), timed_linear.weight_rows(rows))
    batch = SimpleNamespace(
        query_start=torch.tensor([0, 3], dtype=torch.int32),
        context_lens=torch.tensor([3], dtype=torch.int32),
        block_tables=torch.tensor([[1]], dtype=torch.int32),
        query_lens=(3,),
        context_lens_host=(3,),
    )
    query, cache = torch.randn(3, 2, 16), torch.randn(2, 16, 1, 16)
    plain, other = (each.plan_attention(batch, 16)(query, cache, cache, 0.25) for each in (kernels, timed))
    assert torch.equal(plain, other)
    assert {op for op, seconds in times.seconds.items() if seconds > 0} == {"linear", "embedding", "attention"}
    times.clear()
    assert times.seconds == dict.fromkeys(OPS, 0.0)


@pytest.mark.asyncio
async def test_ops_are_on_the_page_where_they_were_asked_for(tmp_path: Path) -> None:
    """With --profile-ops every class is there, from 0 once the model is warm; without it there is none."""
    folder = make_llama(tmp_path / "tiny", max_position_embeddings=128)
    prepare(str(folder), report=lambda line: None)
    settings = ExecutorSettings(model=str(folder), port=0, metrics_port=0, threads=1, max_num_seqs=4, profile_ops=True)
    pages = []
    for each in (settings, dataclasses.replace(settings, profile_ops=False)):
        server = ExecutorServer(each)
        await server.start()
        pages.append(await scrape(server.metrics_port))
        await server.stop()
    asked, plain = ({name: page[name] for name in page if "op_seconds" in name} for page in pages)
    assert asked == {f'octavo_executor_op_seconds_total{{op="{op}"}}': 0 for op in OPS}
    assert not plain
