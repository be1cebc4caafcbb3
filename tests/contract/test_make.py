"""The Makefile and the environment that it makes, with stand-ins for Python and pip."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
COMMON, CPU, GPU = (ROOT / f"constraints-{name}.txt" for name in ("common", "cpu", "gpu"))
TOOLS = ("bash", "make", "dirname", "touch", "env", "chmod", "cp", "mkdir", "awk", "cat")

FAKE_PYTHON = """#!/bin/bash
# Stands for the Python that make is given and, copied, for the one in the environment. Notes what pip is told.
case "$*" in
  *"sys.version_info"*) exit ${FAKE_VERSION_CODE:-0} ;;
  *"import venv"*) exit ${FAKE_VENV_CODE:-0} ;;
  "--version") echo "Python 3.12.0" ;;
  "-m venv --clear"*) mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python" ;;
  "scripts/torch_build.py"*) echo "$FAKE_BUILD" ;;
  "-m pip"*) { echo "pip $*"; env; } > "$FAKE_NOTES" ;;
  *) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""


class FakeMachine:
    """A machine with the tools that make needs, a fake Python, and by default a C++ compiler."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None, tool
            (self.bin / tool).symlink_to(found)
        self.add_program("python3", FAKE_PYTHON)
        self.add_program("c++", "#!/bin/bash\ncat > /dev/null\n")
        self.notes = folder / "notes"

    def add_program(self, name: str, text: str) -> None:
        """Put a script on the PATH."""
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def make_env(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `make env` with nothing in the environment but `variables`."""
        environ = {"PATH": str(self.bin), "FAKE_BUILD": "cpu", "FAKE_NOTES": str(self.notes)} | variables
        command = ["make", "env", f"VENV={self.folder / 'venv'}", *arguments]
        return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    """A fresh FakeMachine."""
    return FakeMachine(tmp_path)


def test_help_names_every_target() -> None:
    """`make` alone tells what can be done; no target is left out of it."""
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony is not None
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [target for target in phony[1].split() if f"make {target} " not in shown] == []


def test_the_environment_is_made_once(machine: FakeMachine) -> None:
    """pip gets the project with its extras and the constraints; a repeat with nothing changed runs nothing."""
    done = machine.make_env()
    assert done.returncode == 0, done.stderr
    (pip,) = [line for line in machine.notes.read_text().splitlines() if line.startswith("pip ")]
    assert " --constraint constraints-cpu.txt " in pip
    assert pip.endswith(" --config-settings editable_mode=compat --editable .[gateway,executor,gpu,bench,dev]")
    assert done.stdout.endswith(f"  source {machine.folder / 'venv'}/bin/activate\n")
    machine.notes.unlink()
    assert machine.make_env().returncode == 0
    assert not machine.notes.exists()


def test_without_a_cpu_build_the_size_of_the_other_is_told(machine: FakeMachine) -> None:
    """The constraints of the CUDA build are used, and nobody is surprised by gigabytes."""
    done = machine.make_env(FAKE_BUILD="gpu")
    assert "about 3 GB" in done.stdout
    assert "--constraint constraints-gpu.txt" in machine.notes.read_text()


@pytest.mark.parametrize("name", ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"])
def test_pips_variables_arrive_as_they_are_and_are_never_made(machine: FakeMachine, name: str) -> None:
    """Set in the environment or on make's command line they reach pip; unset they stay unset, which is not empty."""
    machine.make_env()
    assert not re.search(r"^PIP_", machine.notes.read_text(), re.MULTILINE)
    for how in (
        {"variables": {name: "somewhere"}, "arguments": ()},
        {"variables": {}, "arguments": (f"{name}=somewhere",)},
    ):
        shutil.rmtree(machine.folder / "venv")
        machine.make_env(*how["arguments"], **how["variables"])
        assert re.findall(r"^PIP_.*$", machine.notes.read_text(), re.MULTILINE) == [f"{name}=somewhere"]


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (("PYTHON=/nowhere/python",), {}, "PYTHON=/nowhere/python is no Python 3.11, 3.12 or 3.13"),
        ((), {"FAKE_VERSION_CODE": "1"}, "no Python 3.11, 3.12 or 3.13 found"),
        ((), {"FAKE_VENV_CODE": "1"}, "has no venv module"),
    ],
)
def test_what_is_missing_is_said(
    machine: FakeMachine, arguments: tuple[str, ...], variables: dict[str, str], message: str
) -> None:
    """An unfit Python, or one without venv, stops make with what to install or name; nothing is left half made."""
    done = machine.make_env(*arguments, **variables)
    assert done.returncode != 0
    assert message in done.stderr
    assert not (machine.folder / "venv").exists()


def test_a_missing_compiler_is_said(machine: FakeMachine) -> None:
    """A compiler that is not there or does not work is found out before anything is fetched."""
    machine.add_program("c++", "#!/bin/bash\nexit 1\n")
    done = machine.make_env()
    assert "no C++ compiler that works" in done.stderr
    assert not (machine.folder / "venv").exists()
    machine.add_program("my-c++", "#!/bin/bash\ncat > /dev/null\n")
    assert machine.make_env("CXX=my-c++").returncode == 0


def test_an_interrupted_installation_is_taken_up_again(machine: FakeMachine) -> None:
    """Only a complete installation leaves the stamp; the environment itself is kept."""
    machine.add_program("python3", FAKE_PYTHON.replace('> "$FAKE_NOTES"', "> /dev/null; exit 1"))
    failed = machine.make_env()
    assert failed.returncode != 0
    assert "is ready" not in failed.stdout
    assert (machine.folder / "venv" / "bin" / "python").exists()
    (machine.folder / "venv" / "bin" / "python").write_text(FAKE_PYTHON)
    assert machine.make_env().returncode == 0
    assert machine.notes.exists()


def torch_build() -> ModuleType:
    """Import scripts/torch_build.py."""
    spec = importlib.util.spec_from_file_location("torch_build", ROOT / "scripts" / "torch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("version", "requires", "is_cpu"),
    [
        ("2.13.0+cpu", ["sympy"], True),
        ("2.13.0", ["sympy", "nvidia-cublas==13.0"], False),
        ("2.13.0", ["cuda-bindings>=13; platform_system == 'Linux'", "sympy"], os.uname().sysname != "Linux"),
        ("2.13.0", ["nvidia-cublas==13.0; platform_system == 'Nowhere'"], True),
        ("2.13.0", ["sympy", "optree; extra == 'optree'"], True),
    ],
)
def test_the_build_of_torch_is_known_by_its_label_or_its_needs(version: str, requires: list[str], is_cpu: bool) -> None:
    """A +cpu label decides; without one, any CUDA package that this machine would have to install."""
    assert torch_build().is_cpu_build({"version": version, "requires_dist": requires}) is is_cpu


def test_torch_is_pinned_without_a_local_label_and_triton_where_torch_does_not() -> None:
    """The CUDA build pins its Triton itself, and a label would shut out the one build or the other."""
    assert torch_build().pinned_torch(CPU) == "torch==2.13.0"
    assert "triton==3.9.0" in CPU.read_text().splitlines()
    assert torch_build().pinned_torch(GPU) == "torch==2.13.0"
    assert "triton" not in GPU.read_text().splitlines()[-1]
    for path in (CPU, GPU):
        assert "-c constraints-common.txt" in path.read_text().splitlines()


def test_every_dependency_is_pinned_within_the_range_that_pyproject_states() -> None:
    """The environment is the same everywhere, and what the tests run with is what the project says it takes."""
    pins = {}
    for line in (COMMON.read_text() + CPU.read_text()).splitlines():
        if not line.startswith(("#", "-c")):
            pin = Requirement(line)
            (specifier,) = pin.specifier
            assert specifier.operator == "==", line
            pins[pin.name.lower().replace("_", "-")] = specifier.version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    for requirement in (Requirement(text) for group in groups for text in group):
        assert requirement.specifier.contains(pins[requirement.name.lower().replace("_", "-")]), requirement
