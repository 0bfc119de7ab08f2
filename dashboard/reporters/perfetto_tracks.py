"""The rows of a Perfetto page: the steps, buckets and waits of each rank, and its stages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.report.report import Run
from stepsplit.analyzer.report.tables import Boxes
from stepsplit.analyzer.trace import Int32, Int64
from stepsplit.collectors.run_spec import Mesh
from stepsplit.dashboard.reporters.perfetto_packets import Track

PROCESS, STEPS, BAND, WAITS, STAGES = range(5)
"""Places of the tracks of a rank; from STAGES on there is one for each stage."""
PID = 1_000_000
"""Rank r is process PID + r: for Perfetto process 0 is the idle one."""
_NAMES = {STEPS: "steps", BAND: "buckets", WAITS: "waits"}


@dataclass(frozen=True, slots=True)
class Lanes:
    """Which tracks there are: each rank has count of them, not all in use.

    of_boxes has the track of each box, stage_of the stage of each such track.
    """

    count: int
    of_boxes: Int64
    stage_of: dict[int, int]

    def tracks(self, rank: Int32, place: int) -> Int64:
        """The ranks' tracks at that place."""
        return (rank.astype(np.int64) + 1) * self.count + place


def lanes_of(boxes: Boxes) -> Lanes:
    """A lane for each stage of a rank, and more for boxes of a stage that overlap."""
    lane = _lane_of_boxes(boxes)
    stages = np.unique(np.column_stack((boxes.stage, lane)), axis=0)
    place = STAGES + _row_of(stages, boxes.stage, lane)
    count = STAGES + len(stages)
    track = (boxes.rank.astype(np.int64) + 1) * count + place
    return Lanes(count, track, dict(zip(track.tolist(), boxes.stage.tolist(), strict=True)))


def tracks_of(run: Run, lanes: Lanes) -> list[Track]:
    """The tracks of all ranks: a process each, named by where it runs, and what it holds."""
    tracks = []
    stages: dict[int, set[int]] = {rank: set() for rank in run.ranks}
    for track, stage in lanes.stage_of.items():
        stages.setdefault(track // lanes.count - 1, set()).add(stage)
    for rank, own in stages.items():
        base = (rank + 1) * lanes.count
        tracks.append(Track(base, _process_name(run, rank, sorted(own)), pid=PID + rank))
        tracks += [Track(base + place, name, base, place) for place, name in _NAMES.items()]
    for track, stage in sorted(lanes.stage_of.items()):
        base = track // lanes.count * lanes.count
        tracks.append(Track(track, f"stage {stage}", base, track - base))
    return tracks


def _lane_of_boxes(boxes: Boxes) -> Int64:
    """The first lane of its stage that is free when a box begins."""
    lane = np.zeros(len(boxes.rank), dtype=np.int64)
    free_at: dict[tuple[int, int], list[int]] = {}
    order = np.lexsort((boxes.start_ns, boxes.rank)).tolist()
    columns = (boxes.rank, boxes.stage, boxes.start_ns, boxes.dur_ns)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    for row in order:
        rank, stage, start, dur = rows[row]
        ends = free_at.setdefault((rank, stage), [])
        free = next((i for i, end in enumerate(ends) if end <= start), len(ends))
        ends[free : free + 1] = [start + dur]
        lane[row] = free
    return lane


def _row_of(stages: Int64, stage: Int32, lane: Int64) -> Int64:
    """The row of each (stage, lane) in the sorted table of them."""
    keys = {pair: row for row, pair in enumerate(map(tuple, stages.tolist()))}
    pairs = zip(stage.tolist(), lane.tolist(), strict=True)
    return np.array([keys[pair] for pair in pairs], dtype=np.int64)


def _process_name(run: Run, rank: int, stages: list[int]) -> str:
    """Such as "rank 3 (host0, stage 1)", as far as that is known."""
    hosts = [host.host for host in run.hosts if rank in host.ranks and host.host != "unknown"]
    seen = stages or _stage_by_mesh(run, rank)
    which = [f"stage {seen[0]}" if len(seen) == 1 else f"stages {', '.join(map(str, seen))}"]
    where = ", ".join(hosts + (which if seen else []))
    return f"rank {rank} ({where})" if where else f"rank {rank}"


def _stage_by_mesh(run: Run, rank: int) -> list[int]:
    if run.mesh is None:
        return []
    mesh = Mesh(tuple(axis.axis for axis in run.mesh), tuple(axis.size for axis in run.mesh))
    return [mesh.coordinate(rank, "pp")] if mesh.size("pp") > 1 else []
