"""Octavo beside its peers on this machine: python bench/peers.py --json OUT [--peers a,b] [--model NAME].

Octavo runs as in bench/serve.py, through its three services; each peer in an environment of its own (make bench-envs),
with the same weights in 16 bits, the same token ids, greedy, exact lengths, the same number of threads. The batches W2
and W3 of a peer that tells only when all is done are asked of Octavo that way too (GenerateOnce). Runs alternate:
Octavo, peer, Octavo, peer. What is compared are medians over these pairs: the peer's time over Octavo's, so above 1
Octavo is the faster. The one that has no turn is kept from running (a peer) or has nothing to do (Octavo; what it uses
then is told). A peer that cannot run here is in the figures with the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import floor
import limits
import machine
import make_models
import ratios
import workloads
from floor import Cost
from limits import Limits
from load import WrongOutputError
from octavo_cell import OctavoCell, flags_of, open_cell, run_blocking
from peer_process import PEERS, Peer, PeerError, PeerProcess, open_peer
from serve import add_load_flags, over_floor

from octavo.models.ensure import ensure_prepared

SCHEMA = "octavo.bench.peers/1"
_BATCHES = ("W2", "W3")
_START_SECONDS = 1800.0
"""Time for a peer to get ready; the first start converts the model and compiles."""
_RUN_SECONDS = 1800.0


class Comparison:
    """All pairs of runs of one model. Every run, Octavo's or a peer's, has a number of its own: see workloads.build."""

    def __init__(self, cell: OctavoCell, folder: Path, args: argparse.Namespace, save: Callable[[], None]) -> None:
        """`save` is called after each peer and workload with what is there by then."""
        self.figures: dict[str, dict[str, Any]] = {name: {} for name in args.workloads}
        self.unavailable: dict[str, str] = {}
        self.idle_shares: list[float] = []
        self._cell, self._folder, self._args, self._save = cell, folder, args, save
        self._num_builds = 0

    async def compare(self, peer: Peer, logs: Path) -> None:
        """Run the peer's workloads in turns with Octavo; where it cannot, note why."""
        names = [name for name in self._args.workloads if name in peer.workloads]
        if not names:
            return
        try:
            command = peer.command(self._folder, _num_threads(self._args))
            _say(f"{peer.name}: starting")
            async with open_peer(command, logs / f"{peer.name}.log", _START_SECONDS) as process:
                _say(f"{peer.name}: {process.about['label']}, ready after {process.about['load_s']:.1f} s")
                for number in range(2):
                    await process.run(workloads.warm_up(number, num_ids=self._cell.num_ids))
                for name in names:
                    self.figures[name][peer.name] = await self._pairs(name, process)
                    self._save()
        except (PeerError, WrongOutputError) as error:
            _say(f"{peer.name}: {error}")
            self.unavailable[peer.name] = str(error)
            self._save()

    async def _pairs(self, name: str, process: PeerProcess) -> dict[str, Any]:
        pairs = []
        ask = self._cell.collect if process.tells_at_end and name in _BATCHES else self._cell.run
        for _ in range(self._args.repeats):
            workload = self._build(name)
            with process.paused():
                try:
                    octavo = await ask(workload)
                except WrongOutputError as error:  # else it would be the peer's
                    raise SystemExit(f"Octavo was not measured: {error}") from None
                await machine.wait_idle(self._cell.pids)
            before, began = machine.cpu_seconds(self._cell.pids), time.perf_counter()
            first_token_of = self._build(name) if name == "W1" else None
            async with _within(_RUN_SECONDS):
                peer = await process.run(workload, first_token_of)
            used, seconds = machine.cpu_seconds(self._cell.pids) - before, time.perf_counter() - began
            self.idle_shares.append(used / seconds)
            pairs.append((octavo, peer))
            _say(f"{process.about['label']}: {name}: Octavo {octavo['total_s']:.2f} s, peer {peer['total_s']:.2f} s")
        return ratios.compare(name, pairs) | {key: process.about[key] for key in ("label", "versions", "load_s")}

    def _build(self, name: str) -> workloads.Workload:
        self._num_builds += 1
        return workloads.build(
            name,
            self._num_builds,
            rate=self._args.rate,
            num_ids=self._cell.num_ids,
            num_requests=self._args.requests,
        )


@contextlib.asynccontextmanager
async def _within(seconds: float) -> AsyncIterator[None]:
    """Turn a run that takes too long into the peer's failure."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise PeerError(f"a run took more than {seconds:.0f} s") from None


async def compare_model(
    name: str, args: argparse.Namespace, measured: Limits, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Compare with every peer on one model; returns the figures. `save` is called with them as they grow."""
    folder = make_models.ensure(name, report=_say)
    prepared = ensure_prepared(str(folder), report=_say)
    with tempfile.TemporaryDirectory(prefix="octavo-peers-") as logs:
        async with open_cell(prepared, flags_of(args.set, dtype=args.dtype, threads=args.threads)) as cell:
            figures: dict[str, Any] = {
                "revision": prepared.revision,
                "octavo": {"dtype": cell.served["dtype"], "start_seconds": cell.start_seconds, "served": cell.served},
            }
            comparison = Comparison(cell, folder, args, lambda: save(figures))
            figures |= {"workloads": comparison.figures, "unavailable": comparison.unavailable}
            for peer in args.peers:
                await comparison.compare(PEERS[peer], Path(logs))
    figures["octavo"]["idle_cpu_share"] = max(comparison.idle_shares, default=None)
    figures["over_floor"] = _over_floors(figures, folder, args, cell, measured)
    return figures


def _over_floors(
    figures: dict[str, Any], folder: Path, args: argparse.Namespace, cell: OctavoCell, measured: Limits
) -> dict[str, Any]:
    """Return by workload the floor and how far above it Octavo was, over the runs of all pairs."""
    cost = Cost.of(folder, cell.served["dtype"], measured)
    found = {}
    for name, peers in figures["workloads"].items():
        made = [pair["octavo"] for each in peers.values() for pair in each["pairs"]]
        if made:
            workload = workloads.build(name, rate=args.rate, num_ids=cell.num_ids, num_requests=args.requests)
            ideal = floor.floor_of(workload, cost)
            found[name] = {"over_floor": over_floor(name, ratios.medians(made), ideal), "floor": asdict(ideal)}
    return found


def print_tables(document: dict[str, Any]) -> None:
    """Print for each model a row for each workload and peer."""
    for model, figures in document["models"].items():
        print(f"{model}, Octavo in {figures['octavo']['dtype']}: time of the peer over time of Octavo")
        for workload, peers in figures["workloads"].items():
            for name, row in sorted(peers.items(), key=lambda item: item[1]["ratio"]):
                times = ", ".join(
                    f"{metric} {row['peer'][metric]:.4g} / {row['octavo'][metric]:.4g} s = {ratio:.2f}"
                    for metric, ratio in row["ratios"].items()
                )
                print(f"  {workload} {name:24}{row['ratio']:7.2f}   {times}")
        for name, reason in figures["unavailable"].items():
            print(f"  {name}: not measured: {reason[:300]}")
    for note in document["notes"]:
        print(f"note: {note}")


def main() -> int:
    """Compare, print tables, write the JSON file and the picture after each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", action="append", metavar="NAME", help="name or Hugging Face folder, several times for several models"
    )
    parser.add_argument(
        "--peers", type=_peers, default=tuple(PEERS), metavar="P,P,...", help=f"of {','.join(PEERS)} [default: all]"
    )
    parser.add_argument("--png", type=Path, metavar="OUT", help="the picture [default: beside the JSON file]")
    add_load_flags(parser)
    args = parser.parse_args()
    measured = limits.known_or_measured(args.limits, _num_threads(args))
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": machine.describe(),
        "limits": asdict(measured),
        "rate": args.rate,
        "repeats": args.repeats,
        "headline": ratios.HEADLINE,
        "notes": machine.notes(),
        "models": {},
    }
    if args.requests != workloads.NUM_REQUESTS:
        document["notes"].append(f"only the first {args.requests} requests of W2 to W4 were sent")
    for name in args.model or [make_models.SMOLLM2]:

        def save(figures: dict[str, Any], name: str = Path(name).name) -> None:
            document["models"][name] = figures
            _write(document, args)

        save(run_blocking(compare_model(name, args, measured, save)))
    print_tables(document)
    return 0


def _write(document: dict[str, Any], args: argparse.Namespace) -> None:
    png = args.png or (args.json and args.json.with_suffix(".png"))
    if args.json is not None:
        args.json.write_text(json.dumps(document, indent=2) + "\n")
    if png is not None:
        from peers_plot import draw

        draw(document, png)


def _peers(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in PEERS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(PEERS)}")
    return names


def _num_threads(args: argparse.Namespace) -> int:
    return int(args.threads or len(os.sched_getaffinity(0)))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
