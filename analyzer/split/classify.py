"""Work of a rank by event kind, and parsing of the names that mark pipeline work."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stepsplit.analyzer.arrays import Intervals, union
from stepsplit.analyzer.trace import Bool, EventKind, Events, RankTrace

# Compute, copies, and fused compute-and-communication kernels of a rank.


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one rank as sorted disjoint intervals; fused is a subset of compute."""

    compute: Intervals
    copy: Intervals
    fused: Intervals


def work_of(trace: RankTrace) -> Work:
    """The work of a rank: device kernels and copies, else the ops of its training threads."""
    events, kinds = trace.events, trace.kinds
    return Work(
        _covered(events, kinds.computes),
        _covered(events, kinds.of(EventKind.COPY)),
        _covered(events, kinds.of(EventKind.FUSED)),
    )


def _covered(events: Events, mask: Bool) -> Intervals:
    return union(events.start_ns[mask], events.end_ns[mask])


# Names of the annotations that mark pipeline work.

_ONE = re.compile(
    r"(?:stepsplit::(?=[FBW] )|PP:(?P<pp>\d{1,9})(?=[FBIW]\d))(?P<letter>[FBIW])"
    r"(?: stage=(?P<stage>\d{1,9}) mb=(?P<mb>\d{1,9})|(?P<pp_mb>\d{1,9}))$"
)

PHASE_OF_LETTER = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}

_AT_ONCE = re.compile(r"PP:\((?P<actions>[\dFBIW;]+)\)OVERLAP_F_B$")

_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")

_OF_GPIPE = re.compile(r"(?P<phase>Forward|Backward) (?P<mb>\d{1,9})$")

MARKERS = (("stepsplit::",), ("PP:",), ("Forward ", "Backward "))
"""Name prefixes of each kind of mark; only the first kind present in a trace is used."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The work of a stage on a microbatch, parsed from an annotation name."""

    stage: int
    microbatch: int
    phase: str


def marks_in(name: str, stage: int | None = None) -> tuple[Mark, ...]:
    """Parses an annotation name, including combined actions; empty for other names.

    torch's GPipe annotations have no stage: the caller passes stage, the rank's pp coordinate,
    otherwise they are ignored.
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
