"""The timeline as its script reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.tables import Tables
from stepsplit.analyzer.trace import Int64
from stepsplit.dashboard.figures.palette import LOOKS
from stepsplit.dashboard.timeline.scene import Scene, Shown

RANKS, FEW_RANKS = 64, 8
SHAPES, MOST_SLOTS = 40_000, 2_500
"""How much of a step a page without a server holds."""


def index_json(scene: Scene) -> dict[str, Any]:
    """The run's steps and ranks, and how buckets look."""
    return {
        "buckets": [
            {"name": look.bucket, "color": look.color, "dark": look.dark, "hatched": look.hatched}
            for look in LOOKS
        ],
        "steps": [
            {"step": one.step, "kind": one.kind, "from": one.start_ns, "to": one.end_ns}
            for one in scene.steps
        ],
        "ranks": [{"rank": one.rank, "host": one.host, "stage": one.stage} for one in scene.ranks],
    }


def window_json(lines: Sequence[Shown]) -> dict[str, Any]:
    """The lines as the page draws them: names are places in one list, -1 for many slices."""
    places: dict[str, int] = {}
    rows = [
        {
            "rank": one.rank,
            "lane": one.lane,
            "depth": one.depth,
            "start": one.drawn.start_ns,
            "dur": one.drawn.dur_ns,
            "bucket": one.drawn.bucket,
            "cover": one.drawn.cover,
            "name": _places(places, one),
            "owner": one.owner,
        }
        for one in lines
    ]
    return {"rows": rows, "names": list(places)}


def _places(places: dict[str, int], one: Shown) -> Int64:
    """The names of the shapes as places in the list of all names."""
    used, code = np.unique(one.name, return_inverse=True)
    here = [places.setdefault(one.names[i], len(places)) if i >= 0 else -1 for i in used.tolist()]
    return np.array(here, dtype=np.int64)[code]


def still_json(report: Report, tables: Tables) -> dict[str, Any]:
    """What a page without a server holds: the bands of the middle full step of up to RANKS ranks,
    and the lanes too where there are few."""
    scene = Scene(report, tables)
    full = [one for one in scene.steps if one.kind == "full"] or list(scene.steps)
    step = full[len(full) // 2]
    index = index_json(scene)
    index["steps"] = [one for one in index["steps"] if one["step"] == step.step]
    index["ranks"] = index["ranks"][:RANKS]
    ranks = [one["rank"] for one in index["ranks"]]
    slots = min(MOST_SLOTS, SHAPES // len(ranks))
    opened = ranks if len(ranks) <= FEW_RANKS else []
    lines = scene.window(step.start_ns, step.end_ns, slots, ranks, opened)
    return {"index": index, "window": window_json(lines)}
