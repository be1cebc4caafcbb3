"""Buffers, drawings and the report on a model's graph."""

from __future__ import annotations

import os
import re
from pathlib import Path
from unittest.mock import ANY
from xml.etree import ElementTree

import pytest
from graph_models import load, plain_graph, saved_folder
from model_variations import FIRSTS

from executor_svc.graph import ops
from executor_svc.graph.buffers import Buffers, intermediates, own_buffers, peak_bytes, planned_buffers
from executor_svc.graph.capture import Capture
from executor_svc.graph.drawing import DOWN, draw
from executor_svc.graph.optimize import PASSES, choose_passes, optimize
from executor_svc.inspection.graph_report import graph_report
from executor_svc.kernels import build_kernels
from octavo.local.executor_query import ask_executor


def test_buffers_of_a_graph_that_can_be_counted_by_hand() -> None:
    """Three sums of 4 elements, the first of them dead after the second: two buffers do where three would be made."""
    capture = Capture()
    x, y = capture.input("hidden", (4,)), capture.input("other", (4,))
    first = ops.add(x, y)
    second = ops.multiply(first, y)
    graph = capture.finish(ops.add(second, x))
    assert own_buffers(graph, 2) == planned_buffers(graph, 2) == Buffers(3, 24)
    assert peak_bytes(graph, 2) == 16
    assert next(each for each in PASSES if each.name == "liveness").run(graph) == 1
    assert planned_buffers(graph, 2) == Buffers(2, 16)


@pytest.mark.parametrize("one", FIRSTS, ids=lambda one: one.family)
def test_no_buffer_is_shared_by_what_lives_at_once(root: Path, one: object) -> None:
    """Whatever the graph: a buffer is given away only behind the last reader of what it holds."""
    graph = plain_graph(saved_folder(root, one))  # type: ignore[arg-type]
    optimize(graph)
    owner: dict[int, object] = {}
    for node in graph.calls():
        buffer = node.meta.get("buffer")
        if buffer is not None and node.target.mutates is None:  # type: ignore[union-attr]
            assert buffer not in owner
            owner[buffer] = node
        for dead in node.meta["dies_after"]:
            assert owner.pop(dead.meta["buffer"]) is dead
    assert planned_buffers(graph, 4).bytes < own_buffers(graph, 4).bytes
    assert peak_bytes(graph, 4) <= planned_buffers(graph, 4).bytes
    assert intermediates(graph)


def test_the_source_names_every_buffer(root: Path) -> None:
    """Compiled with liveness, the function has few names; without, one for each intermediate."""
    one = FIRSTS[0]
    sources = [
        load(saved_folder(root, one), one, build_kernels("reference"), choose_passes(passes)).layers.source
        for passes in ("all", "-liveness")
    ]
    assert "del b" in sources[0]
    assert "del " not in sources[1]
    assert sources[0].count(" = ") == sources[1].count(" = ")


def _boxes(drawing: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(drawing).findall("{http://www.w3.org/2000/svg}g")


def test_drawings_are_svg(root: Path) -> None:
    """A box for every call and one for what comes in, lines between; the text is escaped."""
    graph = plain_graph(saved_folder(root, FIRSTS[0]))
    optimize(graph)
    drawing = ElementTree.fromstring(draw(graph, "a < b"))
    name = "{http://www.w3.org/2000/svg}"
    assert len(drawing.findall(f"{name}g")) == sum(1 for _ in graph.calls()) + 1
    assert len(drawing.findall(f"{name}path")) >= sum(1 for _ in graph.calls())
    title = drawing.find(f"{name}title")
    assert title is not None
    assert title.text == "a < b"


def test_a_view_is_drawn_in_the_buffer_that_it_lies_in(root: Path) -> None:
    """Heads side by side take no memory: they are the attention's result."""
    graph = plain_graph(saved_folder(root, FIRSTS[0]))
    optimize(graph)
    boxes = [[each.text or "" for each in box if each.tag.endswith("text")] for box in _boxes(draw(graph, "views"))]
    buffers = [(name, below.rpartition(" ")[2]) for name, below in boxes if name in ("attention", "flat")]
    assert [name for name, _ in buffers] == ["attention", "flat"] * (len(buffers) // 2)
    assert buffers
    assert all(buffers[index][1] == buffers[index + 1][1] for index in range(0, len(buffers), 2))


def test_no_line_lies_behind_a_box(root: Path) -> None:
    """One that goes straight down ends at the next row; a residual comes from the op that changed it last."""
    graph = plain_graph(saved_folder(root, FIRSTS[0]))
    optimize(graph)
    drawing = ElementTree.fromstring(draw(graph, "residuals"))
    lines = [path.attrib["d"] for path in drawing.iter() if "d" in path.attrib]
    paths = [[float(each) for each in re.findall(r"[\d.]+", line)] for line in lines]
    straight = [path for path in paths if len({path[index] for index in (0, 2, 4, 6)}) == 1]
    beside = [path for path in paths if path[0] == path[6] and path not in straight]
    assert {path[7] - path[1] for path in straight} == {DOWN}
    assert len(beside) == len(list(graph.calls(ops.add_rms_norm))) == len({path[1] for path in beside})


def test_the_report_has_what_each_pass_did(root: Path, tmp_path: Path) -> None:
    """Nodes, matches and buffers before and after, by the passes that are on; the drawing lies where it is to."""
    folder = saved_folder(root, FIRSTS[0])
    report = graph_report(str(folder), "-liveness", None, "float32", tmp_path / "graph.svg")
    passes = {each["name"]: each for each in report["passes"]}
    assert list(passes) == [each.name for each in PASSES]
    assert passes["merge_qkv"]["matches"] == 2
    assert (passes["liveness"]["on"], passes["liveness"]["matches"]) == (False, 0)
    assert report["before"]["nodes"] > 2 * report["after"]["nodes"]
    assert report["after"]["nodes"] == sum(report["after"]["ops"].values())
    assert report["after"]["buffers"] == report["after"]["own_buffers"]
    reused = graph_report(str(folder), "all", None, "float32", None)
    assert reused["after"]["buffers"]["bytes"] < report["after"]["buffers"]["bytes"] / 2
    assert (tmp_path / "graph.svg").read_text().startswith("<svg")
    with pytest.raises(ValueError, match="merge_everything"):
        graph_report(str(folder), "merge_everything", None, "float32", None)


def test_what_a_module_of_operators_prints_is_no_part_of_the_answer(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Python or past it, at its import or in an op: the answer is JSON, and an operator that is refused is told."""
    (tmp_path / "ops_printing.py").write_text(
        "import os, torch\n"
        "from executor_svc.graph import ops\n"
        "from executor_svc.graph.custom import CustomOp\n"
        "print('hello')\n"
        "os.write(1, b'there')\n"
        "OPS = [CustomOp('twice', '', lambda x, y: ops.add(ops.add(x, y), y), lambda x, y: x + y + y,\n"
        "    lambda dtype: [(torch.ones(2, 3, dtype=dtype),) * 2], cpu=lambda x, y: print('x') or x + y + y)]\n"
    )
    monkeypatch.chdir(tmp_path)
    path = [str(Path(__file__).parents[4]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    question = ["graph", str(saved_folder(root, FIRSTS[0])), "--dtype=float32", "--ops=ops_printing"]
    answer = ask_executor(*question)
    assert answer["passes"][0] == {"name": "twice", "description": "", "on": True, "matches": 0, "nodes": ANY}
    wrong = ask_executor(*question, "--passes=thrice")
    assert "'thrice' is none of twice, merge_qkv" in wrong["problem"]
