"""What one rank does in its full steps, as far as it tells how the job is parallel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.arrays import inside
from stepsplit.analyzer.split.mesh.group_usage import SCALAR_BYTES
from stepsplit.analyzer.split.mesh.layout import Layout
from stepsplit.analyzer.split.steps import Steps
from stepsplit.analyzer.split.strategy.issued import (
    HostSteps,
    host_steps,
    issued_ns,
    whole_trace,
)
from stepsplit.analyzer.split.strategy.landmarks import (
    Landmarks,
    landmarks_of,
    spans_of,
)
from stepsplit.analyzer.split.strategy.passes import FORWARD, Passes, passes_of
from stepsplit.analyzer.trace import OP_CODE, OPS, Bool, Group, Int64, RankTrace

Counts = npt.NDArray[np.float64]
CALL, BACKWARD_BEGINS = "X", "|"
_SHARDS = ("FSDP::", "FullyShardedDataParallel._")
"""What PyTorch's fully sharded data parallelism marks its own gathers and sums with."""
_REDUCES = [OP_CODE[op] for op in ("all_reduce", "reduce_scatter", "reduce")]


@dataclass(frozen=True, slots=True)
class Seen:
    """A rank's calls in its full steps, a row each in the order of the trace's; columns of one
    length. part is passes.FORWARD, BACKWARD or AFTER, -1 unknown; shards: FSDP made the call."""

    trace: RankTrace
    layout: Layout
    steps: HostSteps
    marks: Landmarks
    passes: Passes
    row: Int64
    when: Int64
    part: Int64
    shards: Bool

    @property
    def op(self) -> Int64:
        return self.trace.calls.op[self.row].astype(np.int64)

    @property
    def group(self) -> Int64:
        return self.trace.calls.group_id[self.row].astype(np.int64)

    @property
    def message_bytes(self) -> Int64:
        return self.trace.calls.message_bytes[self.row]

    @property
    def is_tensor(self) -> Bool:
        """Which calls may move tensors, not losses, norms or flags."""
        size = self.message_bytes
        return (size < 0) | (size > SCALAR_BYTES)

    def of(self, *ops: str) -> Bool:
        """Which calls are of one of these ops."""
        return np.isin(self.op, [OP_CODE[op] for op in ops])

    def on(self, group: Group) -> Bool:
        """Which calls are made on that group."""
        ids = [i for i, one in enumerate(self.trace.groups) if one == group]
        return np.isin(self.group, ids)

    def groups(self) -> list[Group]:
        """The groups of more than one rank on which the rank calls anything."""
        used = sorted(set(self.group[self.group >= 0].tolist()))
        found = dict.fromkeys(self.trace.groups[i] for i in used)
        return [group for group in found if len(group.ranks) > 1]

    def counts(self, mask: Bool) -> Counts:
        """How many of these calls a step makes, shape (parts, ops)."""
        return self._per_step(mask, None)

    def bytes_of(self, mask: Bool) -> Counts:
        """How many bytes these calls move a step, shape (parts, ops)."""
        return self._per_step(mask, np.maximum(self.message_bytes, 0))

    def _per_step(self, mask: Bool, weights: Int64 | None) -> Counts:
        mask = mask & (self.part >= 0)
        place = self.part[mask] * len(OPS) + self.op[mask]
        each = None if weights is None else weights[mask]
        size = 3 * len(OPS)
        return np.bincount(place, each, size).reshape(3, len(OPS)) / max(1, len(self.steps))

    def story(self, mask: Bool) -> str:
        """The forward work of all steps as letters: X for each of these calls that is made in a
        forward, those of landmarks, and | where a backward begins."""
        mask = mask & (self.part == FORWARD)
        marks = self.marks.outside & (self.steps.at(self.marks.start_ns) >= 0)
        called, begins = self.when[mask], self.passes.start_ns
        when = np.concatenate((self.marks.start_ns[marks], called, begins))
        letter = np.concatenate((
            self.marks.letter[marks],
            np.full(len(called), ord(CALL)),
            np.full(len(begins), ord(BACKWARD_BEGINS)),
        ))  # fmt: skip
        letters = letter[np.argsort(when, kind="stable")].astype(np.uint8)
        return letters.tobytes().decode("ascii")


def seen_of(trace: RankTrace, windows: Steps, leads: Bool, layout: Layout) -> Seen:
    """What the rank does; leads marks the first row of each of its calls."""
    steps, marks = host_steps(trace, windows), landmarks_of(trace.events)
    steps = whole_trace(trace) if steps.on_device else steps
    when, passes = issued_ns(trace, steps), passes_of(marks, steps)
    row = np.flatnonzero(leads & (steps.at(when) >= 0))
    when = when[row]
    ends = np.isin(trace.calls.op[row], _REDUCES) | inside(marks.optimizer, when)
    return Seen(
        trace=trace,
        layout=layout,
        steps=steps,
        marks=marks,
        passes=passes,
        row=row,
        when=when,
        part=passes.part_of(when, steps, ends),
        shards=inside(spans_of(trace.events, *_SHARDS), when),
    )


def once_each(story: str) -> str:
    """The story with each letter once where it stands several times in a row."""
    letters = np.frombuffer(story.encode("ascii"), dtype=np.uint8)
    new = np.ones(len(letters), dtype=np.bool_)
    new[1:] = letters[1:] != letters[:-1]
    return letters[new].tobytes().decode("ascii")
