"""From a graph that torch.export made of somebody else's model to one of plain ops.

What lies between token ids and the first hidden states, and the rotary angles, stay as they are: the prologue. Behind
it every node must be part of something that is known here; NotTranslatableError names the first that is not.

torch.export gives one flat graph of aten ops over [1, T, ...]. Composite code, such as a RMSNorm or a GELU written out,
is recognized by its last op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from executor_svc.graph import aten_patterns as aten
from executor_svc.graph import ops
from executor_svc.graph.capture import Capture
from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.passes.rotary_write_kv import NO_COS, NO_SIN
from executor_svc.graph.tensors import TensorLinear

WIDE, HEADS, HEADS_FIRST = "[1, T, width]", "[1, T, heads, size]", "[1, heads, T, size]"


class NotTranslatableError(Exception):
    """Something of the model is not known as an op. The message names it."""


@dataclass(frozen=True)
class _Value:
    """What a node of the exported graph is here."""

    proxy: Any
    layout: str
    factor: float = 1.0
    """What it still is to be multiplied by."""


@dataclass(frozen=True)
class Translated:
    """The graph, and the nodes of the exported one whose results are its inputs."""

    graph: ModelGraph
    hidden: fx.Node
    angles: tuple[tuple[fx.Node, fx.Node], ...]
    """Cosines and sines [1, T, rotary_dim], both halves alike, of each rotary setting."""


def translate(
    exported: fx.Graph, parameters: Mapping[str, Tensor], attend: Any, cache: tuple[int, int], num_layers: int
) -> Translated:
    """Translate an exported graph.

    `parameters`: by the name of their placeholders. `attend`: the op that stands for attention, called with query, key
    and value [1, heads, T, size], the layer's number, scale, window and soft cap. `cache`: key and value heads, and
    their size. The graph's inputs are those of a captured decoder, the empty angles always among them.
    """
    return _Translator(exported, parameters, attend, cache, num_layers).run()


class _Translator:
    def __init__(
        self, exported: fx.Graph, parameters: Mapping[str, Tensor], attend: Any, cache: tuple[int, int], num_layers: int
    ) -> None:
        self._exported = exported
        self._parameters = parameters
        self._values: dict[fx.Node, _Value] = {}
        self._prologue = aten.prologue_of(exported)
        self._hidden = self._first_hidden()
        self._angles = aten.rotary_angles(exported, self._prologue)
        width = self._hidden.meta["val"].shape[-1]
        self._capture = capture = Capture()
        self._values[self._hidden] = _Value(capture.input("hidden", (width,), is_owned=True), WIDE)
        self._slots = capture.input("slot_mapping")
        self._turns = []
        for index, (cos, _) in enumerate(self._angles):
            half = (cos.meta["val"].shape[-1] // 2,)
            self._turns.append((capture.input(f"cos_{index}", half), capture.input(f"sin_{index}", half)))
        self._still = capture.input(NO_COS, (0,)), capture.input(NO_SIN, (0,))
        self._plan = capture.input("plan")
        self._caches = [
            [capture.input(f"{kind}_cache_{index}", cache) for index in range(num_layers)] for kind in ("key", "value")
        ]
        self._cache = cache
        self._rules: dict[str, Callable[[Any], _Value | None]] = {
            "aten.linear.default": self._linear,
            "aten.addmm.default": self._addmm,
            "aten.layer_norm.default": self._layer_norm,
            "aten.silu.default": lambda node: self._wide(ops.silu, node),
            "aten.relu.default": lambda node: self._wide(ops.relu, node),
            "aten.gelu.default": self._gelu,
            "aten.add.Tensor": self._add,
            "aten.mul.Tensor": self._mul,
            "aten.split.Tensor": lambda _: None,
            "getitem": self._getitem,
            "aten.view.default": self._view,
            "aten.reshape.default": self._view,
            "aten.transpose.int": self._transpose,
            "aten.to.dtype": self._same,
            "aten.to.dtype_layout": self._same,
            "aten.contiguous.default": self._same,
            "aten.dropout.default": self._same,
            str(attend): self._attend,
        }

    def run(self) -> Translated:
        for node in self._exported.nodes:
            rule = self._rules.get(aten.name_of(node))
            if rule is not None and node not in self._values:
                value = rule(node)
                if value is not None:
                    self._values[node] = value
        output = aten.result_of(self._exported)
        result = self._values.get(output)
        if result is None or result.layout != WIDE or result.factor != 1.0:
            raise NotTranslatableError(aten.first_unknown(output, self._values, self._prologue))
        graph = self._capture.finish(result.proxy)
        return Translated(graph, self._hidden, tuple(self._angles))

    def _first_hidden(self) -> fx.Node:
        """Return what the layers begin with: the one value of the prologue that a norm, sum or product takes first."""
        for node in self._exported.nodes:
            users = [user for user in node.users if aten.name_of(user) != "aten._assert_tensor_metadata.default"]
            if node in self._prologue and any(user not in self._prologue for user in users):
                value = node.meta["val"]
                is_floating = isinstance(value, Tensor) and value.dtype.is_floating_point
                if is_floating and value.dim() == 3 and not aten.is_angle(node):
                    found: fx.Node = aten.skip_casts(node)
                    return found
        raise NotTranslatableError("no hidden states come of the embedding")

    def _of(self, node: Any, layout: str = WIDE) -> Any:
        """Return the proxy of an argument; None where it is none of this layout, or has a factor left."""
        value = self._value(node)
        return value.proxy if value is not None and value.layout == layout and value.factor == 1.0 else None

    def _value(self, node: Any) -> _Value | None:
        if not isinstance(node, fx.Node):
            return None
        if node not in self._values and node in self._prologue and aten.skip_casts(node) is self._hidden:
            return self._values[self._hidden]
        return self._values.get(node)

    def _tensor(self, node: Any) -> Tensor | None:
        return self._parameters.get(node.name) if isinstance(node, fx.Node) and node.op == "placeholder" else None

    def _parameter(self, node: Any) -> Any:
        return self._capture.parameter(node.name, self._parameters[node.name])

    def _wide(self, op: ops.Op, node: fx.Node, *others: Any) -> _Value | None:
        x = self._of(node.args[0])
        return None if x is None else _Value(op(x, *others), WIDE)

    def _product(self, x: Any, name: str, weight: Tensor, bias: Tensor | None) -> _Value:
        return _Value(ops.linear(x, self._capture.parameter(name, TensorLinear(weight, bias))), WIDE)

    def _linear(self, node: Any) -> _Value | None:
        x, weight = self._of(node.args[0]), self._tensor(node.args[1])
        bias = self._tensor(node.args[2]) if len(node.args) > 2 and node.args[2] is not None else None
        return None if x is None or weight is None else self._product(x, str(node.args[1]), weight, bias)

    def _addmm(self, node: Any) -> _Value | None:
        bias, x, weight = self._tensor(node.args[0]), self._of(node.args[1]), self._tensor(node.args[2])
        return None if x is None or weight is None else self._product(x, str(node.args[2]), weight.T, bias)

    def _layer_norm(self, node: Any) -> _Value | None:
        _, shape, weight, *rest = node.args
        bias = rest[0] if rest else None
        eps = rest[1] if len(rest) > 1 else 1e-5
        if self._tensor(weight) is None or len(shape) != 1:
            return None
        given = None if bias is None else self._parameter(bias)
        return self._wide(ops.layer_norm, node, self._parameter(weight), given, eps)

    def _gelu(self, node: Any) -> _Value | None:
        return self._wide(ops.gelu, node, node.kwargs.get("approximate", "none") == "tanh")

    def _add(self, node: Any) -> _Value | None:
        turned = aten.rotary(node)
        if turned is not None:
            return self._turn(*turned)
        x, y = self._of(node.args[0]), self._of(node.args[1])
        return None if x is None or y is None or node.kwargs else _Value(ops.add(y, x), WIDE)

    def _turn(self, source: fx.Node, cos: fx.Node, sin: fx.Node) -> _Value | None:
        x = self._of(source, HEADS_FIRST)
        angles = aten.skip_casts(cos), aten.skip_casts(sin)
        if x is None or angles not in self._angles or source.meta["val"].shape[-1] != cos.meta["val"].shape[-1]:
            return None
        return _Value(ops.rotary(x, *self._turns[self._angles.index(angles)]), HEADS_FIRST)

    def _mul(self, node: Any) -> _Value | None:
        x, y = node.args
        if isinstance(y, (int, float)):
            value = self._value(x)
            return None if value is None else replace(value, factor=value.factor * y)
        norm = aten.rms_norm(node)
        if norm is not None:
            source, weight, eps = norm
            of = self._of(source)
            if of is None or self._tensor(weight) is None:
                return None
            return _Value(ops.rms_norm(of, self._parameter(weight), eps), WIDE)
        activated = aten.gelu_new(node)
        if activated is not None:
            of = self._of(activated)
            return None if of is None else _Value(ops.gelu(of, True), WIDE)
        first, second = self._of(x), self._of(y)
        return None if first is None or second is None else _Value(ops.multiply(first, second), WIDE)

    def _getitem(self, node: Any) -> _Value | None:
        source, index = node.args
        if aten.name_of(source) != "aten.split.Tensor":
            return None
        x, size = self._of(source.args[0]), source.args[1]
        if x is None or len(source.args) < 3 or source.args[2] not in (2, -1):
            return None
        return _Value(ops.columns(x, index * size, (index + 1) * size), WIDE)

    def _view(self, node: Any) -> _Value | None:
        """Split the last dimension into heads, join them, or leave it alone."""
        value = self._value(node.args[0])
        if value is None:
            return None
        shape = node.meta["val"].shape
        before = node.args[0].meta["val"].shape
        if value.layout == WIDE and len(shape) == 4 and shape[0] == 1:
            return replace(value, proxy=ops.heads(value.proxy, int(shape[-1])), layout=HEADS)
        if value.layout == HEADS and len(shape) in (2, 3):
            return replace(value, proxy=ops.flat(value.proxy), layout=WIDE)
        return value if value.layout == WIDE and len(shape) in (2, 3) and shape[-1] == before[-1] else None

    def _transpose(self, node: Any) -> _Value | None:
        value = self._value(node.args[0])
        if value is None or value.layout == WIDE or sorted(node.args[1:]) != [1, 2]:
            return None
        return replace(value, layout=HEADS if value.layout == HEADS_FIRST else HEADS_FIRST)

    def _same(self, node: Any) -> _Value | None:
        source = node.args[0]
        value = self._value(source)
        kept = value is not None and node.meta["val"].dtype == source.meta["val"].dtype
        return value if kept else None

    def _attend(self, node: Any) -> _Value | None:
        *sources, layer, scale, window, soft_cap = node.args
        values = [self._value(each) for each in sources]
        if any(each is None or each.layout != HEADS_FIRST for each in values):
            return None
        query, key, value = values
        assert query is not None  # above
        assert key is not None
        assert value is not None
        if value.factor != 1.0 or ops.shape_of(value.proxy.node) != self._cache:
            return None
        caches = [kind[layer] for kind in self._caches]
        ops.write_kv(key.proxy, value.proxy, self._slots, *caches)
        # What the model multiplies queries by, the scores are multiplied by.
        if key.factor != 1.0:
            return None
        settings = (float(scale) * query.factor, window, soft_cap)
        return _Value(ops.attention(self._plan, query.proxy, *caches, *settings), HEADS)
