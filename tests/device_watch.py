"""Who touched which memory on which stream, and who waited for whom: what fake_device.py works its rules out of."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from executor_svc.kernels import KernelSet
from executor_svc.kernels.linear_activation.reference import make_linear_activation

READS = ("numpy", "tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero")
"""What waits for a tensor's content on the host."""
SYNCS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "repeat_interleave")
CHANGED = {
    "add_rms_norm": (1,),
    "add_layer_norm": (1,),
    "norm_query_key": (0,),
    "add_to": (1,),
    "scale": (0,),
    "rotary_write_kv": (4, 5),
    "write_kv": (3, 4),
    "add_logit_bias": (0,),
    "apply_penalties": (0,),
    "forbid_tokens": (0,),
}
"""Arguments of ops, by their place, that they change."""


class RuleError(Exception):
    """A rule of executor_svc.device was broken."""


class CaptureError(RuntimeError):
    """Something was captured that no graph can hold."""


@dataclass
class _Access:
    """The last accesses of a piece of memory: stream and number of the launch."""

    write: tuple[str, int] | None = None
    reads: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Recorded:
    """A captured launch: made again, its results go where the first ones went."""

    call: Callable[..., Any]
    arguments: Any
    named: Any
    results: list[Tensor]


class Watch:
    """The books of one fake device."""

    def __init__(self, streams: Sequence[str], capacity: int) -> None:
        self.seen: dict[str, dict[str, int]] = {name: dict.fromkeys(streams, 0) for name in streams}
        """By stream: up to which launch of each stream its next launch lies behind."""
        self.stream: str | None = None
        self.launches = 0
        self.in_use = 0
        """Bytes that were made while nothing was counted as a step's."""
        self.made = 0
        """Bytes made since the peak was reset."""
        self.capacity = capacity
        self._host = dict.fromkeys(streams, 0)
        self._accesses: dict[int, _Access] = {}
        self._host_tensors: dict[int, Tensor] = {}
        self._recorded: list[Recorded] | None = None
        self._made_inside: set[int] = set()
        self._warm: set[Any] = set()
        self._depth = 0
        self._names_device = False

    # Who waited for whom.

    def waited(self, stream: str, seen: dict[str, int]) -> None:
        """A stream waits for what was seen elsewhere."""
        mine = self.seen[stream]
        mine.update({name: max(mine[name], launch) for name, launch in seen.items()})

    def host_waited(self, seen: dict[str, int]) -> None:
        """The host waits."""
        self._host.update({name: max(self._host[name], launch) for name, launch in seen.items()})

    def host_saw(self, stream: str, launch: int) -> bool:
        """Whether the host has waited for a launch."""
        return self._host[stream] >= launch

    def host_knows(self, seen: dict[str, int]) -> bool:
        """Whether the host has waited for all that was seen."""
        return all(self._host[name] >= launch for name, launch in seen.items())

    def launched_last(self) -> tuple[str, int]:
        """The stream of the last launch, and its number."""
        assert self.stream is not None
        return self.stream, self.seen[self.stream][self.stream]

    def no_capture(self, what: str) -> None:
        """Raise CaptureError while something is captured."""
        if self._recorded is not None:
            raise CaptureError(f"{what} while a graph is captured")

    # Launches.

    def launch(
        self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], fresh: Sequence[Tensor] = ()
    ) -> None:
        """Note a launch on the current stream. `fresh`: tensors that it made."""
        if self.stream is None:
            raise RuleError(f"{what} is launched on the default stream, which nothing waits for")
        for tensor in (*reads, *writes):
            if self.is_host(tensor) and tensor.dim():
                raise RuleError(f"{what}: a tensor of the host among the device's")
        self.launches += 1
        mine = self.seen[self.stream]
        mine[self.stream] += 1
        now = mine[self.stream]
        for tensor in fresh:
            self._accesses[_storage(tensor)] = _Access()
            self.made += tensor.untyped_storage().nbytes()
        for tensor in reads:
            access = self._access(tensor)
            self._check(what, access.write)
            access.reads[self.stream] = now
        for tensor in writes:
            access = self._access(tensor)
            self._check(what, access.write)
            for read in access.reads.items():
                self._check(what, read)
            access.write = self.stream, now

    def is_host(self, tensor: Tensor) -> bool:
        """Whether a tensor is the host's."""
        return _storage(tensor) in self._host_tensors

    def _access(self, tensor: Tensor) -> _Access:
        return self._accesses.setdefault(_storage(tensor), _Access())

    def _check(self, what: str, earlier: tuple[str, int] | None) -> None:
        assert self.stream is not None
        if earlier is not None and self.seen[self.stream][earlier[0]] < earlier[1]:
            raise RuleError(f"{what} on stream {self.stream} has not waited for what {earlier[0]} does to its memory")

    # Graphs.

    def capture(self, launch: Callable[[], None]) -> tuple[list[Recorded], dict[int, int]]:
        """Record what is launched; return it, and how many hold each piece of memory that was there before."""
        self.no_capture("capturing")
        self._recorded, self._made_inside = [], set()
        try:
            launch()
            recorded = self._recorded
        finally:
            self._recorded = None
        taken = {_storage(tensor) for each in recorded for tensor in _tensors((each.arguments, each.named))}
        return recorded, {place: _num_holders(place) for place in taken - self._made_inside}

    def check_held(self, held: dict[int, int]) -> None:
        """Raise RuleError where somebody has given up memory that a graph was captured with."""
        if any(_num_holders(place) < count for place, count in held.items()):
            raise RuleError("a graph is replayed though memory that it was captured with has been given back")

    def replay(self, each: Recorded) -> None:
        """Make a captured launch again."""
        with self.unwatched():
            results = _tensors(each.call(*each.arguments, **each.named))
            for kept, result in zip(each.results, results, strict=True):
                if _storage(kept) != _storage(result):
                    kept.copy_(result)
        self.launch("a replay", _tensors((each.arguments, each.named)), each.results)

    def noted(self, what: str, call: Callable[..., Any], arguments: Any, named: Any, changed: Sequence[Tensor]) -> Any:
        """Make a launch, note it, and record it where something is captured."""
        taken = _tensors((arguments, named))
        with self.unwatched():
            result = call(*arguments, **named)
        places = {_storage(tensor) for tensor in taken}
        results = _tensors(result)
        fresh = [tensor for tensor in results if _storage(tensor) not in places]
        if not fresh and not changed:
            # A view: nothing was done.
            return result
        self.launch(what, taken, [*changed, *fresh], fresh)
        if self._recorded is not None:
            self._made_inside.update(map(_storage, fresh))
            kept = tree_map(_alias, (arguments, named))
            self._recorded.append(Recorded(call, *kept, [_alias(tensor) for tensor in results]))
        return result

    # Kernels: what they do inside is the device's own.

    def kernels(self, kernels: KernelSet) -> KernelSet:
        """A set whose ops are launches. To be captured, each has run before with arguments of the same shapes."""
        ops = [each.name for each in dataclasses.fields(kernels) if callable(getattr(kernels, each.name))]
        made: dict[str, Any] = {
            name: self._op(name, getattr(kernels, name))
            for name in ops
            if name not in ("pack_linear", "record", "on_host")
        }
        # The layer and its activation are a launch each.
        activations = {name: made[name] for name in ("gelu", "relu", "silu_and_mul", "gelu_and_mul")}
        made["linear_activation"] = make_linear_activation(**activations)
        made["plan_attention"] = self._plan(kernels.plan_attention)
        made["pack_linear"] = lambda weight, bias: _WatchedLinear(self, kernels.pack_linear(weight, bias))
        return dataclasses.replace(kernels, **made)

    def _op(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def launched(*arguments: Any, **named: Any) -> Any:
            form = name, *(tuple(tensor.shape) for tensor in _tensors((arguments, named)))
            if self._recorded is not None and form not in self._warm:
                raise CaptureError(f"{name} is captured with shapes that it has not run with, and so is set up now")
            self._warm.add(form)
            changed = [arguments[place] for place in CHANGED.get(name, ())]
            places = {_storage(tensor) for tensor in _tensors((arguments, named))}
            result = self.noted(name, call, arguments, named, changed)
            # A graph would leave it out.
            assert changed or any(_storage(each) not in places for each in _tensors(result)), f"{name}: see CHANGED"
            return result

        return launched

    def _plan(self, plan: Callable[..., Any]) -> Callable[..., Any]:
        def plan_attention(batch: Any, block_size: int) -> Any:
            if self._recorded is not None and batch.context_lens_host is not None:
                raise CaptureError("attention is planned by numbers of the host while a graph is captured")

            def attend(query: Tensor, keys: Tensor, values: Tensor, *rest: Any, **named: Any) -> Any:
                read = {"read": (batch.query_start, batch.context_lens, batch.block_tables)}

                def planned(*arguments: Any, read: Any, **inner: Any) -> Any:
                    return plan(batch, block_size)(*arguments, **inner)

                return self._op("attention", planned)(query, keys, values, *rest, **named, **read)

            return attend

        return plan_attention

    # What torch does.

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """See torch's calls of this thread."""
        with _Functions(self), _Dispatched(self):
            yield

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Look away: what happens is part of something that is noted as a whole."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def function(self, func: Callable[..., Any], arguments: Any, named: Any) -> Any:
        """Handle a call of torch."""
        if self._depth:
            return func(*arguments, **named)
        name = getattr(func, "__name__", "")
        if name in READS and isinstance(arguments[0], Tensor) and not self.is_host(arguments[0]):
            raise RuleError(f"{name}: the host reads a tensor of the device without fetching it")
        before, self._names_device = self._names_device, named.get("device") is not None
        try:
            return func(*arguments, **named)
        finally:
            self._names_device = before

    def dispatched(self, func: Any, arguments: Any, named: Any) -> Any:
        """Handle an operation."""
        if self._depth:
            return func(*arguments, **named)
        name = func._schema.name.removeprefix("aten::")
        taken = _tensors((arguments, named))
        on_device = any(not self.is_host(tensor) for tensor in taken) or (
            not taken and self._names_device and self.stream is not None
        )
        if not on_device or name == "lift_fresh":
            with self.unwatched():
                result = func(*arguments, **named)
            for tensor in _tensors(result):
                self._host_tensors[_storage(tensor)] = tensor
            return result
        if self._recorded is not None and name == "where" and func._overloadname.startswith("Scalar"):
            raise CaptureError("where: a number of the host's is copied to the device while a graph is captured")
        if name in SYNCS:
            raise RuleError(f"{name}: the host waits for a tensor of the device without fetching it")
        if not taken:
            self._take(func, arguments, named)
        written = [
            value
            for argument, value in zip(func._schema.arguments, arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        return self.noted(name, func, arguments, named, _tensors(written))

    def _take(self, func: Any, arguments: Any, named: Any) -> None:
        with self.unwatched():
            wanted = func(*arguments, **{**named, "device": torch.device("meta"), "pin_memory": False}).nbytes
        if wanted > self.capacity:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {wanted} bytes")


class _WatchedLinear:
    """A Linear whose products are launches."""

    def __init__(self, watch: Watch, linear: Any) -> None:
        self._call = watch._op("linear", linear)
        self.logits = watch._op("linear", linear.logits)
        self.likeliest = watch._op("linear", linear.likeliest)
        self.weight_rows = watch._op("weight_rows", linear.weight_rows)

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = self._call(x)
        return result


class _Functions(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._watch.function(func, args, kwargs or {})


class _Dispatched(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._watch.dispatched(func, args, kwargs or {})


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place


def _num_holders(place: int) -> int:
    count: int = torch._C._storage_Use_Count(place)  # type: ignore[attr-defined]
    return count


def _alias(leaf: Any) -> Any:
    """The same memory by another tensor, so that who made the first one can be seen to drop it."""
    if not isinstance(leaf, Tensor):
        return leaf
    with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        made = torch.empty(0, dtype=leaf.dtype)
        return made.set_(leaf.untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride())
