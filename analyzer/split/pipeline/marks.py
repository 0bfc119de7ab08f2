"""The names by which annotations mark the work of a pipeline."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
