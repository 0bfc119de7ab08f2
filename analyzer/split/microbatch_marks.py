"""Annotations that mark the work of a pipeline stage on a microbatch."""

from __future__ import annotations

import re

from msgspec import Struct

_SINGLE_MARK = re.compile(
    r"(?:stepsplit::(?=[FBW] )|PP:(?P<pp>\d{1,9})(?=[FBIW]\d))(?P<letter>[FBIW])"
    r"(?: stage=(?P<stage>\d{1,9}) mb=(?P<mb>\d{1,9})|(?P<pp_mb>\d{1,9}))$"
)

PHASE_OF_LETTER = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}

_COMBINED_MARK = re.compile(r"PP:\((?P<actions>[\dFBIW;]+)\)OVERLAP_F_B$")

_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")

_GPIPE_MARK = re.compile(r"(?P<phase>Forward|Backward) (?P<mb>\d{1,9})$")

MARKERS = (("stepsplit::",), ("PP:",), ("Forward ", "Backward "))
"""Name prefixes of each kind of mark; only the first kind present in a trace is used."""


class Mark(Struct, frozen=True):
    """The work of a stage on a microbatch, parsed from an annotation name."""

    stage: int
    microbatch: int
    phase: str


def parse_marks(name: str, stage: int | None = None) -> tuple[Mark, ...]:
    """Parses an annotation name, including combined actions; empty for other names.

    torch's GPipe annotations have no stage: the caller passes stage, the rank's pp coordinate,
    otherwise they are ignored.
    """
    if (single := _SINGLE_MARK.match(name)) is not None:
        phase = PHASE_OF_LETTER[single["letter"]]
        return (
            Mark(int(single["stage"] or single["pp"]), int(single["mb"] or single["pp_mb"]), phase),
        )
    if (combined := _COMBINED_MARK.match(name)) is not None:
        return tuple(
            Mark(int(at), int(microbatch), PHASE_OF_LETTER[letter])
            for at, letter, microbatch in _ACTION.findall(combined["actions"])
        )
    if stage is not None and (named := _GPIPE_MARK.match(name)) is not None:
        return (Mark(stage, int(named["mb"]), named["phase"].lower()),)
    return ()
