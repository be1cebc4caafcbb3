"""Ranks that each have an accelerator: the pipelined runner on rank 0, the others behind it, two fake devices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_device import FakeDevice
from fakes_executor import Driver, make_limits, make_sequence
from fakes_pipeline import Ahead, make_plain, poisoned_cache
from model_variations import VARIATIONS, save_variation
from ranks import run_ranks
from torch import Tensor

from executor_svc import load as executor_load
from executor_svc.batch import Limits, NewSequence, SamplingParams
from executor_svc.kernels import KernelSet, build_kernels
from executor_svc.kernels.sets.triton import GpuUnusableError
from executor_svc.kv_cache import block_bytes
from executor_svc.models import CausalLM, shard_config
from executor_svc.models.loader import describe, load_checkpoint
from executor_svc.parallel import connect as connect_module
from executor_svc.parallel.carrier import DeviceCarrier
from executor_svc.parallel.connect import RanksError, connect
from executor_svc.parallel.group import Group
from executor_svc.parallel.lead import ConnectedRanks, Follower
from executor_svc.parallel.place import Place, find_place
from executor_svc.parallel.share import Share
from executor_svc.pipeline import following as following_module
from executor_svc.pipeline import load as load_module
from executor_svc.pipeline.following import load_follower
from executor_svc.pipeline.leading import Leading
from executor_svc.pipeline.load import DevicePlan, load_runner
from executor_svc.ranks_plan import RanksPlan
from executor_svc.weights import open_checkpoint
from octavo.rpc.settings import SettingsError
from octavo.settings import ExecutorSettings

CPU = torch.device("cpu")
LIMITS = make_limits(
    block_size=8, num_blocks=60, max_num_seqs=4, max_num_batched_tokens=48, max_model_len=96, vocab_size=320
)
DRAWN = SamplingParams(temperature=1.0, seed=5, top_p=0.95)
_BY_ID = {variation.id: variation for variation in VARIATIONS}


class _DeviceGroup:
    """A Group whose collectives are launches on a fake device, as those of GPUs are: in graphs, too."""

    def __init__(self, group: Group, device: FakeDevice) -> None:
        self._group = group
        self._watch = device.watch
        self.share = group.share
        self.least = group.least
        self.calls: list[str] = []

    def sum(self, x: Tensor) -> None:
        self._launch("sum", x)

    def gather(self, x: Tensor) -> list[Tensor]:
        parts: list[Tensor] = self._launch("gather", x)
        return parts

    def broadcast(self, x: Tensor) -> None:
        self._launch("broadcast", x)

    def _launch(self, name: str, x: Tensor) -> Any:
        def launched(x: Tensor) -> Any:
            self.calls.append(name)
            return getattr(self._group, name)(x)

        assert x.is_contiguous()
        return self._watch.noted(name, launched, (x,), {}, [x])


@dataclass
class _Rank:
    """What a rank's thread has of its own."""

    ranks: ConnectedRanks
    device: FakeDevice
    kernels: KernelSet
    model: CausalLM

    @property
    def calls(self) -> list[str]:
        """Names of the collectives so far, replayed ones among them."""
        group: Any = self.ranks.group
        calls: list[str] = group.calls
        return calls


def _on_devices(
    folder: Path, size: int, lead: Callable[[_Rank], Any], follow: Callable[[_Rank], Any], **totals: int
) -> list[Any]:
    """Run `lead` on rank 0 and `follow` on the others, each watched by a device of its own. totals: its memory, by
    `rank_N`.
    """

    def body(plain: ConnectedRanks) -> Any:
        rank = plain.share.rank
        device = FakeDevice(total=totals.get(f"rank_{rank}", 1 << 34))
        group: Any = _DeviceGroup(plain.group, device)
        ranks = ConnectedRanks(group, plain.watch, DeviceCarrier(plain.watch, group, CPU))
        kernels = device.watch.kernels(build_kernels("reference"))
        model = load_checkpoint(open_checkpoint(folder), torch.float32, CPU, kernels, ranks=ranks)
        with torch.inference_mode(), device.watching():
            found = (follow if rank else lead)(_Rank(ranks, device, kernels, model))
            ranks.watch.finish()
            return found

    return run_ranks(size, body, in_order=False)


def _limits_of(folder: Path, size: int) -> Callable[[int], Limits]:
    """What fits into so many bytes, counted by the rank that has most."""
    config, _ = describe(open_checkpoint(folder))
    of_block = block_bytes(shard_config(config, Share(size - 1, size)), LIMITS.block_size, torch.float32)
    return lambda kv_memory: replace(LIMITS, num_blocks=min(LIMITS.num_blocks, kv_memory // of_block))


def _sequences() -> dict[str, NewSequence]:
    generator = torch.Generator().manual_seed(1)

    def prompt(length: int) -> list[int]:
        return torch.randint(3, 320, (length,), generator=generator).tolist()

    return {
        "7": make_sequence(0, prompt(7), max_tokens=14),
        "8": make_sequence(0, prompt(8), max_tokens=9, sampling=SamplingParams(0.0, repetition_penalty=2.0)),
        "33": make_sequence(0, prompt(33), max_tokens=12, sampling=replace(DRAWN, frequency_penalty=1.0), choice=2),
        "1": make_sequence(0, prompt(1), max_tokens=16, sampling=replace(DRAWN, top_logprobs=2)),
    }


def _outputs(run: Callable[..., Any], **options: int) -> dict[str, Any]:
    driver = Driver(run, LIMITS, **options)
    for key, sequence in _sequences().items():
        driver.add(key, sequence)
    outputs: dict[str, Any] = driver.finish()
    return outputs


def _expected(folder: Path) -> dict[str, Any]:
    """What one process writes on a CPU, a step at a time."""
    whole = load_checkpoint(open_checkpoint(folder), torch.float32, CPU, build_kernels("reference"))
    with torch.inference_mode():
        return _outputs(make_plain(LIMITS, whole).run)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps are graphs, as with the Triton set; these kernels can be captured on the fake device."""
    for module in (load_module, following_module):
        monkeypatch.setattr(module, "can_be_captured", lambda model, kernels: True)


def _serve(size: int, folder: Path, *, is_eager: bool) -> tuple[dict[str, Any], int, list[list[str]]]:
    """Load on every rank as the executor does, and run the sequences; also the number of graphs, and the collectives
    of each rank in their order.
    """
    plan, limits_of = DevicePlan(0.9, None, is_eager), _limits_of(folder, size)

    def lead(rank: _Rank) -> Any:
        leading = Leading(rank.model, rank.ranks, rank.device)
        runner = load_runner(rank.model, rank.kernels, torch.float32, 8, plan, limits_of, rank.device, leading)
        ahead = Ahead(runner)
        outputs = _outputs(ahead.run, depth=2, chunk=20)
        assert ahead.most == 2
        return outputs, runner.num_graphs, rank.calls

    def follow(rank: _Rank) -> list[str]:
        follower = load_follower(rank.model, rank.kernels, torch.float32, 8, plan, limits_of, rank.device, rank.ranks)
        with rank.device.on(rank.device.compute):
            follower.follow()
        return rank.calls

    (outputs, num_graphs, calls), *others = _on_devices(folder, size, lead, follow)
    return outputs, num_graphs, [calls, *others]


@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.usefixtures("captured")
def test_two_devices_write_what_one_process_writes(tmp_path: Path, is_eager: bool) -> None:
    """Two steps in flight, prompts in chunks, every kind of sampling: the same tokens, with decode steps as graphs and
    without; every rank has taken part in the same collectives in the same order.
    """
    save_variation(tmp_path, _BY_ID["Llama, biases"])
    outputs, num_graphs, calls = _serve(2, tmp_path, is_eager=is_eager)
    assert outputs == _expected(tmp_path)
    assert num_graphs == (0 if is_eager else 3)
    assert calls[0] == calls[1]
    assert {"sum", "gather", "broadcast"} <= set(calls[0])


@pytest.mark.usefixtures("captured")
def test_three_devices_whose_norms_are_of_all_ranks(tmp_path: Path) -> None:
    """Queries and keys of OLMo 2 are normed together, and nobody's vocabulary or heads are as many as another's: in
    graphs, too.
    """
    fields = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
    save_variation(tmp_path, replace(_BY_ID["OLMo 2, plain"], fields=fields))
    outputs, num_graphs, calls = _serve(3, tmp_path, is_eager=False)
    assert outputs == _expected(tmp_path)
    assert num_graphs == 3
    assert calls[0] == calls[1] == calls[2]


def test_all_hold_what_the_poorest_device_can(tmp_path: Path) -> None:
    """The second card has less memory than the first: both have the KV blocks that fit there."""
    save_variation(tmp_path, _BY_ID["Llama, biases"])
    plan, held = DevicePlan(0.9, None, True), {}

    def limits_of(kv_memory: int) -> Limits:
        return replace(LIMITS, num_blocks=min(LIMITS.num_blocks, kv_memory >> 16))

    def lead(rank: _Rank) -> None:
        leading = Leading(rank.model, rank.ranks, rank.device)
        runner = load_runner(rank.model, rank.kernels, torch.float32, 8, plan, limits_of, rank.device, leading)
        held[0] = runner.limits.num_blocks

    def follow(rank: _Rank) -> None:
        follower = load_follower(rank.model, rank.kernels, torch.float32, 8, plan, limits_of, rank.device, rank.ranks)
        held[1] = follower.num_blocks
        with rank.device.on(rank.device.compute):
            follower.follow()

    _on_devices(tmp_path, 2, lead, follow, rank_1=5 << 20)
    assert held[0] == held[1]
    assert 2 < held[0] < LIMITS.num_blocks


@pytest.mark.parametrize("where", ["capture", "replay"])
@pytest.mark.usefixtures("captured")
def test_what_fails_on_one_device_is_a_loss(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are in the middle of the same: nothing is tried again, and the reason is told."""
    save_variation(tmp_path, _BY_ID["Llama, biases"])

    def broken(*_: Any) -> Any:
        raise RuntimeError(f"no {where}")

    def lead(rank: _Rank) -> None:
        leading = Leading(rank.model, rank.ranks, rank.device)
        monkeypatch.setattr(rank.device, "capture", broken if where == "capture" else lambda _: _Replays(broken))
        graph = leading.graphs.capture(lambda: None)
        graph.replay()

    def follow(rank: _Rank) -> None:
        kv_cache = poisoned_cache(rank.model, LIMITS)
        with rank.device.on(rank.device.compute):
            Follower(rank.model, kv_cache, rank.ranks, device=rank.device).follow()

    with pytest.raises(RuntimeError, match=f"no {where}"):
        _on_devices(tmp_path, 2, lead, follow)
    reasons = [getattr(record, "fields", {}).get("reason") for record in caplog.records]
    assert f"rank 0: RuntimeError: no {where}" in reasons


@dataclass
class _Replays:
    replay: Callable[[], None]


def test_ranks_on_gpus_add_up_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's tensors are made on its own GPU, and the collectives of steps are NCCL's; numbers of the host go by
    gloo. Without NCCL the start is refused.
    """
    place = find_place(ExecutorSettings(model="any", tensor_parallel=2, device="cuda"), {})
    assert place is not None
    others = find_place(ExecutorSettings(model="any", tensor_parallel=2, device="cuda"), place.variables(1))
    assert others is not None
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(RanksError, match=r"^--tensor-parallel 2: torch .* is built without NCCL"):
        connect(place, {}, in_order=False, device=torch.device("cuda", 0))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    opened: dict[int, object] = {}

    def open_nccl(store: object, share: Share) -> object:
        opened[share.rank] = object()
        return opened[share.rank]

    monkeypatch.setattr(connect_module, "open_nccl", open_nccl)
    found: dict[int, tuple[ConnectedRanks, int]] = {}

    def join(place: Place) -> None:
        device = torch.device("cuda", place.local.rank)
        ranks = connect(place, {}, in_order=False, device=device, end=lambda: None)
        found[place.share.rank] = ranks, ranks.group.least(10 - place.share.rank)

    threads = [threading.Thread(target=join, args=(each,)) for each in (place, others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    for rank, (ranks, least) in found.items():
        assert least == 9
        assert ranks.group._collectives is opened[rank]
        assert isinstance(ranks.carrier, DeviceCarrier)
        assert ranks.carrier._device == torch.device("cuda", rank)
        ranks.watch.finish()
    for ranks, _ in found.values():
        ranks.watch.close()
    assert len(found) == 2


def test_each_rank_of_a_machine_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of its number on the machine; where there are too few, it is said which rank lacks one."""
    asked = []

    def find_gpu(device: torch.device) -> None:
        asked.append(device)
        if device.index:
            raise GpuUnusableError("there is no GPU 1; 1 can be seen, counted from 0")

    monkeypatch.setattr(executor_load, "find_gpu", find_gpu)
    places = [Place(Share(rank, 4), Share(rank % 2, 2), "a", 1) for rank in (2, 3)]
    assert executor_load.torch_device("cuda", RanksPlan(places[0])) == torch.device("cuda", 0)
    with pytest.raises(SettingsError, match=r"^--device cuda, rank 1 of 2 on a machine: there is no GPU 1"):
        executor_load.torch_device("cuda", RanksPlan(places[1]))
    assert executor_load.torch_device("cpu", RanksPlan(places[1])) == CPU
    assert asked == [torch.device("cuda", 0), torch.device("cuda", 1)]
