"""The pipeline's grid as its schedule would have it: equal stages, no communication."""

from __future__ import annotations

import numpy as np

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config import SCHEDULES
from stepsplit.analyzer.model.schedule import Order, Places, orders, places
from stepsplit.analyzer.model.schedule_time import Timeline, graph, simulate
from stepsplit.analyzer.report.tables import PHASES, Boxes

_PHASE = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}


def ideal_grid(measured: Boxes, schedule: str | None, microbatches: int) -> Boxes | None:
    """The boxes of one step if every stage took the measured mean, from time 0.

    measured holds one step of one rank a stage. None where the schedule is not modelled or cannot
    be of that many stages and microbatches.
    """
    ranks, positions = np.unique(measured.rank), len(np.unique(measured.stage))
    if schedule not in SCHEDULES or not len(ranks) or positions % len(ranks):
        return None
    shape = (schedule, len(ranks), microbatches, positions // len(ranks))
    held = 1 if schedule in ("zb-v", "dualpipe", "dualpipe-v") else shape[3]
    try:
        ordered, at = orders(*shape[:3], held), places(*shape[:2], held)
        timeline = simulate(graph(*shape[:3], held), (_costs(measured),) * positions)
    except UsageError:
        return None
    if max(place for one in at for place in one) != positions - 1:
        return None
    return _boxes(measured, _by_coordinate(measured, at), ordered, at, timeline)


def _costs(measured: Boxes) -> tuple[float, float, float]:
    """The mean forward, backward and weight gradient of a microbatch on a stage, in ns."""
    forward, backward, weight = (measured.dur_ns[measured.phase == i] for i in range(len(PHASES)))
    return tuple(float(one.mean()) if len(one) else 0.0 for one in (forward, backward, weight))  # type: ignore[return-value]


def _by_coordinate(measured: Boxes, at: Places) -> list[int]:
    """The measured rank of each pp coordinate: the one that holds its first stage."""
    return [int(measured.rank[measured.stage == one[0]][0]) for one in at]


def _boxes(
    measured: Boxes, ranks: list[int], ordered: tuple[Order, ...], at: Places, timeline: Timeline
) -> Boxes:
    rows = [
        (ranks[i], at[i][one.chunk], one.microbatch, PHASES.index(_PHASE[one.kind]), start, end)
        for i, order in enumerate(ordered)
        for one, start, end in zip(order, timeline.starts_ns[i], timeline.ends_ns[i], strict=True)
    ]
    table = np.array(rows, dtype=np.float64).astype(np.int64)
    return Boxes(
        rank=table[:, 0].astype(np.int32),
        step=np.full(len(table), int(measured.step[0]), dtype=np.int32),
        stage=table[:, 1].astype(np.int32),
        microbatch=table[:, 2].astype(np.int32),
        phase=table[:, 3].astype(np.uint8),
        start_ns=table[:, 4],
        dur_ns=table[:, 5] - table[:, 4],
    )
