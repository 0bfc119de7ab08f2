"""What each instant of a run hung on: the graph that a replay runs through."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.trace import Int64

NEVER = -(1 << 61)
"""The time of what does not happen: nothing waits for it."""
WORK = ("compute", "copy", "idle")
"""What a rank does of its own, the columns of Graph.work_ns."""
Needs = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Mains:
    """The nodes of the ranks' own time lines: rank i has those from first[i] to first[i + 1]."""

    first: Int64

    def of_rank(self, index: int) -> slice:
        """The nodes of one rank, in order of time."""
        return slice(int(self.first[index]), int(self.first[index + 1]))


@dataclass(frozen=True, slots=True)
class Kernels:
    """The collectives and messages as they ran, a row each event of a rank; columns of one length.

    rank indexes the ranks of the split; call is the first of the rank's calls that the event holds
    and row that call's row among all; start, end are nodes: its arrival and its end.
    resume is the node of the rank's own time line that waited for it, -1 where none did; step is
    the row of the steps in which it began.
    """

    rank: Int64
    call: Int64
    row: Int64
    start: Int64
    end: Int64
    resume: Int64
    step: Int64

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, slots=True)
class StepEdges:
    """The steps of all ranks; begin and end are nodes. Columns of one length.

    rank indexes the ranks of the split, full says whether the step counts.
    """

    rank: Int64
    step: Int64
    full: np.ndarray[tuple[int], np.dtype[np.bool_]]
    begin: Int64
    end: Int64


@dataclass(frozen=True, slots=True)
class Graph:
    """The run's instants, and what each waits for.

    A node is an instant of a rank's own time line, the arrival at a call, its meeting or its end.
    It comes rest_ns after the latest of what it needs and of before (the node on the same time line
    before it, -1 for none) with the work between, work_ns of shape (nodes, WORK). step is the row
    of steps in which a node's work was, -1 elsewhere. order names each node after all that it
    needs. With nothing changed a replay gives the measured times.
    """

    before: Int64
    work_ns: Int64
    step: Int64
    needs: Needs
    rest_ns: Int64
    order: Int64
    mains: Mains
    kernels: Kernels
    steps: StepEdges

    def __len__(self) -> int:
        return len(self.before)
