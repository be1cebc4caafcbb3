"""Calls Octavo with the stubs made from protos/: streams a chat, cancels a call, shows an error with its details."""

from __future__ import annotations

import argparse
import sys

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from octavo.v1 import inference_pb2, inference_pb2_grpc

TIMEOUT = 120.0
"""Seconds that a call may take. The server knows it: a request past its deadline is ended and its memory freed."""

CANCEL_AFTER = 5
"""Tokens."""


def main() -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="the gateway's, such as 127.0.0.1:50051")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("chat", help="stream the answer to a question").add_argument("question")
    commands.add_parser("cancel", help=f"break an answer off after {CANCEL_AFTER} tokens")
    commands.add_parser("error", help="send a bad request and show what comes back")
    args = parser.parse_args()
    try:
        # One channel for the whole life of a program; leaving the block closes it and cancels what still runs.
        with grpc.insecure_channel(args.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            if args.command == "chat":
                chat(stub, args.question)
            elif args.command == "cancel":
                cancel(stub)
            else:
                show_error(stub)
    except grpc.RpcError as error:
        print(describe(error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def chat(stub: inference_pb2_grpc.InferenceServiceStub, question: str) -> None:
    """Print an answer as it is generated."""
    request = ask(question)
    request.stopping.max_tokens = 256
    for event in stub.Generate(request, timeout=TIMEOUT):
        match event.WhichOneof("event"):
            case "delta":
                print(event.delta.text, end="", flush=True)
            case "choice_finished":
                print()
                reason = inference_pb2.FinishReason.Name(event.choice_finished.reason)
                print(f"{reason}, {event.choice_finished.completion_tokens} tokens", file=sys.stderr)


def cancel(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    """Break an answer off that would otherwise go on until the model's context is full."""
    request = ask("Count from one to a thousand.")
    request.stopping.ignore_eos = True
    call = stub.Generate(request, timeout=TIMEOUT)
    num_tokens = 0
    for event in call:
        print(event.delta.text, end="", flush=True)
        num_tokens += len(event.delta.token_ids)
        if num_tokens >= CANCEL_AFTER:
            # Leaving the loop alone would not do: the call would go on, and the server with it.
            call.cancel()
            break
    print(f"\nbroken off after {num_tokens} tokens: {call.code().name}")


def show_error(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    """Send a request with three bad fields and print the refusal: all three are named at once."""
    request = ask("Is this request right?")
    request.sampling.temperature = 9
    request.sampling.top_p = 0
    request.n = 0
    try:
        for _ in stub.Generate(request, timeout=TIMEOUT):
            pass
    except grpc.RpcError as error:
        print(describe(error))


def ask(question: str) -> inference_pb2.GenerateRequest:
    """Return a request with one question. Temperature 0: the same answer every time."""
    message = inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_USER, content=question)
    return inference_pb2.GenerateRequest(
        chat=inference_pb2.ChatInput(messages=[message]),
        sampling=inference_pb2.SamplingConfig(temperature=0),
    )


def describe(error: grpc.RpcError) -> str:
    """Return what an error says, line by line. The details are absent where no server made it, as when none listens."""
    lines = [f"code {error.code().name}", f"message {error.details()}"]
    status = rpc_status.from_call(error)
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
