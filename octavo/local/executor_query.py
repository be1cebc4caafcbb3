"""Asking the executor's package about models: it runs as a process of its own, since nothing here may import torch."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

from octavo.models.errors import ModelError

_NEEDED = ("torch", "numpy", "gguf")


def ask_executor(*question: str) -> dict[str, Any]:
    """Return the answer of `python -m executor_svc.inspection`. Raises ModuleNotFoundError where the executor is not
    installed, ModelError where it gives no answer.
    """
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    command = [sys.executable, "-m", "executor_svc.inspection", *question]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        words = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ModelError(f"the executor's package gives no answer: {words}") from None
    assert isinstance(answer, dict)  # executor_svc.inspection
    return answer
