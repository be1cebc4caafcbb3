"""The scripts in bench/, which are no package: some bear the names of packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[3] / "bench"


def load_script(name: str) -> ModuleType:
    """Import bench/NAME.py under a name of its own, once."""
    if name == "scheduler":
        load_script("scheduler_cell")
    # Only that one is imported by others, and its name is nobody else's.
    module_name = name if name == "scheduler_cell" else f"bench_script_{name}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return sys.modules[module_name]
