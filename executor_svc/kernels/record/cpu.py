"""Recording of compiled kernels: a program for each set of input shapes, see executor_svc/kernels/native/program.py."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from executor_svc.kernels.native.library import NativeLibrary
from executor_svc.kernels.native.program import Arena, NotRecordableError, Program, record_program
from executor_svc.kernels.paged_attention import PagedAttention
from executor_svc.kernels.paged_attention.cpu import NativeAttention
from executor_svc.kernels.record import Record, StepBody

logger = logging.getLogger(__name__)

MAX_TOKENS = 2048
"""Of a recorded step. Those that chunks of prompts fill have the same number of tokens again and again. In longer ones
the calls cost little beside what they compute."""
MAX_PROGRAMS = 256
"""The one that was not used for longest goes first. A program of a small model takes some 50 KiB."""

_Shapes = tuple[tuple[int, ...], ...]


class RecordedBody:
    """A body, and the programs that were made of it: to record one takes as long as to call its ops once."""

    def __init__(self, library: NativeLibrary, body: StepBody) -> None:
        self._library = library
        self._body = body
        self._arena = Arena()
        self._programs: OrderedDict[_Shapes, Program] = OrderedDict()
        self._recordable = True

    @property
    def num_programs(self) -> int:
        """Shapes that are recorded."""
        return len(self._programs)

    def __call__(self, inputs: Sequence[Tensor], attention: PagedAttention) -> Tensor:
        """See StepBody."""
        if not self._recordable or len(inputs[0]) > MAX_TOKENS or not isinstance(attention, NativeAttention):
            return self._body(inputs, attention)
        shapes = tuple(tuple(tensor.shape) for tensor in inputs)
        program = self._programs.get(shapes)
        if program is None:
            try:
                program = record_program(self._library, self._arena, self._body, inputs, attention)
            except NotRecordableError as error:
                logger.info("steps run op by op", extra={"fields": {"reason": str(error)}})
                self._recordable = False
                return self._body(inputs, attention)
            self._programs[shapes] = program
            if len(self._programs) > MAX_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(shapes)
        return program.run(inputs, attention)


def make_record(library: NativeLibrary) -> Record:
    """Make the op."""

    def record(body: StepBody) -> StepBody:
        return RecordedBody(library, body)

    return record
