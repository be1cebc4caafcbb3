"""What the interpreter forgives and a GPU does not, looked for in the kernels' texts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import executor_svc.kernels

FILES = sorted(Path(executor_svc.kernels.__path__[0]).glob("*/triton_impl.py"))
each_file = pytest.mark.parametrize("file", FILES, ids=[file.parent.name for file in FILES])


def _calls(text: str, name: str) -> Iterator[ast.Call]:
    """Yield the calls of tl.name."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"tl.{name}":
            yield node


def loads_of_anything(text: str) -> list[str]:
    """Masked loads that do not say what the others get: zeros under the interpreter, and anything on a GPU."""
    found = []
    for call in _calls(text, "load"):
        names = {keyword.arg for keyword in call.keywords}
        if "mask" in names and "other" not in names:
            found.append(ast.unparse(call))
    return found


def rounded_products(text: str) -> list[str]:
    """Products that leave the precision of float32 operands to Triton, which takes TF32."""
    return [
        ast.unparse(call)
        for call in _calls(text, "dot")
        if "ieee" not in {getattr(keyword.value, "value", None) for keyword in call.keywords}
    ]


def rows_in_32_bits(text: str) -> list[str]:
    """Functions that make a pointer of their program's number as it is: times a row's width it can pass 2^31."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assign)]
    return [ast.unparse(node) for node in nodes if ast.unparse(node.value) == "tl.program_id(0)"]


@each_file
def test_no_text_has_what_a_gpu_does_not_forgive(file: Path) -> None:
    """Every masked load names its other values, every product its precision, and rows are numbered in 64 bits."""
    text = file.read_text()
    assert loads_of_anything(text) == []
    assert rounded_products(text) == []
    assert rows_in_32_bits(text) == []


def test_each_of_them_would_be_found() -> None:
    """The three are seen where they stand."""
    text = "x = tl.load(p, mask=m)\ny = tl.load(p, mask=m, other=0.0)\nz = tl.dot(a, b)\nrow = tl.program_id(0)\n"
    assert loads_of_anything(text) == ["tl.load(p, mask=m)"]
    assert rounded_products(text) == ["tl.dot(a, b)"]
    assert rows_in_32_bits(text) == ["row = tl.program_id(0)"]


def test_there_are_files_to_look_at() -> None:
    """Every op of the set has its own, and none of them is missed."""
    assert {"paged_attention", "sampling", "norm", "rotary_write_kv", "copy_blocks"} < {
        file.parent.name for file in FILES
    }
