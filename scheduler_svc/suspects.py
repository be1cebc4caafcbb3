"""Which sequences may have killed an executor, and how the one that does is found without the others paying for it.

Only what was in unanswered steps is suspect. Sequences that were there at two deaths run apart from then on, in groups:
an executor runs one group and nothing else. A group that dies is halved; one whose members have all got past the place
where they died is cleared. A sequence fails after two deaths that are certain and at which it was alone.

A lost connection may be a death or a cut, which nobody can tell at that moment: it counts as a death until the same
process answers again, but no request fails by it before it is certain.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from scheduler_svc.batch_builder import BatchBuilder
from scheduler_svc.executor_state import ExecutorState
from scheduler_svc.sequence import Sequence, SequenceStatus, SuspectGroup

APART_AFTER = 2
"""Deaths after which those that were there at each run apart."""

MAX_DEATHS_ALONE = 2
"""Deaths at which it was alone that a sequence survives, less one."""

SAFE_AFTER = 4
"""Tokens past the place of a death after which a sequence is cleared: more than are in flight at a time."""

_MOST_INCIDENTS = 256


class Loss(Enum):
    """How a session ended. Only a death makes suspects: a hang, a cut that is known and a farewell do not."""

    LEFT = "left"
    HUNG = "hung"
    LOST = "lost"
    DIED = "died"


@dataclass
class _Incident:
    sequences: tuple[Sequence, ...]
    is_certain: bool = False


class Suspects:
    """The deaths of executors, and what they say of sequences."""

    def __init__(self, builder: BatchBuilder) -> None:
        self._builder = builder
        self._incidents: OrderedDict[str, _Incident] = OrderedDict()
        self._groups: list[SuspectGroup] = []
        self.num_deaths = 0

    def lost(self, executor: ExecutorState, loss: Loss) -> list[Sequence]:
        """Take in the end of a session that is about to be closed; returns whose requests are to fail."""
        if loss not in (Loss.LOST, Loss.DIED):
            return []
        self.num_deaths += 1
        in_flight = (sequence for step in executor.in_flight for sequence in step.sequences)
        suspects = tuple(each for each in dict.fromkeys(in_flight) if each.status is not SequenceStatus.FINISHED)
        for sequence in suspects:
            if sequence.group is None and sequence.num_tokens >= sequence.suspect_until:
                sequence.num_deaths = sequence.num_deaths_alone = 0
            sequence.num_deaths += 1
            sequence.suspect_until = sequence.num_tokens + SAFE_AFTER
        self._part([each for each in suspects if each.num_deaths >= APART_AFTER])
        self._incidents[executor.spec.incarnation] = _Incident(suspects)
        if len(self._incidents) > _MOST_INCIDENTS:
            self._incidents.popitem(last=False)
        return self.is_certain(executor.spec.incarnation) if loss is Loss.DIED else []

    def is_certain(self, incarnation: str) -> list[Sequence]:
        """Note that a process which was lost is dead; returns whose requests are to fail."""
        incident = self._incidents.pop(incarnation, None)
        if incident is None or len(incident.sequences) != 1:
            return []
        sequence = incident.sequences[0]
        sequence.num_deaths_alone += 1
        is_guilty = sequence.num_deaths_alone >= MAX_DEATHS_ALONE and sequence.status is not SequenceStatus.FINISHED
        return [sequence] if is_guilty else []

    def is_alive(self, incarnation: str) -> None:
        """Note that a process which was lost lives: it was a cut, which nobody is to blame for."""
        incident = self._incidents.pop(incarnation, None)
        if incident is None:
            return
        self.num_deaths -= 1
        for sequence in incident.sequences:
            sequence.num_deaths = max(0, sequence.num_deaths - 1)
        self.clear()

    def clear(self) -> None:
        """Let go the groups of which nobody is suspect any more. Costs nothing where there is none."""
        if not self._groups:
            return
        left = []
        for group in self._groups:
            members = [each for each in group.members if each.status is not SequenceStatus.FINISHED]
            is_suspect = any(
                each.num_tokens < each.suspect_until and each.num_deaths >= APART_AFTER for each in members
            )
            if is_suspect:
                group.members = members
                left.append(group)
                continue
            for sequence in members:
                sequence.group = None
                sequence.num_deaths = sequence.num_deaths_alone = 0
        self._groups = left

    def make_way(self, executor: ExecutorState, now: float) -> None:
        """Have those that run give way, for the few steps that it takes, to a group at the head of the queue."""
        if not self._groups or not executor.running or (head := executor.waiting.peek()) is None:
            return
        if head[1].group is None or next(iter(executor.running)).group is not None:
            return
        for sequence in list(executor.running):
            self._builder.preempt(executor, sequence, now, yields=True)

    def _part(self, suspects: list[Sequence]) -> None:
        """Have those that ran together run in two groups from now on."""
        if not suspects:
            return
        for group in self._groups:
            group.members = [each for each in group.members if each not in suspects]
        self._groups = [group for group in self._groups if group.members]
        middle = (len(suspects) + 1) // 2
        for half in (suspects[:middle], suspects[middle:]):
            if half:
                self._groups.append(_grouped(half))


def _grouped(sequences: Iterable[Sequence]) -> SuspectGroup:
    group = SuspectGroup(list(sequences))
    for sequence in group.members:
        sequence.group = group
    return group
