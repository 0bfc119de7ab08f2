"""What holds a run up, the cause that is worth most first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepsplit.analyzer.compare.causes.hosts import late_hosts
from stepsplit.analyzer.compare.causes.links import slow_links
from stepsplit.analyzer.compare.causes.microbatches import few_microbatches
from stepsplit.analyzer.compare.causes.needless import needless_calls
from stepsplit.analyzer.compare.causes.overlap import lost_overlap
from stepsplit.analyzer.compare.causes.paces import slow_paces
from stepsplit.analyzer.compare.causes.scene import Scene, scene_of
from stepsplit.analyzer.compare.causes.shares import uneven_shares
from stepsplit.analyzer.report.report import Finding
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.trace import Note
from stepsplit.collectors.rank_record import RankRecord

WORTH = 0.01
"""Causes below this share of the step are not worth a line."""
MOST = 5
MOST_CALLS = 500_000
"""Of more calls a replay takes minutes and gigabytes: some 40 s and 1 GB for so many."""


@dataclass(frozen=True, slots=True)
class Causes:
    """What holds a recording up, largest gain first; notes say what was not looked for."""

    findings: tuple[Finding, ...]
    notes: tuple[Note, ...] = ()


def find_causes(found: RunSplit, origin_ns: int, records: Sequence[RankRecord] = ()) -> Causes:
    """The causes of a recording; origin_ns is the report's t0, records are what its ranks told.

    A gain is what the mean full step would be shorter by if that one cause were mended, by a replay
    of the recording without it. Gains do not add up.
    """
    calls = sum(len(rank.trace.calls) for rank in found.ranks)
    if not any(rank.steps for rank in found.ranks):
        return Causes(())
    if calls > MOST_CALLS:
        text = (
            f"{calls:,} calls are too many to replay: causes are not looked for; record fewer steps"
        )
        return Causes((), (Note("not_replayed", text),))
    scene = scene_of(found, origin_ns, records)
    return Causes(_worth(scene) if scene.mean_ns > 0 else ())


def _worth(scene: Scene) -> tuple[Finding, ...]:
    causes = [
        *slow_paces(scene),
        *uneven_shares(scene),
        *late_hosts(scene),
        *slow_links(scene),
        *lost_overlap(scene),
        *few_microbatches(scene),
        *needless_calls(scene),
    ]
    worth = [cause for cause in causes if cause.gain_ns >= WORTH * scene.mean_ns]
    return tuple(sorted(worth, key=lambda cause: -cause.gain_ns)[:MOST])
