"""A graph as an SVG drawing: from the top down, each op below all that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from torch import fx

from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import Op

WIDTH, HEIGHT, ACROSS, DOWN = 190, 34, 24, 26
"""Of a box, and the space between boxes, in pixels."""
_FILLS = {"fused": "#cfe8cf", "linear": "#d5ddf0", "attention": "#f0dcc8", "view": "#f4f4f4", "other": "#f6efc9"}
_FUSED = frozenset(
    [
        "norm_query_key",
        "rotary_write_kv",
        "silu_and_mul",
        "gelu_and_mul",
        "norm_gelu",
        "linear_activation",
        "add_rms_norm",
        "add_layer_norm",
        "add_to",
    ]
)


def draw(graph: ModelGraph, title: str) -> str:
    """Return the drawing: boxes for ops, green where a pass made them, and lines from what each takes."""
    rows = _rows(graph)
    columns = max((len(row) for row in rows), default=1)
    width, height = columns * (WIDTH + ACROSS) + ACROSS, len(rows) * (HEIGHT + DOWN) + DOWN + 30
    places: dict[fx.Node, tuple[float, float]] = {}
    for depth, row in enumerate(rows):
        left = (width - len(row) * (WIDTH + ACROSS) + ACROSS) / 2
        for index, node in enumerate(row):
            places[node] = left + index * (WIDTH + ACROSS), 30 + DOWN + depth * (HEIGHT + DOWN)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        "<style>text { font: 11px sans-serif }</style>",
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{ACROSS}" y="24" style="font-size: 15px">{escape(title)}</text>',
        *(_line(places[taken], at) for node, at in places.items() for taken in node.all_input_nodes if taken in places),
        *(_box(node, at) for node, at in places.items()),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _rows(graph: ModelGraph) -> list[list[fx.Node]]:
    """Put each node into the row below the lowest that it takes. Of the inputs only the hidden states are drawn."""
    depths: dict[fx.Node, int] = {}
    rows: list[list[fx.Node]] = []
    # What has an effect alone, such as a write, is followed by those who read what it changed.
    after: Mapping[object, int] = {}
    for node in graph.nodes.nodes:
        if node.op == "call_function" or (node.op == "placeholder" and node.meta.get("is_owned")):
            taken = [depths[each] for each in node.all_input_nodes if each in depths]
            taken += [after[each] for each in node.all_input_nodes if each in after]
            depth = max(taken, default=-1) + 1
            depths[node] = depth
            if isinstance(node.target, Op) and node.target.has_effect:
                after = {**after, **{each: depth for each in node.all_input_nodes if each.op == "placeholder"}}
            while len(rows) <= depth:
                rows.append([])
            rows[depth].append(node)
    return rows


def _line(start: tuple[float, float], end: tuple[float, float]) -> str:
    x1, y1, x2, y2 = start[0] + WIDTH / 2, start[1] + HEIGHT, end[0] + WIDTH / 2, end[1]
    middle = (y1 + y2) / 2
    path = f"M {x1:.0f} {y1:.0f} C {x1:.0f} {middle:.0f}, {x2:.0f} {middle:.0f}, {x2:.0f} {y2:.0f}"
    return f'<path d="{path}" fill="none" stroke="#999"/>'


def _box(node: fx.Node, at: tuple[float, float]) -> str:
    x, y = at
    name = node.target.name if isinstance(node.target, Op) else str(node.target)
    width = " x ".join(map(str, node.meta["shape"] or ())) or "no result"
    buffer = node.meta.get("buffer")
    below = width if buffer is None else f"{width}, buffer {buffer}"
    weights = [each.target for each in node.all_input_nodes if each.op == "get_attr"]
    hint = escape("\n".join([name, width, *map(str, weights)]))
    return (
        f'<g><title>{hint}</title><rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="5" '
        f'fill="{_FILLS[_kind(node)]}" stroke="#666"/>'
        f'<text x="{x + 8:.0f}" y="{y + 14:.0f}" font-weight="bold">{escape(name)}</text>'
        f'<text x="{x + 8:.0f}" y="{y + 27:.0f}" fill="#444">{escape(below)}</text></g>'
    )


def _kind(node: fx.Node) -> str:
    op = node.target
    if not isinstance(op, Op):
        return "other"
    if op.name in _FUSED or op.function is not None:
        return "fused"
    if op.is_view:
        return "view"
    return op.name if op.name in _FILLS else "other"
