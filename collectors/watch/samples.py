"""A sample of a watched training: as rank 0 announces it, and in progress on a rank."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stepsplit.collectors.formats.json_decode import select_known_fields
from stepsplit.collectors.formats.run_spec import GroupInfo, Mesh

if TYPE_CHECKING:
    from stepsplit.collectors.record.trace_window import TraceWindow


@dataclass(frozen=True, slots=True)
class NextSample:
    """A sample as rank 0 announces it: its number, its first recorded step, and its pivot.

    step is counted from the start of the process. pivot: None for all ranks. is_capture: whether it
    was requested. ended: why there are
    no more samples; "" if this is one. overhead: the part of the training time that samples have
    cost so far; None before the first.
    """

    number: int
    step: int
    incarnation: int
    pivot: int | None = None
    interval_steps: int = 0
    overhead: float | None = None
    ended: str = ""
    is_capture: bool = False

    def format_json(self) -> str:
        """JSON on one line, as read by parse_next_sample."""
        return json.dumps(asdict(self))


def parse_next_sample(text: str) -> NextSample:
    """Parses an announced sample. Raises TypeError or ValueError if it is invalid."""
    return NextSample(**select_known_fields(NextSample, json.loads(text)))


def choose_pivot(mesh: Mesh, number: int) -> int:
    """The pivot of a sample: over the samples, the groups of the longest axis are visited in turn.

    Each visit takes another member of the group, so that every rank is the pivot at some time.
    """
    # Its groups are the fewest: after a visit of each, every rank has been in a sample.
    longest = max(mesh.axes, key=mesh.size)
    heads = [r for r in range(mesh.world_size) if mesh.coordinate(r, longest) == 0]
    members = mesh.line(heads[number % len(heads)], longest)
    return members[number // len(heads) % len(members)]


def list_cross(mesh: Mesh, pivot: int) -> frozenset[int]:
    """The pivot and all members of its groups on every axis of the mesh."""
    return frozenset(rank for axis in mesh.axes for rank in mesh.line(pivot, axis))


@dataclass(slots=True)
class ActiveSample:
    """The sample in progress: its profiler, and the times of the steps around it.

    window: None if this rank is not sampled, or its profiler has ended. groups and times are kept
    for the record, which is written by the background thread.
    """

    plan: NextSample
    number: int
    folder: Path
    is_sampled: bool
    before_ns: tuple[int, ...]
    unix_ns: int = 0
    window: TraceWindow | None = None
    under_ns: list[int] = field(default_factory=list)
    after_ns: list[int] = field(default_factory=list)
    own_ns: int = 0
    no_data: str = ""
    is_fault: bool = False
    groups: tuple[GroupInfo, ...] = ()
    has_trace: bool = False
