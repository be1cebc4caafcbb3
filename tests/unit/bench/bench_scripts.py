"""The scripts in bench/, which are no package: some bear the names of packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[3] / "bench"
_NAMED_LIKE_PACKAGES = ("gateway", "scheduler")


def load_script(name: str) -> ModuleType:
    """Import bench/NAME.py, once. A script that is named like a package gets a name of its own."""
    module_name = f"bench_script_{name}" if name in _NAMED_LIKE_PACKAGES else name
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        # Behind everything else, so that the packages keep their names: scripts import one another.
        sys.path.append(str(FOLDER))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(FOLDER))
    return sys.modules[module_name]
