"""Launches, and device work that is missing or lost."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer import units
from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.trace import (
    DEVICE_CATEGORIES,
    UNKNOWN_CATEGORIES,
    Bool,
    Category,
    Events,
    Int64,
    Lack,
    Note,
    RankTrace,
    find_timeless,
)

_LAUNCH = re.compile(r"launch(?!host)|memcpy", re.I)
"""Kernel, graph and copy launches of CUDA, HIP, SYCL and Level Zero; fills of no bytes are not
recorded on the device, host functions never."""

_BEGIN_CAPTURE, _END_CAPTURE = re.compile("StreamBeginCapture"), re.compile("StreamEndCapture")

_MIN_WORKED_SHARE = 0.05
"""With fewer launches whose work was recorded, the device's activity was not recorded."""


class Launches(Struct, frozen=True):
    """The launches of a rank by start, except those captured into a CUDA graph.

    A launch that the runtime passes on to the driver is one launch. has_work says whether a device
    event with the launch's correlation was recorded. exported_lost is the number of device events
    that were recorded without a time.
    """

    start_ns: Int64
    has_work: Bool
    exported_lost: int = 0

    @property
    def lost(self) -> int:
        """Number of launches whose device work was not recorded."""
        return int((~self.has_work).sum())


def collect_launches(events: Events) -> Launches:
    """The launches of a rank, and which of them led to device work.

    A call lies within another on its thread if its middle does: of calls that follow each other,
    the first may seem to end after the start of the second, by the resolution of the clock.
    """
    runtime = events.is_category(Category.RUNTIME)
    rows = np.flatnonzero(runtime & events.match_names(_LAUNCH))
    # While a graph is captured nothing runs: its kernels do so in the launches of the graph.
    captures = [
        events.start_ns[runtime & events.match_names(edge)]
        for edge in (_BEGIN_CAPTURE, _END_CAPTURE)
    ]
    opened, closed = (
        np.searchsorted(edge, events.start_ns[rows], side="right") for edge in captures
    )
    rows = rows[opened <= closed]
    device = np.sort(events.correlation[events.is_category(*DEVICE_CATEGORIES)], kind="stable")
    wanted = events.correlation[rows]
    at = np.searchsorted(device, wanted)
    has_work = (wanted >= 0) & (np.append(device, -1)[at] == wanted)
    timeless = find_timeless(events)
    exported_lost = int(timeless.sum())
    if exported_lost:
        has_work &= ~np.isin(wanted, events.correlation[timeless])
    order = np.lexsort((events.start_ns[rows], events.lane[rows]))
    rows, has_work = rows[order], has_work[order]
    if not len(rows):
        return Launches(events.start_ns[rows], has_work, exported_lost)
    start, end, lane = events.start_ns[rows], events.ends_of(rows), events.lane[rows]
    # Lanes are placed one after the other, so that one running maximum serves all of them.
    shift = lane.astype(np.int64) * (int(end.max()) + 1)
    reached = np.maximum.accumulate(end + shift)
    is_outer = np.ones(len(rows), dtype=np.bool_)
    is_outer[1:] = (start + (end - start) // 2 + shift)[1:] >= reached[:-1]
    first = np.flatnonzero(is_outer)
    merged = np.logical_or.reduceat(has_work, first)
    by_start = np.argsort(start[first], kind="stable")
    return Launches(start[first][by_start], merged[by_start], exported_lost)


# Ranks whose device activity was not recorded: they cannot be split.

_DEVICE_BACKENDS = ("nccl", "rccl", "hccl", "xccl", "mccl", "cncl", "eccl")

_RECORD_DEVICE = (
    "record with ProfilerActivity.CUDA, and without another profiler (nsys, DCGM) on the device"
)

_NO_DEVICE_DATA = "device activity was not recorded"

_NO_WORK = "no op and no device event with a duration was recorded"

_RECORD_WORK = "name a torch.profiler trace that contains the work of its steps"


def select_recorded(
    traces: Sequence[RankTrace],
) -> tuple[tuple[RankTrace, ...], tuple[Note, ...]]:
    """The traces that show where the time of their rank went, and a note on each other one.

    A job uses a device if one of its ranks has device events, launches or a backend for devices;
    then a rank without device events is left out, for its ops only show when it launched work.

    In a CPU run, the device that a trace names was not used: a note says so, and it is dropped.

    Raises DataError if no trace is left.
    """
    uses_device = any(
        trace.on_device
        or _has_device_backend(trace)
        or len(collect_launches(trace.events).start_ns) > 0
        for trace in traces
    )
    problems = [_find_problem(trace, uses_device=uses_device) for trace in traces]
    recorded = tuple(t for t, problem in zip(traces, problems, strict=True) if not problem)
    if not recorded:
        first, others = traces[0], len(traces) - 1
        also = f" (nor on {others:,} other ranks)" if others else ""
        hint = _RECORD_DEVICE if problems[0].startswith(_NO_DEVICE_DATA) else _RECORD_WORK
        raise DataError(first.source, problems[0] + also, hint, first.rank)
    notes = [
        Note("no_device_data", f"{problem}: left out", trace.rank, Lack.NO_DEVICE)
        for trace, problem in zip(traces, problems, strict=True)
        if problem
    ]
    if any(trace.on_device for trace in recorded):
        return recorded, tuple(notes)
    text = "the machine has {}, but nothing was launched on it: analyzed as a CPU run"
    notes += [
        Note("device_unused", text.format(trace.device), trace.rank)
        for trace in recorded
        if trace.device
    ]
    return tuple(replace(trace, device="") for trace in recorded), tuple(notes)


def _find_problem(trace: RankTrace, *, uses_device: bool) -> str:
    """Why a trace cannot be split: its device activity or all of its work is missing; "" if it
    can. uses_device: the job does."""
    events = trace.events
    device = int(events.is_category(*DEVICE_CATEGORIES).sum())
    calls = int(events.is_category(Category.RUNTIME).sum())
    # There are no more launches than calls of the runtime: usually they need not be counted.
    if uses_device and (not device or device < _MIN_WORKED_SHARE * calls):
        launches = collect_launches(events)
        count = len(launches.start_ns)
        seen = max(int(launches.has_work.sum()), device)
        if not seen or seen < _MIN_WORKED_SHARE * count:
            if count:
                found = f"only {seen:,}" if seen else "none"
                return f"{_NO_DEVICE_DATA}: {found} of {count:,} launches led to a kernel"
            has_backend = _has_device_backend(trace)
            evidence = f" (backend {trace.backend or 'nccl'})" if has_backend else ""
            return f"{_NO_DEVICE_DATA}: no launch and no device event{evidence}"
    work = events.is_category(Category.OP, *DEVICE_CATEGORIES)
    work[trace.calls.event] = True
    if (work & (events.dur_ns > 0)).any():
        return ""
    foreign = [note.message for note in trace.notes if note.code == UNKNOWN_CATEGORIES]
    return foreign[0] if foreign else f"{_NO_WORK} ({len(events):,} other events)"


def _has_device_backend(trace: RankTrace) -> bool:
    return trace.backend in _DEVICE_BACKENDS or bool(trace.events.match_prefix("nccl:").any())


# Device work that was lost within a recording: the profiler's buffers were full, or it was ended.

_MIN_LOST, MIN_LOST_SHARE = 10, 0.02
"""Fewer lost launches are not reported."""

_CUT_SHARE, _MOSTLY_LOST_SHARE = 0.05, 0.5
"""A step is incomplete if this share of its launches is lost at the end of the recording, or
anywhere; the first one anywhere if the trace has the lost work without a time."""


_SILENT_SHARE, _MIN_STEPS_BEFORE = 0.2, 3
"""A step is incomplete if this share of its ops, beyond that of at least two steps before it,
follows its last launch."""


def find_lost_steps(launches: Launches, events: Events, starts_ns: Sequence[int]) -> Bool:
    """Which steps lack so much device work that their split is incomplete.

    The device work of launches is missing at the end of the recording or mostly, or the ops go on
    without launches: the profiler has stopped recording the device and its runtime. starts_ns are
    the host starts of the steps; the last one ends with the recording.
    """
    is_cut = np.zeros(len(starts_ns), dtype=np.bool_)
    starts = np.array(starts_ns)
    step = np.searchsorted(starts, launches.start_ns, side="right") - 1
    worked = np.flatnonzero(launches.has_work)
    if not len(worked) or not _has_reliable_correlations(launches, events):
        return is_cut
    inside, lost = step >= 0, ~launches.has_work
    in_tail = inside & (np.arange(len(lost)) > worked[-1])
    total, missing, at_end = (
        np.bincount(step[mask], minlength=len(starts_ns))
        for mask in (inside, inside & lost, in_tail)
    )
    # Launches may have no device work for other reasons, unless it was recorded without a time.
    most = _CUT_SHARE if launches.exported_lost else _MOSTLY_LOST_SHARE
    is_cut |= (at_end > _CUT_SHARE * total) | (missing > most * total)
    # Whether the last step with launches goes on with ops after them, unlike the steps before. Ops
    # that those do not have, as of a checkpoint or an optimizer on the CPU, may launch nothing.
    last = int(step[worked[-1]])
    ops = np.flatnonzero(events.is_category(Category.OP))
    step_of_op = np.searchsorted(starts, events.start_ns[ops], side="right") - 1
    is_known = np.isin(events.name_id[ops], events.name_id[ops[step_of_op < last]])
    ops_ns, step_of_op = events.start_ns[ops[is_known]], step_of_op[is_known]
    shares = []
    for number in range(last + 1):
        own, launched = ops_ns[step_of_op == number], launches.start_ns[step == number]
        if len(own) and len(launched):
            shares.append(float((own > launched[-1]).mean()))
    if len(shares) >= _MIN_STEPS_BEFORE:
        is_cut[last] |= shares[-1] > _SILENT_SHARE + float(np.median(shares[:-1]))
    return is_cut


def find_torn_end_ns(events: Events) -> int:
    """The time from which a truncated file may lack events: the first at which one of its threads
    or streams has no more of them.

    A profiler writes one thread after the other, and a stream after its launches, so that the end
    of a file is no end in time.
    """
    kind = np.full(len(Category), -1, dtype=np.int64)
    kind[[Category.OP, Category.RUNTIME]] = 0, 1
    kind[list(DEVICE_CATEGORIES)] = 2
    of_row = kind[events.category]
    rows = np.flatnonzero(of_row >= 0)
    if not len(rows):
        return 0
    label = events.lane[rows].astype(np.int64) * 3 + of_row[rows]
    ends = np.full(3 * len(events.lanes), -1, dtype=np.int64)
    np.maximum.at(ends, label, events.ends_of(rows))
    by_lane = ends.reshape(-1, 3)
    # A thread with ops whose launches are all missing, unlike those of another thread.
    begins = np.full(len(events.lanes), np.iinfo(np.int64).max)
    np.minimum.at(begins, events.lane[rows], events.start_ns[rows])
    is_silent = (by_lane[:, 0] >= 0) & (by_lane[:, 1] < 0) & bool((by_lane[:, 1] >= 0).any())
    return int(min(ends[ends >= 0].min(), begins[is_silent].min(initial=np.iinfo(np.int64).max)))


def note_lost_work(launches: Launches, events: Events, rank: int, lack: Lack) -> tuple[Note, ...]:
    """A note with the number of launches whose device work is missing, if it is high."""
    total, lost = len(launches.start_ns), launches.lost
    least = 1 if launches.exported_lost else max(_MIN_LOST, MIN_LOST_SHARE * total)
    if lost < least:
        return ()
    if not _has_reliable_correlations(launches, events):
        return ()
    share = units.format_percent(lost / total)
    text = f"{lost:,} of {total:,} launches ({share}) have no device event: the profiler lost them,"
    return (Note("device_work_lost", f"{text} and their time counts as idle", rank, lack),)


def _has_reliable_correlations(launches: Launches, events: Events) -> bool:
    """Whether lost launches are lost work, and not work under another correlation."""
    device = np.flatnonzero(events.is_category(*DEVICE_CATEGORIES))
    unmatched = int((events.find_launches(device) < 0).sum())
    return not launches.lost or unmatched < launches.lost
