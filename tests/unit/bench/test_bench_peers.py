"""How bench/peers.py runs its peers, with a runner of the real protocol around a made-up engine."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_scripts import load_script

peers, peer_process, plot = load_script("peers"), load_script("peer_process"), load_script("peers_plot")
workloads, load = load_script("workloads"), load_script("load")

RUNNER = Path(__file__).with_name("fake_peer_runner")
WORKLOAD = workloads.build("W2", num_requests=3)
SECONDS = 60.0


class FakeCell:
    """Octavo as bench/peers.py sees it; every run takes a second."""

    num_ids = workloads.NUM_IDS
    pids = ()

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.collected: list[str] = []

    async def run(self, workload: Any) -> dict[str, Any]:
        """Note what is sent."""
        self.sent.append(workload)
        return {"total_s": 1.0, "tpot_ms": {"mean": 1.0}, "ttft_ms": {"mean": 1.0}}

    async def collect(self, workload: Any) -> dict[str, Any]:
        """The same, told at the end."""
        self.collected.append(workload.name)
        return await self.run(workload)


@pytest.fixture(autouse=True)
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of environments in which `fake` has been made."""
    program = tmp_path / "fake" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.symlink_to(sys.executable)
    (tmp_path / "fake" / ".made").touch()
    monkeypatch.setattr(peer_process, "ENVIRONMENTS", tmp_path)
    return tmp_path


def fake(mode: str) -> Any:
    """Return the peer whose runner is the fake one."""
    return peer_process.Peer("fake", str(RUNNER), "fake", mode)


def open_fake(mode: str, folder: Path) -> Any:
    """Start the fake peer."""
    return peer_process.open_peer(fake(mode).command(folder, 1), folder / "log", SECONDS)


def state_of(pid: int) -> str:
    """Return the letter that proc(5) has for the state of a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def arguments(**changes: Any) -> argparse.Namespace:
    """Return what the command line would give."""
    usual: dict[str, Any] = {"workloads": ("W1", "W2", "W4"), "repeats": 2, "rate": 4.0, "requests": 3, "threads": 1}
    return argparse.Namespace(**usual | changes)


@pytest.mark.asyncio
async def test_a_peer_runs_a_workload_and_tells_its_time(tmp_path: Path) -> None:
    """Exact ids and lengths go in, the time comes back; what the engine prints disturbs no answer."""
    async with open_fake("fine", tmp_path) as process:
        assert process.about["label"] == "echo"
        figures = await process.run(WORKLOAD)
        assert figures["total_s"] > 0
        assert figures["output_tokens_per_s"] == WORKLOAD.num_output_tokens / figures["total_s"]
        assert figures["peak_rss_mib"] > 1
    assert "what a library prints" in (tmp_path / "log").read_text()


@pytest.mark.asyncio
async def test_a_paused_peer_answers_only_afterwards(tmp_path: Path) -> None:
    """While Octavo runs no process of the peer gets the CPU; then it goes on as if nothing had been."""
    async with open_fake("fine", tmp_path) as process:
        with process.paused():
            running = asyncio.create_task(process.run(WORKLOAD))
            async with asyncio.timeout(SECONDS):
                while state_of(process._process.pid) != "T":  # stopped, by proc(5)
                    await asyncio.sleep(0)
            assert not running.done()
        assert (await running)["total_s"] > 0


@pytest.mark.asyncio
async def test_wrong_lengths_are_no_result(tmp_path: Path) -> None:
    """An engine that stops early would look fast."""
    async with open_fake("short", tmp_path) as process:
        with pytest.raises(load.WrongOutputError, match="wanted"):
            await process.run(WORKLOAD)


def test_the_first_token_is_taken_from_the_time_of_the_others() -> None:
    """A peer that tells only the end: 128 tokens in 10 s, the first after 2.7 s, are 7.3 s for 127."""
    single = workloads.build("W1")
    figures = peer_process.offline_figures(single, {"total_s": 10.0, "peak_rss_mib": 5.0}, 2.7)
    assert figures["ttft_ms"]["mean"] == 2700
    assert figures["tpot_ms"]["mean"] == pytest.approx(7300 / 127)
    assert "tpot_ms" not in peer_process.offline_figures(single, {"total_s": 10.0, "peak_rss_mib": 5.0}, None)


@pytest.mark.asyncio
async def test_runs_alternate_and_no_two_send_the_same_ids(tmp_path: Path) -> None:
    """Each pair is of one repeat, every repeat has ids of its own, and the figures grow as they come."""
    cell, saves = FakeCell(), []
    comparison = peers.Comparison(cell, tmp_path, arguments(), lambda: saves.append(None))
    await comparison.compare(fake("fine"), tmp_path)
    assert set(comparison.figures["W1"]) == set(comparison.figures["W2"]) == {"fake"}
    assert not comparison.figures["W4"]  # it has no server
    assert [len(each["fake"]["pairs"]) for each in (comparison.figures["W1"], comparison.figures["W2"])] == [2, 2]
    assert comparison.figures["W1"]["fake"]["ratio"] == comparison.figures["W1"]["fake"]["ratios"]["time_per_token"]
    starts = [workload.requests[0].prompt[:16] for workload in cell.sent]
    assert len(set(starts)) == len(starts) == 4
    assert cell.collected == ["W2", "W2"], "a peer that tells only the end is no reason to stream a batch"
    assert len(saves) == 2
    assert not comparison.unavailable


@pytest.mark.parametrize(("mode", "reason"), [("unfit", "no such instruction"), ("dies", "ended with code 7")])
@pytest.mark.asyncio
async def test_a_peer_that_cannot_run_is_reported_with_the_reason(mode: str, reason: str, tmp_path: Path) -> None:
    """It is in the figures by its name, and the comparison goes on."""
    comparison = peers.Comparison(FakeCell(), tmp_path, arguments(), lambda: None)
    await comparison.compare(fake(mode), tmp_path)
    assert reason in comparison.unavailable["fake"]
    assert comparison.figures == {"W1": {}, "W2": {}, "W4": {}}


@pytest.mark.asyncio
async def test_a_fault_of_octavo_is_not_told_of_the_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison ends with the reason: its ratios would mean nothing."""
    cell = FakeCell()

    async def fail(workload: Any) -> dict[str, Any]:
        raise load.WrongOutputError(f"{workload.name}: UNAVAILABLE: no executor")

    monkeypatch.setattr(cell, "collect", fail)
    comparison = peers.Comparison(cell, tmp_path, arguments(workloads=("W2",)), lambda: None)
    with pytest.raises(SystemExit, match="Octavo was not measured: W2: UNAVAILABLE"):
        await comparison.compare(fake("fine"), tmp_path)
    assert not comparison.unavailable


@pytest.mark.asyncio
async def test_an_environment_that_was_not_made_is_named(environments: Path, tmp_path: Path) -> None:
    """The reason is the command that makes it."""
    (environments / "fake" / ".made").unlink()
    comparison = peers.Comparison(FakeCell(), tmp_path, arguments(), lambda: None)
    await comparison.compare(fake("fine"), tmp_path)
    assert "make .bench/fake/.made" in comparison.unavailable["fake"]


def test_every_peer_has_its_runner_and_its_pins() -> None:
    """Each environment is fully pinned, and its torch is whichever build pip finds for the CPU: no label."""
    bench = Path(peers.__file__).parent
    for peer in peer_process.PEERS.values():
        assert (bench / "peers" / f"{peer.runner}.py").is_file()
        pins = (bench / "envs" / f"{peer.environment}.txt").read_text().splitlines()
        lines = [line for line in pins if not line.startswith("#")]
        assert all("==" in line for line in lines)
        assert "torch==2.13.0" in lines


def test_figures_become_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ratios, times of both and what was not measured, for every model."""
    pairs = [({"total_s": 2.0}, {"total_s": 5.0})]
    document = {
        "headline": load_script("ratios").HEADLINE,
        "notes": ["this machine was busy"],
        "models": {
            "tiny": {
                "octavo": {"dtype": "float32"},
                "workloads": {"W2": {"fake": load_script("ratios").compare("W2", pairs)}, "W3": {}},
                "unavailable": {"other": "this CPU has no such instruction"},
            }
        },
    }
    peers.print_tables(json.loads(json.dumps(document)))
    printed = capsys.readouterr().out
    assert "2.50" in printed
    assert "5 / 2 s" in printed
    assert "other: not measured: this CPU has no such instruction" in printed
    assert "note: this machine was busy" in printed
    plot.draw(document, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
