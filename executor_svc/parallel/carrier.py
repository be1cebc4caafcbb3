"""How what rank 0 computes with comes to the other ranks: numbers in its messages, tensors wherever they are."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from executor_svc.attention import AttentionMetadata
from executor_svc.parallel.forms import RowsForm, StepForm
from executor_svc.parallel.group import Group
from executor_svc.parallel.messages import Kind, decode_rows, decode_step, encode_rows, encode_step
from executor_svc.parallel.watch import Watch


class Carrier(Protocol):
    """What rank 0 tells by one method, the others take by the other, in the same order."""

    def tell_step(self, token_ids: Tensor, metadata: AttentionMetadata) -> None:
        """Tell the inputs of a step, as CausalLM.forward takes them."""

    def take_step(self, message: bytearray) -> tuple[Tensor, AttentionMetadata]:
        """Give what was told; `message`: of Kind.STEP."""

    def tell_rows(self, kind: Kind, x: Tensor) -> None:
        """Tell hidden states x [N, hidden], N at least 1, and what is to be done with them."""

    def take_rows(self, message: bytearray) -> Tensor:
        """Give what was told; `message`: of Kind.LOGITS or LIKELIEST."""


class HostCarrier:
    """On CPUs the tensors are part of the messages."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def tell_step(self, token_ids: Tensor, metadata: AttentionMetadata) -> None:
        """See Carrier."""
        self._watch.tell(Kind.STEP, encode_step(token_ids, metadata))

    def take_step(self, message: bytearray) -> tuple[Tensor, AttentionMetadata]:
        """See Carrier."""
        return decode_step(message)

    def tell_rows(self, kind: Kind, x: Tensor) -> None:
        """See Carrier."""
        self._watch.tell(kind, encode_rows(x))

    def take_rows(self, message: bytearray) -> Tensor:
        """See Carrier."""
        return decode_rows(message)


class DeviceCarrier:
    """Beside an accelerator the host does not know the tokens: rank 0 has sampled them there, and waits for nothing.

    So messages have the shapes, and what of a step's numbers the host plans by; the tensors are broadcast on the
    current stream. In a graph the broadcast is part of it.
    """

    def __init__(self, watch: Watch, group: Group, device: torch.device) -> None:
        """`device`: where this rank makes its tensors."""
        self._watch = watch
        self._group = group
        self._device = device

    def tell_step(self, token_ids: Tensor, metadata: AttentionMetadata) -> None:
        """See Carrier."""
        form = StepForm.of(token_ids, metadata)
        self._watch.tell(Kind.STEP, form.encode())
        packed = self._empty(form)
        for part, whole in zip(form.views(packed), form.parts(token_ids, metadata), strict=True):
            part.copy_(whole)
        self._group.broadcast(packed)

    def take_step(self, message: bytearray) -> tuple[Tensor, AttentionMetadata]:
        """See Carrier."""
        form = StepForm.decode(message)
        packed = self._empty(form)
        self._group.broadcast(packed)
        return form.step(form.views(packed))

    def tell_rows(self, kind: Kind, x: Tensor) -> None:
        """See Carrier."""
        x = x.contiguous()
        self._watch.tell(kind, RowsForm.of(x).encode())
        self._group.broadcast(x)

    def take_rows(self, message: bytearray) -> Tensor:
        """See Carrier."""
        form = RowsForm.decode(message)
        x = torch.empty(form.shape, dtype=form.dtype, device=self._device)
        self._group.broadcast(x)
        return x

    def _empty(self, form: StepForm) -> Tensor:
        return torch.empty(form.size, dtype=torch.uint8, device=self._device)
