"""What to type next: ready-to-paste ways to call a cell that runs."""

from __future__ import annotations

import json
import textwrap

from octavo.local.plan import CellPlan

_QUESTION = "What is the capital of France?"


def grpcurl_commands(address: str) -> dict[str, str]:
    """Return commands for grpcurl by what they do. Reflection tells grpcurl the contract, so no file is needed."""
    chat = {"chat": {"messages": [{"role": "CHAT_ROLE_USER", "content": _QUESTION}]}, "sampling": {"temperature": 0}}
    return {
        "list the services": f"grpcurl -plaintext {address} list",
        "describe the models": f"grpcurl -plaintext {address} octavo.v1.ModelService/ListModels",
        "stream a chat": f"grpcurl -plaintext -d '{json.dumps(chat)}' {address} octavo.v1.InferenceService/Generate",
    }


def python_program(address: str) -> str:
    """Return a Python program that streams a chat."""
    return textwrap.dedent(
        f"""\
        import octavo

        with octavo.Client("{address}") as client:
            for delta in client.generate([{{"role": "user", "content": "{_QUESTION}"}}], temperature=0):
                print(delta.text, end="", flush=True)
        print()
        """
    )


def curl_command(address: str) -> str:
    """Return a command for curl that streams a chat from the OpenAI-compatible API."""
    chat = {"messages": [{"role": "user", "content": _QUESTION}], "temperature": 0, "stream": True}
    return f"curl -N http://{address}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(chat)}'"


def ready_message(model: str, plan: CellPlan) -> str:
    """Return what `octavo up` prints once everything serves."""
    address = plan.gateway_address
    lines = [f"{model} is served at {address} (gRPC, plaintext). Ctrl-C stops it."]
    lines += [f"OpenAI-compatible API at http://{plan.http_address}/v1, docs at http://{plan.http_address}/docs;"]
    lines += [f"operator's API at {plan.admin_address}; metrics:"]
    lines += [f"  {service.name:12} http://{service.metrics_address}/metrics" for service in plan.services]
    lines += ["", "# talk to it", f"octavo chat --address {address}", ""]
    for purpose, command in grpcurl_commands(address).items():
        lines += [f"# {purpose}", command, ""]
    lines += ["# the same over HTTP, as every OpenAI client does", curl_command(plan.http_address), ""]
    lines += ["# the same chat from Python, in this environment; docs/clients.md has other languages"]
    # For a shell, as all else of it: the whole can be pasted.
    return "\n".join([*lines, "python - <<'END'"]) + "\n" + python_program(address) + "END\n"
