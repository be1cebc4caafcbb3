"""How models write out what is one op here, in the aten ops of an exported graph."""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose, pi, sqrt
from typing import Any

from torch import fx

_PROLOGUE = frozenset(
    [
        "aten.add.Tensor",
        "aten.arange.start",
        "aten.cat.default",
        "aten.cos.default",
        "aten.dropout.default",
        "aten.embedding.default",
        "aten.expand.default",
        "aten.mul.Tensor",
        "aten.ones.default",
        "aten.reshape.default",
        "aten.sin.default",
        "aten.slice.Tensor",
        "aten.sub.Tensor",
        "aten.sym_size.int",
        "aten.to.device",
        "aten.to.dtype",
        "aten.to.dtype_layout",
        "aten.transpose.int",
        "aten.unsqueeze.default",
        "aten.matmul.default",
        "aten.view.default",
    ]
)
_CASTS = frozenset(["aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.dropout.default"])


def name_of(node: Any) -> str:
    """Return the name of the op that a node calls, empty for anything else."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return ""
    return "getitem" if getattr(node.target, "__name__", "") == "getitem" else str(node.target)


def result_of(graph: fx.Graph) -> fx.Node:
    """Return what an exported graph gives first."""
    results: Any = next(iter(reversed(graph.nodes))).args[0]
    result: fx.Node = results[0] if isinstance(results, (tuple, list)) else results
    return result


def prologue_of(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the nodes that follow from token ids and positions by lookups and simple arithmetic, and by none of the
    parameters but what they are looked up in.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if not node.name.startswith("p_"):
                found.add(node)
        elif name_of(node) in _PROLOGUE:
            taken = node.all_input_nodes
            if name_of(node) == "aten.embedding.default":
                taken = taken[1:]
            if all(each in found for each in taken):
                found.add(node)
    return frozenset(found)


def skip_casts(node: Any) -> Any:
    """Return what a node is but for its type, and for a dropout that does nothing."""
    while name_of(node) in _CASTS:
        node = node.args[0]
    return node


def is_angle(node: fx.Node) -> bool:
    """Whether a node of the prologue is cosines or sines, or what they are made of."""
    todo, seen = [node], set()
    while todo:
        each = todo.pop()
        if name_of(each) in ("aten.cos.default", "aten.sin.default"):
            return True
        if each not in seen and name_of(each) != "aten.embedding.default":
            seen.add(each)
            todo += each.all_input_nodes
    return False


def rotary_angles(graph: fx.Graph, prologue: frozenset[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
    """Return the cosines and sines that heads are turned by, each pair once, in the order in which they come."""
    pairs: list[tuple[fx.Node, fx.Node]] = []
    for node in graph.nodes:
        turned = rotary(node)
        if turned is not None:
            pair = skip_casts(turned[1]), skip_casts(turned[2])
            if pair not in pairs and all(each in prologue for each in pair):
                pairs.append(pair)
    return pairs


def rotary(node: Any) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """x * cos + cat(-second half of x, first half) * sin, for heads [1, heads, T, size]. Returns x, cos and sin."""
    if name_of(node) != "aten.add.Tensor":
        return None
    plain, crossed = node.args[:2]
    if not _calls(plain, "aten.mul.Tensor") or not _calls(crossed, "aten.mul.Tensor"):
        return None
    x, cos = plain.args
    halves, sin = crossed.args
    parts: Any = halves.args[0] if _calls(halves, "aten.cat.default") else ()
    if len(parts) != 2 or not _calls(parts[0], "aten.neg.default"):
        return None
    second, first = parts[0].args[0], parts[1]
    if not all(_calls(each, "aten.slice.Tensor") and each.args[0] is x for each in (first, second)):
        return None
    half = x.meta["val"].shape[-1] // 2
    if first.args[1:] != (3, 0, half) or second.args[1:3] != (3, half):
        return None
    angles = [each.args[0] for each in (cos, sin) if _calls(each, "aten.unsqueeze.default") and each.args[1] == 1]
    return (x, *angles) if len(angles) == 2 else None


def rms_norm(node: Any) -> tuple[fx.Node, fx.Node, float] | None:
    """weight * (x / sqrt(mean(x^2) + eps)), the norm in float32. Returns x, weight and eps."""
    for weight, normed in (node.args, node.args[::-1]):
        inner: Any = skip_casts(normed) if isinstance(normed, fx.Node) else None
        if not _calls(inner, "aten.mul.Tensor"):
            continue
        x, root = inner.args
        if not _calls(root, "aten.rsqrt.default"):
            continue
        total = root.args[0]
        mean: Any = total.args[0] if _calls(total, "aten.add.Tensor") else None
        square: Any = mean.args[0] if _calls(mean, "aten.mean.dim") and mean.args[1:] == ([-1], True) else None
        if not _calls(square, "aten.pow.Tensor_Scalar") or square.args != (x, 2):
            continue
        eps = total.args[1]
        return _narrow(x), weight, float(eps)
    return None


def _narrow(x: Any) -> Any:
    """Return what was widened for a norm."""
    return x.args[0] if name_of(x) == "aten.to.dtype" else x


def gelu_new(node: Any) -> fx.Node | None:
    """0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))). Returns x."""
    half, outer = node.args
    if not _calls(half, "aten.mul.Tensor") or half.args[1] != 0.5 or not _calls(outer, "aten.add.Tensor"):
        return None
    x, (tanh, one) = half.args[0], outer.args
    scaled: Any = tanh.args[0] if _calls(tanh, "aten.tanh.default") and one == 1.0 else None
    if not _calls(scaled, "aten.mul.Tensor") or not isclose(scaled.args[1], sqrt(2 / pi), rel_tol=1e-6):
        return None
    total = scaled.args[0]
    cubic: Any = total.args[1] if _calls(total, "aten.add.Tensor") and total.args[0] is x else None
    if not _calls(cubic, "aten.mul.Tensor") or cubic.args[1] != 0.044715:
        return None
    cube = cubic.args[0]
    matches = _calls(cube, "aten.pow.Tensor_Scalar") and cube.args == (x, 3.0)
    return x if matches else None


def first_unknown(output: fx.Node, known: Mapping[fx.Node, Any], prologue: frozenset[fx.Node]) -> str:
    """Name the earliest op on the way to the output that is not known, though all that it takes is."""
    todo, seen, unknown = [output], {output}, []
    while todo:
        node = todo.pop()
        if node in known or node in prologue or node.op != "call_function":
            continue
        unknown.append(node)
        for each in node.all_input_nodes:
            if each not in seen:
                seen.add(each)
                todo.append(each)
    order = {node: place for place, node in enumerate(output.graph.nodes)}
    first = min(unknown, key=order.__getitem__, default=output)
    return f"{name_of(first)} ({first.name})"


def _calls(node: Any, name: str) -> bool:
    return name_of(node) == name
