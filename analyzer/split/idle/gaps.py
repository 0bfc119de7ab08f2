"""Which part of a gap, in which nothing runs, has which cause (idle.IdleCause explains them)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np

from stepsplit.analyzer.arrays import Intervals, meet
from stepsplit.analyzer.split.idle.starts import (
    NEVER,
    Starts,
    Waits,
    starts_of,
    waiting_calls,
    waits_of,
)
from stepsplit.analyzer.split.idle.teams import Team, team_of, threads_of
from stepsplit.analyzer.split.idle.threads import ALLOCATES, Doing, first, named
from stepsplit.analyzer.trace import Events, Int64, RankTrace, UInt8

CAUSES = (
    "data_loading",
    "allocation",
    "synchronize",
    "launch_bound",
    "python",
    "launch_latency",
    "dependency",
    "late_start",
    "other",
    "unknown",
)
_CODE = {cause: code for code, cause in enumerate(CAUSES)}
_QUEUED_NS, _LAUNCHED_NS = 30_000, 100_000
"""The longest that a device takes from one event to the next, and from a launch to its start.

Seen in traces: 1 to 2 us and 2 to 5 us on NVIDIA, up to 30 us and 85 us on MI300X.
"""
_EVER = (np.iinfo(np.int64).min, np.iinfo(np.int64).max)
_OF_DOING = {
    Doing.LOADING: "data_loading",
    Doing.ALLOCATING: "allocation",
    Doing.SYNCHRONIZING: "synchronize",
    Doing.NO_OP: "python",
    Doing.UNTOLD: "unknown",
}


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of gaps, each with its cause (of CAUSES) and the row that names it, -1 for none."""

    gap: Int64
    start_ns: Int64
    end_ns: Int64
    cause: UInt8
    row: Int64


def explained(trace: RankTrace, gaps: Intervals) -> Parts:
    """The parts of these gaps, which fill them; not in order."""
    parts = list((_of_device if trace.on_device else _of_host)(trace.events, gaps))
    columns = (np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Parts))
    return Parts(*columns)


def _of_host(events: Events, gaps: Intervals) -> Iterable[Parts]:
    """On a CPU run: what the thread that trains did."""
    threads = threads_of(events)
    team = team_of(events, threads, threads.main)
    yield _of_team(gaps, np.arange(len(gaps)), team, "other")


def _of_device(events: Events, gaps: Intervals) -> Iterable[Parts]:
    threads = threads_of(events)
    starts, waiting = starts_of(events, gaps, threads), waiting_calls(events)
    host_end = np.clip(starts.returned_ns, gaps.start_ns, gaps.end_ns)
    told = starts.returned_ns < NEVER
    hosts = told & (host_end > gaps.start_ns)
    for thread in np.unique(starts.thread[hosts]).tolist():
        rows = np.flatnonzero(hosts & (starts.thread == thread))
        host = Intervals(gaps.start_ns[rows], host_end[rows])
        of_team = np.isin(threads.of_lane[events.lane], threads.team(thread))
        waits = waits_of(events, host.start_ns, starts.launch[rows], of_team, waiting)
        team = team_of(events, threads, thread)
        waited_end = np.minimum(host.start_ns + waits.waited_ns, host.end_ns)
        waited = Intervals(host.start_ns, waited_end)
        found = _of_team(waited, rows, team, "launch_bound")
        yield _waited(events, found, waits, rows, team)
        yield _of_team(Intervals(waited_end, host.end_ns), rows, team, "launch_bound")
    yield _of_start(gaps, host_end, starts)


def _waited(events: Events, found: Parts, waits: Waits, gaps: Int64, team: Team) -> Parts:
    """The parts of a gap that a wait made late, save where something more telling ran."""
    of_gap = np.searchsorted(gaps, found.gap)
    wait = waits.row[of_gap]
    allocates = named(events, ALLOCATES)[wait]
    told = np.isin(found.cause, (_CODE["data_loading"], _CODE["allocation"]))
    cause = np.where(allocates, _CODE["allocation"], _CODE["synchronize"])
    row = np.full(len(wait), -1, dtype=np.int64)
    for thread in team.threads:
        row = first(row, thread.around(wait))
    return replace(
        found,
        cause=np.where(told, found.cause, cause).astype(np.uint8),
        row=np.where(told, found.row, row),
    )


def _of_team(times: Intervals, gaps: Int64, team: Team, busy: str) -> Parts:
    """What the threads did in these times; busy is the cause where they worked."""
    edges = np.concatenate(([_EVER[0]], team.edges_ns, [_EVER[1]]))
    cut = meet(times, Intervals(edges[:-1], edges[1:]))
    doing, row = team.doing_at(cut.start_ns)
    cause = np.array([_CODE[_OF_DOING.get(d, busy)] for d in Doing], dtype=np.uint8)[doing]
    return Parts(gaps[cut.left], cut.start_ns, cut.end_ns, cause, row)


def _of_start(gaps: Intervals, host_end_ns: Int64, starts: Starts) -> Parts:
    """From the launch to the start, or from the event before if the launch was earlier."""
    told = starts.returned_ns < NEVER
    rows = np.flatnonzero(~told | (host_end_ns < gaps.end_ns))
    start, end = np.where(told, host_end_ns, gaps.start_ns)[rows], gaps.end_ns[rows]
    soon = (end - start <= _QUEUED_NS) | (end - starts.returned_ns[rows] <= _LAUNCHED_NS)
    cases = [~told[rows], soon, starts.ordered[rows]]
    codes = [_CODE["unknown"], _CODE["launch_latency"], _CODE["dependency"]]
    cause = np.select(cases, codes, _CODE["late_start"]).astype(np.uint8)
    names = [np.full(len(rows), -1), starts.launch[rows]]
    return Parts(rows, start, end, cause, np.select(cases[:2], names, starts.row[rows]))
