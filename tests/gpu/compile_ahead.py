"""Compiles every kernel for a GPU that is not here, and writes JSON, a line for each form.

compile_ahead.py TARGET [--every | --planted JSON]

The ops themselves are called, on CPU tensors, and what they launch is compiled and not run: so what is measured are the
forms that a GPU would get, with the warps, stages and specialisations that it would get. Of each, registers, shared
memory and spilled bytes are read from the binary.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from launches import launches
from targets import TARGETS, Target

from executor_svc.kernels.sets.triton import assemble

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


ONLY: list[str] = []
"""The kernels to compile; all where it is empty."""


class _NoGpu(DriverBase):
    """A driver that has a target, and nothing else."""

    def __init__(self, target: Target) -> None:
        self._target = target.target

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_current_target(self) -> Any:
        return self._target

    def get_active_torch_device(self) -> Any:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def use(target: Target, found: list[dict[str, Any]]) -> None:
    """From now on compile what is launched, and note what each form takes."""
    driver.set_active(_NoGpu(target))
    run = JITFunction.run
    seen: set[str] = set()

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        if ONLY and self.fn.__name__ not in ONLY:
            return
        kernel = run(self, *arguments, grid=grid, warmup=True, **named)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            op = self.fn.__module__.split(".")[-2]
            constants = {name: value for name, value in named.items() if isinstance(value, int)}
            form = {"op": op, "kernel": self.fn.__name__, "constants": constants}
            found.append(form | figures(kernel))

    JITFunction.run = compile_only


def figures(kernel: Any) -> dict[str, Any]:
    """Read a form's figures from its binary."""
    # Shared memory is given at the launch: the binary does not know of it.
    read = of_cubin(kernel.asm["cubin"]) if "cubin" in kernel.asm else of_amdgcn(kernel.asm["amdgcn"])
    text = of_ptx(kernel.asm["ptx"]) if "ptx" in kernel.asm else {}
    text["source_barriers"] = len(re.findall(r"\bgpu\.barrier|ttg\.barrier", kernel.asm["ttir"]))
    return read | {"shared_bytes": kernel.metadata.shared, "text": text}


def of_cubin(cubin: bytes) -> dict[str, int]:
    """From what cuobjdump says: registers of a thread, and bytes of its stack, which are spilled ones."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    read = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    return {"registers": read["REG"], "spilled_bytes": read["STACK"] + read["LOCAL"]}


def of_ptx(ptx: str) -> dict[str, int]:
    """How often instructions that matter stand in the text."""
    wanted = {
        "mma": r"\bmma\.sync|\bwgmma\.mma_async",
        "barrier": r"\bbar\.sync|\bbarrier\.sync",
        "division": r"\bdiv\.rn\.f32",
    }
    wanted |= {"fused": r"\bfma\.rn\.f32", "wide_load": r"\bld\.global[.\w:]*\.v[24]\b|cp\.async\.cg"}
    return {name: len(re.findall(pattern, ptx)) for name, pattern in wanted.items()}


def of_amdgcn(text: str) -> dict[str, int]:
    """From the metadata of AMD's assembly: vector registers of a lane, and bytes of its scratch, which are spilled."""

    def read(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        assert found is not None, name
        return int(found[1])

    return {"registers": read("vgpr_count"), "spilled_bytes": read("private_segment_fixed_size")}


def compile_all(target: Target, found: list[dict[str, Any]], *, every: bool) -> None:
    """Compile what the launches launch, and print each form."""
    for launch, call in launches(assemble(target.gpu), every=every):
        before = len(found)
        call()
        for form in found[before:]:
            print(json.dumps({"launch": launch, **form}), flush=True)


def compile_planted(target: Target, found: list[dict[str, Any]], planted: list[dict[str, str]]) -> None:
    """Compile one launch with one module taken from another file, for each of `planted`, and print its forms."""
    for index, plant in enumerate(planted):
        for name in [name for name in sys.modules if name.endswith(".triton_impl")]:
            del sys.modules[name]
        name = plant["module"]
        spec = importlib.util.spec_from_file_location(name, plant["file"])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        del found[:]
        ONLY[:] = [plant["kernel"]]
        dict(launches(assemble(target.gpu), every=False))[plant["launch"]]()
        for form in found:
            print(json.dumps({"planted": index, "launch": plant["launch"], **form}), flush=True)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--every", action="store_true", help="all dtypes, and further shapes of each op")
    parser.add_argument(
        "--planted", help="JSON: a list of modules to take from other files, with a launch and a kernel"
    )
    chosen = parser.parse_args()
    found: list[dict[str, Any]] = []
    target = TARGETS[chosen.target]
    use(target, found)
    if chosen.planted:
        compile_planted(target, found, json.loads(chosen.planted))
    else:
        compile_all(target, found, every=chosen.every)


if __name__ == "__main__":
    main()
