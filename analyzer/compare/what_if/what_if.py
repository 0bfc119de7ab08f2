"""What if: the mean step of a recording with something changed, by a replay of its dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepsplit.analyzer.compare.causes.scene import Scene, scene_of
from stepsplit.analyzer.compare.what_if.change import USUAL, Change, change_of
from stepsplit.analyzer.compare.what_if.pipeline import window_gain_ns
from stepsplit.analyzer.compare.what_if.replays import replayed
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.schedule_time import ideal_bubble_fraction
from stepsplit.analyzer.readers.recording import read_recording
from stepsplit.analyzer.split.run import RunSplit, split_run

_BY_SCHEDULE = ("microbatches", "schedule")


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The mean full step with one change made, and by how much it is shorter (negative: longer)."""

    change: Change
    step_ns: int
    gain_ns: int


@dataclass(frozen=True, slots=True)
class WhatIfs:
    """A recording's mean full step, and what it were with each change alone.

    slowdown is what stragglers of any kind cost: the step over the one in which all ranks and
    stages compute alike and no call moves data longer than its kind, both without idle hosts.
    After Lin et al., Understanding Stragglers in Large Model Training Using What-if Analysis,
    arXiv:2505.05713, whose S it is.
    """

    step_ns: int
    changes: tuple[WhatIf, ...]
    slowdown: float


def what_ifs(found: RunSplit, words: Sequence[str] = ()) -> WhatIfs:
    """Each change that the words name, all usual ones that apply where there are none.

    Raises UsageError for words that name no change, or one that the recording has nothing for.
    """
    scene = scene_of(found, 0)
    if words:
        rows = [_with(scene, change_of(each)) for each in words]
    else:
        rows = [row for each in USUAL if (row := _if_any(scene, change_of(each))) is not None]
    return WhatIfs(round(scene.mean_ns), tuple(rows), slowdown_of(scene))


def slowdown_of(scene: Scene) -> float:
    """The slowdown of a recording, as WhatIfs has it."""
    idle = Change("no-idle")
    before = scene.gain_ns(replayed(scene, idle))
    even = scene.over(replayed(scene, Change("even")))
    after = even.gain_ns(replayed(even, idle))
    return (scene.mean_ns - before) / (even.mean_ns - after)


def _with(scene: Scene, change: Change) -> WhatIf:
    if change.kind in _BY_SCHEDULE:
        gain = round(window_gain_ns(scene, change))
    else:
        gain = scene.gain_ns(replayed(scene, change))
    return WhatIf(change, round(scene.mean_ns) - gain, gain)


def _if_any(scene: Scene, change: Change) -> WhatIf | None:
    try:
        return _with(scene, change)
    except UsageError:
        return None


def what_if(*places: str | Path, changes: Sequence[str] = ()) -> WhatIfs:
    """what_ifs of the recording in the files, folders, archives and URLs. Raises DataError too."""
    recording = read_recording(places)
    return what_ifs(split_run(recording.traces, recording.spec, ideal_bubble_fraction), changes)
