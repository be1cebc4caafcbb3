"""`octavo health`: what grpc.health.v1 answers, as an exit code. Container health checks run it."""

from __future__ import annotations

import argparse
import math

from octavo.commands.client_flags import address

_TIMEOUT = 3.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "health",
        help="ask one service for its health",
        description="Ask any service by grpc.health.v1 and print what it says. The exit code is 0 for SERVING, else 1.",
    )
    parser.add_argument("address", type=address, metavar="HOST:PORT", help="where the service listens")
    parser.add_argument(
        "--service",
        default="",
        metavar="NAME",
        help="a part of it, such as octavo.v1.InferenceService or model/NAME [default: the whole process]",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=_TIMEOUT,
        metavar="SECONDS",
        help=f"time that the answer may take [default: {_TIMEOUT:g}]",
    )
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


def run(args: argparse.Namespace) -> int:
    """Ask once. Raises CommandError where there is no answer."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from octavo.rpc.channel import open_sync_channel

    request = health_pb2.HealthCheckRequest(service=args.service)
    try:
        with open_sync_channel(args.address) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=args.timeout)
    except grpc.RpcError as error:
        from octavo.client.errors import START_HINT, CallInfo, error_from
        from octavo.terminal.errors import CommandError

        if error.code() is not grpc.StatusCode.NOT_FOUND:
            call = CallInfo(args.address, "Check", args.timeout)
            message = error_from(error, call).message.removesuffix(f"; {START_HINT}")
            raise CommandError(message, "`octavo doctor` shows which services answer") from None
        hint = "leave out --service to ask for the whole process"
        raise CommandError(f"{args.address} knows no service {args.service!r}", hint) from None
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1
