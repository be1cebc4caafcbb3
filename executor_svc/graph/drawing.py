"""A graph as an SVG drawing: from the top down, each op below all that it takes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from html import escape

from torch import fx

from executor_svc.graph.aliases import base_of
from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import Op

WIDTH, HEIGHT, ACROSS, DOWN = 190, 34, 24, 26
"""Of a box, and the space between boxes, in pixels."""
Place = tuple[float, float]
"""The upper left corner of a box."""
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
    """Return the drawing: boxes for ops, green where a pass made them, and lines from what each takes.

    What an op changes and leaves, such as a residual, comes from that op for all after it.
    """
    rows = _rows(graph)
    columns = max((len(row) for row in rows), default=1)
    width, height = columns * (WIDTH + ACROSS) + ACROSS, len(rows) * (HEIGHT + DOWN) + DOWN + 30
    places: dict[fx.Node, Place] = {}
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
        *(_line(places[taken], places[node], places.values()) for taken, node in _edges(graph) if taken in places),
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


def _edges(graph: ModelGraph) -> Iterator[tuple[fx.Node, fx.Node]]:
    changed_by: dict[fx.Node, fx.Node] = {}
    for node in graph.calls():
        for taken in node.all_input_nodes:
            yield changed_by.get(taken, taken), node
        if isinstance(node.target, Op) and node.target.keeps is not None:
            changed = node.args[node.target.keeps]
            assert isinstance(changed, fx.Node)
            changed_by[changed] = node


def _line(start: Place, end: Place, boxes: Collection[Place]) -> str:
    x1, y1, x2, y2 = start[0] + WIDTH / 2, start[1] + HEIGHT, end[0] + WIDTH / 2, end[1]
    if x1 == x2 and any(abs(x - start[0]) < WIDTH and start[1] < y < end[1] for x, y in boxes):
        # Beside the boxes that lie between.
        right, out, y1, y2 = start[0] + WIDTH, start[0] + WIDTH + ACROSS, y1 - HEIGHT / 2, y2 + HEIGHT / 2
        path = f"M {right:.0f} {y1:.0f} C {out:.0f} {y1:.0f}, {out:.0f} {y2:.0f}, {right:.0f} {y2:.0f}"
    else:
        middle = (y1 + y2) / 2
        path = f"M {x1:.0f} {y1:.0f} C {x1:.0f} {middle:.0f}, {x2:.0f} {middle:.0f}, {x2:.0f} {y2:.0f}"
    return f'<path d="{path}" fill="none" stroke="#999"/>'


def _box(node: fx.Node, at: Place) -> str:
    x, y = at
    name = node.target.name if isinstance(node.target, Op) else str(node.target)
    width = " x ".join(map(str, node.meta["shape"] or ())) or "no result"
    # A view has a name of its own in the compiled graph, and no memory.
    buffer = base_of(node).meta.get("buffer")
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
