"""`octavo bench`: measure a server under load."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from octavo.commands.numbers import number
from octavo.settings import EXECUTOR_METRICS_PORT, SCHEDULER_METRICS_PORT

if TYPE_CHECKING:
    from octavo.bench.profile import Profiler
    from octavo.bench.session import Outcome
    from octavo.bench.settings import BenchSettings
    from octavo.bench.target import GenerationOptions, Target

_DESCRIPTION = """\
Send requests to a gateway of Octavo (gRPC) or to any OpenAI-compatible HTTP server, and tell how long they took: time
to first token, inter-token latency, time per output token, end to end, throughput, errors. docs/bench.md says exactly
what each figure means.

The load is a closed loop (--concurrency), Poisson arrivals (--rate) or a file of arrivals (--trace). Arrivals never
wait for answers, and latencies count from when a request was to be sent.
"""
_EPILOG = """\
examples:
  octavo bench --concurrency 8 --requests 64 --input-tokens 128 --output-tokens 64
  octavo bench --rate 4 --duration 60 --input-tokens lognormal:200,0.8 --slo ttft=500ms,tpot=50ms
  octavo bench --url http://127.0.0.1:8000/v1 --api chat --concurrency 4 --json run.json --png run.png
  octavo bench --concurrency 64 --requests 64 --profile     (with `octavo up MODEL --profile-ops` running)

Ctrl-C stops it: live requests are cancelled, and the figures are of what had ended.
"""
_DEFAULT_CONCURRENCY = 8
_DEFAULT_REQUESTS = 64
_INTERRUPTED = 130
_Value = TypeVar("_Value")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "bench",
        help="measure a server under load: latencies, throughput, errors",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_target_flags(parser.add_argument_group("what is measured"))
    _add_load_flags(parser.add_argument_group("load"))
    _add_request_flags(parser.add_argument_group("requests"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--slo", type=_objectives, default={}, metavar="NAME=TIME,...",
        help="objectives of a request, for goodput: ttft, itl (every gap), tpot, e2e, as in ttft=200ms,itl=50ms",
    )  # fmt: skip
    output.add_argument("--json", type=Path, metavar="FILE", help="write everything: settings, figures, every request")
    output.add_argument("--png", type=Path, metavar="FILE", help="draw the distributions and the course of the run")
    output.add_argument(
        "--profile", type=Path, nargs="?", const=Path("profile.png"), metavar="FILE",
        help="tell and draw where the time of a step goes, from the metrics pages of scheduler and executors, which "
        "run with --profile-ops [FILE without a value: profile.png]",
    )  # fmt: skip
    output.add_argument(
        "--scheduler-metrics", default=f"127.0.0.1:{SCHEDULER_METRICS_PORT}", metavar="HOST:PORT",
        help="page for --profile [default: %(default)s]",
    )  # fmt: skip
    output.add_argument(
        "--executor-metrics", default=f"127.0.0.1:{EXECUTOR_METRICS_PORT}", metavar="HOST:PORT,...",
        help="pages for --profile [default: %(default)s]",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print; exit code 1 where no request succeeded, 130 at Ctrl-C. Raises BenchError, ServiceError."""
    settings = _settings(args)
    _check_outputs(args)
    return _bench(args, settings)


def _add_target_flags(group: argparse._ArgumentGroup) -> None:
    where = group.add_mutually_exclusive_group()
    where.add_argument(
        "--address", metavar="HOST:PORT,...",
        help="gateways of Octavo; requests go to several in turn "
        "[default: OCTAVO_ADDRESS, else one found on this machine]",
    )  # fmt: skip
    where.add_argument(
        "--url", metavar="URL", help="base URL of an OpenAI-compatible server instead, such as http://127.0.0.1:8000/v1"
    )
    group.add_argument("--api-key", metavar="KEY", help="for --url [default: OPENAI_API_KEY]")
    group.add_argument("--model", default="", metavar="NAME", help="[default: the only one served]")
    group.add_argument(
        "--api", choices=("completions", "chat"), default="completions",
        help="continue prompts as they are, or send each as a chat of one message [default: completions]",
    )  # fmt: skip


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    kind = group.add_mutually_exclusive_group()
    kind.add_argument(
        "--concurrency", type=_count, metavar="N",
        help=f"closed loop: keep N requests live [default: {_DEFAULT_CONCURRENCY}]",
    )  # fmt: skip
    kind.add_argument("--rate", type=_positive, metavar="R", help="open loop: Poisson arrivals, R requests a second")
    kind.add_argument("--trace", type=Path, metavar="FILE", help="open loop: JSON lines, each with its arrival")
    group.add_argument(
        "--requests", type=_count, metavar="M",
        help=f"how many to measure [default: {_DEFAULT_REQUESTS}; of a trace, all]",
    )  # fmt: skip
    group.add_argument("--duration", type=_seconds, metavar="SECONDS", help="how long requests arrive, with --rate")
    group.add_argument(
        "--warmup", type=_count_or_none, default=2, metavar="N",
        help="requests before the run, left out of the figures [default: 2]",
    )  # fmt: skip
    group.add_argument(
        "--timeout", type=_seconds, default=600.0, metavar="SECONDS", help="longest request [default: 600]"
    )


def _add_request_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--input-tokens", type=_lengths, default="128", metavar="LENGTH",
        help="of prompts that are made up: N, LEAST-MOST, normal:MEAN,DEVIATION or lognormal:MEDIAN,SIGMA "
        "[default: 128]",
    )  # fmt: skip
    group.add_argument(
        "--output-tokens",
        type=_lengths,
        default="64",
        metavar="LENGTH",
        help="most to generate, likewise [default: 64]",
    )
    group.add_argument(
        "--prefix-tokens", type=_count_or_none, default=0, metavar="N",
        help="begin every prompt that is made up with the same N tokens, beside --input-tokens [default: 0]",
    )  # fmt: skip
    group.add_argument(
        "--prompts", type=Path, metavar="FILE", help="take prompts from a file, a line each; JSON lines in a .jsonl"
    )
    group.add_argument(
        "--stop-at-eos", action="store_true", help="let the model end its output; else end-of-sequence is ignored"
    )
    group.add_argument("--temperature", type=number(0, 2), default=0.0, metavar="T", help="[default: 0, greedy]")
    group.add_argument(
        "--seed", type=_count_or_none, default=0, metavar="N", help="of prompts, lengths and arrivals [default: 0]"
    )


def _settings(args: argparse.Namespace) -> BenchSettings:
    """Return what was chosen. Raises BenchError where flags contradict one another."""
    from octavo.bench.records import BenchError
    from octavo.bench.settings import BenchSettings
    from octavo.bench.target import GenerationOptions

    if args.duration is not None and args.rate is None:
        raise BenchError("--duration: arrivals need a --rate")
    if args.prompts is not None and args.trace is not None:
        raise BenchError("--prompts, --trace: a trace has its own prompts; give one of the two")
    is_closed = args.rate is None and args.trace is None
    num_requests = args.requests
    if num_requests is None and args.duration is None and args.trace is None:
        num_requests = _DEFAULT_REQUESTS
    options = GenerationOptions(
        model=args.model,
        is_chat=args.api == "chat",
        ignore_eos=not args.stop_at_eos,
        temperature=args.temperature,
        timeout=args.timeout,
    )
    return BenchSettings(
        options=options,
        concurrency=(args.concurrency or _DEFAULT_CONCURRENCY) if is_closed else None,
        rate=args.rate,
        trace=args.trace,
        num_requests=num_requests,
        duration=args.duration,
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        prefix_tokens=args.prefix_tokens,
        prompts=args.prompts,
        num_warmup=args.warmup,
        seed=args.seed,
        objectives=args.slo,
    )


def _check_outputs(args: argparse.Namespace) -> None:
    """Find out before the run what would lose its results after it. Raises BenchError."""
    from octavo.bench.records import BenchError

    needs = (("--url", args.url, "httpx"), ("--png", args.png, "matplotlib"), ("--profile", args.profile, "matplotlib"))
    for flag, needed, package in needs:
        if needed and importlib.util.find_spec(package) is None:
            raise BenchError(f'{flag} needs {package}, which is not installed: pip install "octavo[bench]"')
    for flag, path in (("--json", args.json), ("--png", args.png), ("--profile", args.profile)):
        if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
            raise BenchError(f"{flag}: cannot write {path}: choose a file in a folder that exists and is writable")


def _bench(args: argparse.Namespace, settings: BenchSettings) -> int:
    import uvloop

    from octavo.bench.document import document
    from octavo.bench.report import report

    started_at = datetime.now(UTC)
    outcome = uvloop.run(_measure(args, settings))
    if outcome is None:
        print("octavo: interrupted before anything was measured", file=sys.stderr)
        return _INTERRUPTED
    print(report(outcome))
    if args.json is not None:
        args.json.write_text(json.dumps(document(outcome, started_at), indent=1) + "\n", encoding="utf-8")
        print(f"wrote {args.json}")
    if args.png is not None:
        from octavo.bench.plots import draw

        draw(outcome, args.png)
        print(f"wrote {args.png}")
    if outcome.profile is not None:
        from octavo.bench.plots import draw_profile

        draw_profile(outcome, args.profile)
        print(f"wrote {args.profile}")
    if outcome.result.was_stopped:
        return _INTERRUPTED
    return 0 if outcome.figures.num_ok else 1


async def _measure(args: argparse.Namespace, settings: BenchSettings) -> Outcome | None:
    from octavo.bench.progress import shown_progress
    from octavo.bench.session import Session, run_until_stopped

    clock = time.perf_counter
    profiler = _profiler(args)
    target = await _open_target(args, settings.options, clock)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def on_signal() -> None:
        stopping.set()
        # A second one takes its usual effect.
        for signum in signals:
            loop.remove_signal_handler(signum)

    for signum in signals:
        loop.add_signal_handler(signum, on_signal)
    try:
        return await run_until_stopped(Session(settings, target, clock, shown_progress, profiler), stopping)
    finally:
        for signum in signals:
            loop.remove_signal_handler(signum)
        await target.close()


def _profiler(args: argparse.Namespace) -> Profiler | None:
    """Return what reads the metrics pages, where it was asked for. Raises ServiceError for a bad address."""
    if args.profile is None:
        return None
    from octavo.bench.profile import Profiler
    from octavo.client.discovery import checked_address

    executors = [checked_address(each.strip(), "--executor-metrics") for each in args.executor_metrics.split(",")]
    return Profiler(checked_address(args.scheduler_metrics, "--scheduler-metrics"), executors)


async def _open_target(args: argparse.Namespace, options: GenerationOptions, clock: Callable[[], float]) -> Target:
    """Return the target. Raises BenchError, and ServiceError where no gateway is found."""
    if args.url is not None:
        from octavo.bench.http_client import HttpTarget

        api_key = args.api_key if args.api_key is not None else os.environ.get("OPENAI_API_KEY", "")
        return HttpTarget(args.url, options, clock, api_key=api_key)
    from octavo.bench.grpc_client import GrpcTarget
    from octavo.client.discovery import GATEWAY, checked_address, find

    if args.address is None:
        return GrpcTarget([await find(GATEWAY)], options, clock)
    addresses = [checked_address(address.strip(), "--address") for address in args.address.split(",")]
    return GrpcTarget(addresses, options, clock)


def _parsed(parse: Callable[[str], _Value], text: str) -> _Value:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {error}") from None


def _lengths(text: str) -> object:
    from octavo.bench.workload import Lengths

    return _parsed(Lengths, text)


def _objectives(text: str) -> dict[str, float]:
    from octavo.bench.settings import parse_objectives

    try:
        return parse_objectives(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 10_000_000):
        raise argparse.ArgumentTypeError("must be a number from 1 to 10000000")
    return int(text)


def _count_or_none(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError("must be a number above 0")
    return value


def _seconds(text: str) -> float:
    from octavo.bench.workload import LONGEST_SECONDS

    value = _positive(text)
    if value > LONGEST_SECONDS:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, at most {LONGEST_SECONDS:.0f}")
    return value
