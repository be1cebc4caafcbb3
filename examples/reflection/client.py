"""Calls Octavo without stubs and without a .proto file: the server's reflection tells what it takes and gives.

Requests and responses are dicts in protobuf's JSON form. Streams a chat, cancels a call, shows an error with details.
"""

from __future__ import annotations

import argparse
import sys

import grpc
from google.rpc import error_details_pb2
from grpc_requests import Client
from grpc_status import rpc_status

SERVICE = "octavo.v1.InferenceService"
TIMEOUT = 120.0
"""Seconds that a call may take. The server knows it: a request past its deadline is ended and its memory freed."""

CANCEL_AFTER = 5
"""Tokens."""


def main() -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(description="Call Octavo knowing nothing but its address.")
    parser.add_argument("address", help="the gateway's, such as 127.0.0.1:50051")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("chat", help="stream the answer to a question").add_argument("question")
    commands.add_parser("cancel", help=f"break an answer off after {CANCEL_AFTER} tokens")
    commands.add_parser("error", help="send a bad request and show what comes back")
    args = parser.parse_args()
    try:
        # Asks the server for its services at once, so an address where nobody listens is an error here already.
        client = Client(args.address)
        try:
            if args.command == "chat":
                chat(client, args.question)
            elif args.command == "cancel":
                cancel(client)
            else:
                show_error(client)
        finally:
            client.channel.close()
    except grpc.RpcError as error:
        print(describe(error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def chat(client: Client, question: str) -> None:
    """Print an answer as it is generated. Fields at their defaults are absent from the dicts."""
    request = {**ask(question), "stopping": {"max_tokens": 256}}
    for event in client.request(SERVICE, "Generate", request, timeout=TIMEOUT):
        if "delta" in event:
            print(event["delta"].get("text", ""), end="", flush=True)
        elif "choice_finished" in event:
            finished = event["choice_finished"]
            print()
            print(f"{finished['reason']}, {finished['completion_tokens']} tokens", file=sys.stderr)


def cancel(client: Client) -> None:
    """Break an answer off that would otherwise go on until the model's context is full."""
    request = {**ask("Count from one to a thousand."), "stopping": {"ignore_eos": True}}
    # Raw: grpc's own call, which can be cancelled, and messages in place of dicts.
    call = client.request(SERVICE, "Generate", request, raw_output=True, timeout=TIMEOUT)
    num_tokens = 0
    for event in call:
        print(event.delta.text, end="", flush=True)
        num_tokens += len(event.delta.token_ids)
        if num_tokens >= CANCEL_AFTER:
            # Leaving the loop alone would not do: the call would go on, and the server with it.
            call.cancel()
            break
    print(f"\nbroken off after {num_tokens} tokens: {call.code().name}")


def show_error(client: Client) -> None:
    """Send a request with three bad fields and print the refusal: all three are named at once."""
    request = {
        **ask("Is this request right?"),
        "sampling": {"temperature": 9, "top_p": 0},
        "n": 0,
    }
    try:
        for _ in client.request(SERVICE, "Generate", request, timeout=TIMEOUT):
            pass
    except grpc.RpcError as error:
        print(describe(error))


def ask(question: str) -> dict[str, object]:
    """Return a request with one question. Temperature 0: the same answer every time."""
    return {
        "chat": {"messages": [{"role": "CHAT_ROLE_USER", "content": question}]},
        "sampling": {"temperature": 0},
    }


def describe(error: grpc.RpcError) -> str:
    """Return what an error says, line by line. The details are absent where no server made it, as when none listens."""
    lines = [f"code {error.code().name}", f"message {error.details()}"]
    status = rpc_status.from_call(error)
    # The details are messages of google.rpc, the same for every gRPC service.
    for detail in status.details if status else ():
        info = error_details_pb2.ErrorInfo()
        bad_request = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            lines.append(f"reason {info.reason}")
        elif detail.Unpack(bad_request):
            lines += [f"field {each.field}: {each.description}" for each in bad_request.field_violations]
        elif detail.Unpack(retry):
            lines.append(f"retry in {retry.retry_delay.ToTimedelta().total_seconds():g} s")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
