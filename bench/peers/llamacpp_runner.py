"""llama.cpp's llama-server in bfloat16. The model's GGUF file is made beside its folder on first use."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import protocol
import servers

_SLOTS = 16
_SLOT_TOKENS = 1024
_ENVIRONMENT = Path(sys.prefix)


class LlamaCpp(protocol.Engine):
    """The server, as a process."""

    def __init__(self, args: argparse.Namespace) -> None:
        port = servers.free_port()
        program = str(_ENVIRONMENT / "bin" / "llama-server")
        threads = str(args.threads)
        command = [program, "--model", str(args.model), "--host", "127.0.0.1", "--port", str(port), "--alias", "model"]
        command += ["--threads", threads, "--threads-batch", threads, "--parallel", str(_SLOTS)]
        command += ["--ctx-size", str(_SLOTS * _SLOT_TOKENS), "--no-kv-unified", "--no-webui"]
        self._server = servers.start(command, port, dict(os.environ))
        shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        self.label = f"llama.cpp server bf16, {_SLOTS} slots"
        self.versions = "llama.cpp " + (shown.stderr + shown.stdout).partition("\n")[0]
        self.url = f"http://127.0.0.1:{port}/v1"

    def stop(self) -> None:
        """See Engine."""
        servers.stop(self._server)


def convert(model: Path) -> Path:
    """Return the model's GGUF file, made now where it is missing. Raises CalledProcessError."""
    file = model.with_name(f"{model.name}.bf16.gguf")
    if not file.is_file():
        source = _ENVIRONMENT / "source" / "vendor" / "llama.cpp"
        unfinished = file.with_suffix(".unfinished")
        command = [sys.executable, str(source / "convert_hf_to_gguf.py"), str(model), "--outtype", "bf16"]
        subprocess.run([*command, "--outfile", str(unfinished)], check=True, stdout=sys.stderr)
        unfinished.rename(file)
    return file


if __name__ == "__main__":
    protocol.main(LlamaCpp, convert=convert)
