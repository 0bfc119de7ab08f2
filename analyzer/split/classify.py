"""What a rank worked on, by the kinds of its events; the names that mark work of a pipeline."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stepsplit.analyzer.arrays import Intervals, union
from stepsplit.analyzer.trace import Bool, EventKind, Events, RankTrace

# What a rank worked on: computing, copying, or both at once with communication.


@dataclass(frozen=True, slots=True)
class Work:
    """What one rank worked on, each a sorted disjoint set; fused is a part of compute."""

    compute: Intervals
    copy: Intervals
    fused: Intervals


def work_of(trace: RankTrace) -> Work:
    """The rank's work: kernels and copies of a device, else the ops of its training threads."""
    events, kinds = trace.events, trace.kinds
    return Work(
        _covered(events, kinds.computes),
        _covered(events, kinds.of(EventKind.COPY)),
        _covered(events, kinds.of(EventKind.FUSED)),
    )


def _covered(events: Events, mask: Bool) -> Intervals:
    return union(events.start_ns[mask], events.end_ns[mask])


# The names by which annotations mark the work of a pipeline.

_ONE = re.compile(
    r"(?:stepsplit::(?=[FBW] )|PP:(?P<pp>\d{1,9})(?=[FBIW]\d))(?P<letter>[FBIW])"
    r"(?: stage=(?P<stage>\d{1,9}) mb=(?P<mb>\d{1,9})|(?P<pp_mb>\d{1,9}))$"
)

PHASE_OF_LETTER = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}

_AT_ONCE = re.compile(r"PP:\((?P<actions>[\dFBIW;]+)\)OVERLAP_F_B$")

_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")

_OF_GPIPE = re.compile(r"(?P<phase>Forward|Backward) (?P<mb>\d{1,9})$")

MARKERS = (("stepsplit::",), ("PP:",), ("Forward ", "Backward "))
"""How the names of each kind of mark begin; the first kind that a trace holds counts alone."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A stage's work on a microbatch, as a name tells it."""

    stage: int
    microbatch: int
    phase: str


def marks_in(name: str, stage: int | None = None) -> tuple[Mark, ...]:
    """What the name marks, several actions at once included; nothing for any other name.

    torch's GPipe names no stage: stage, the rank's pp coordinate, does, or they mark nothing.
    """
    if (one := _ONE.match(name)) is not None:
        phase = PHASE_OF_LETTER[one["letter"]]
        return (Mark(int(one["stage"] or one["pp"]), int(one["mb"] or one["pp_mb"]), phase),)
    if (several := _AT_ONCE.match(name)) is not None:
        return tuple(
            Mark(int(at), int(microbatch), PHASE_OF_LETTER[letter])
            for at, letter, microbatch in _ACTION.findall(several["actions"])
        )
    if stage is not None and (named := _OF_GPIPE.match(name)) is not None:
        return (Mark(stage, int(named["mb"]), named["phase"].lower()),)
    return ()
