"""vLLM's CPU build: LLM.generate in this process (--mode offline), or its OpenAI server (--mode server). bfloat16."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import protocol
import servers

_MAX_MODEL_LEN = 2048
_NAME = "model"


def set_environment(args: argparse.Namespace) -> None:
    """Set what vLLM reads from its environment; what the user has set stays."""
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": str(args.kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0))[: args.threads]),
        "VLLM_NO_USAGE_STATS": "1",
    }
    # vLLM asks for both, for its allocation and its threads; without them it only warns, and is slower.
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    preload = [str(library)] if library.is_file() else []
    preload += [str(path) for path in sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))]
    if preload:
        defaults["LD_PRELOAD"] = ":".join(preload)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


class Offline(protocol.Engine):
    """The engine in this process."""

    def __init__(self, args: argparse.Namespace) -> None:
        import vllm

        self._vllm = vllm
        self._llm = vllm.LLM(
            model=str(args.model), dtype="bfloat16", max_model_len=_MAX_MODEL_LEN, enable_prefix_caching=True
        )
        self.label, self.versions = "vLLM offline bf16", _versions()

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """See Engine."""
        parameters = [
            self._vllm.SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in lengths
        ]
        inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        made = self._llm.generate(inputs, parameters, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in made]


class Server(protocol.Engine):
    """The OpenAI server, as a process."""

    def __init__(self, args: argparse.Namespace) -> None:
        port = servers.free_port()
        # The `vllm` command of this package does not start: it looks for a distribution of another name.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(args.model)]
        command += ["--served-model-name", _NAME, "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
        command += ["--max-model-len", str(_MAX_MODEL_LEN), "--enable-prefix-caching", "--disable-uvicorn-access-log"]
        self._server: subprocess.Popen[bytes] = servers.start(command, port, dict(os.environ))
        self.label, self.versions = "vLLM server bf16", _versions()
        self.url = f"http://127.0.0.1:{port}/v1"

    def stop(self) -> None:
        """See Engine."""
        servers.stop(self._server)


def _versions() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("vllm-cpu", "torch"))


def _make(args: argparse.Namespace) -> protocol.Engine:
    return Offline(args) if args.mode == "offline" else Server(args)


def _start_again_with_preload() -> None:
    """Start this program anew where libraries are to be loaded before all others: that is only seen at a start."""
    before = os.environ.get("LD_PRELOAD")
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--kv-gib", type=int, default=4)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    set_environment(parser.parse_known_args()[0])
    if before is None and "LD_PRELOAD" in os.environ:
        os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":  # vLLM starts processes that import this module again
    _start_again_with_preload()
    protocol.main(_make, "offline", "server")
