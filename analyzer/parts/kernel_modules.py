"""The parts of kernels that say their module themselves, as those of annotated CUDA graphs do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepsplit.analyzer.parts.part import NO_LAYER, Part, PartKind, PartPhase
from stepsplit.analyzer.parts.scope_names import ScopeName, parse_range_name
from stepsplit.analyzer.trace import MODULE_MARK, Category, Events, Int64


def find_stated_parts(events: Events, rows: Int64) -> dict[int, Part]:
    """The part of each of these events that says its module, in the order of time.

    A module is the same in all passes. Layers go up in a forward and down by one in a backward,
    with what is recomputed in it; the pass of what is in no layer is not known.
    """
    marks = np.flatnonzero(
        events.is_category(Category.GPU_ANNOTATION) & events.match_prefix(MODULE_MARK)
    )
    if not len(marks):
        return {}
    scopes = [
        parse_range_name(name) if name.startswith(MODULE_MARK) else None for name in events.names
    ]
    name_of_row: dict[int, int] = {}
    for lane in np.unique(events.lane[marks]).tolist():
        own = marks[events.lane[marks] == lane]
        on_lane = rows[events.lane[rows] == lane]
        at = events.start_ns[own].searchsorted(events.start_ns[on_lane])
        at = np.minimum(at, len(own) - 1)
        same = events.start_ns[own[at]] == events.start_ns[on_lane]
        names = events.name_id[own[at[same]]].tolist()
        name_of_row |= zip(on_lane[same].tolist(), names, strict=True)
    placed = sorted(name_of_row)
    stated = [scopes[name_of_row[row]] or ScopeName() for row in placed]
    return {
        row: Part(one.layer, PartKind.OTHER if one.kind is None else one.kind, phase)
        for row, one, phase in zip(placed, stated, _find_phases(stated), strict=True)
    }


def _find_phases(stated: Sequence[ScopeName]) -> list[PartPhase]:
    phases: list[PartPhase] = []
    phase, before, has_left, has_embedded = PartPhase.FORWARD, NO_LAYER, False, False
    for one in stated:
        if one.layer == NO_LAYER:
            has_left, has_embedded = True, has_embedded or one.kind == PartKind.EMBEDDING
            phases.append(PartPhase.OTHER)
            continue
        if one.layer == before - 1 or (one.layer == before and has_left and not has_embedded):
            phase = PartPhase.BACKWARD
        elif one.layer != before or has_left:
            phase = PartPhase.FORWARD
        before, has_left, has_embedded = one.layer, False, False
        phases.append(phase)
    return phases
