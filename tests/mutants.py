"""Kernels with a fault planted in their text, to see that the suite finds it."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

_numbers = itertools.count()


@dataclass(frozen=True)
class Fault:
    """A change of a module's text."""

    name: str
    module: str
    """Whose text is changed, below executor_svc.kernels."""
    text: str
    """Stands in the module."""
    fault: str
    """Stands there in its place."""
    place: int = 0
    """Which of the places where `text` stands, from 0; -1 is all of them."""

    def planted(self, source: str) -> str:
        """Return the module's text with the fault. Raises AssertionError where `text` is no longer there."""
        parts = source.split(self.text)
        assert len(parts) > 1, f"{self.name}: {self.text!r} is not in {self.module}"
        if self.place == -1:
            return self.fault.join(parts)
        assert self.place < len(parts) - 1, f"{self.name}: {self.text!r} stands in fewer places"
        head, tail = parts[: self.place + 1], parts[self.place + 1 :]
        return self.text.join(head) + self.fault + self.text.join(tail)


def load(module: str, folder: Path, fault: Fault | None, dependents: tuple[str, ...] = ()) -> ModuleType:
    """Load `module` below executor_svc.kernels anew, with the fault in it or in a module that it imports.

    What lies between the two and must be loaded anew is named by `dependents`, the nearest to the fault first.
    """
    chain = [module] if fault is None or fault.module == module else [fault.module, *dependents, module]
    replaced: dict[str, ModuleType] = {}
    try:
        for each in chain:
            name = f"executor_svc.kernels.{each}"
            original = importlib.import_module(name)
            assert original.__file__ is not None
            source = Path(original.__file__).read_text()
            if fault is not None and fault.module == each:
                source = fault.planted(source)
            made = _load_text(source, folder)
            replaced[name] = original
            sys.modules[name] = made
    finally:
        sys.modules.update(replaced)
    return made


def _load_text(source: str, folder: Path) -> ModuleType:
    # Triton reads a kernel's text from its file.
    name = f"mutant_{next(_numbers)}"
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    # dataclasses look their module up.
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made
