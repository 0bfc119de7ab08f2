"""Start, end and kind of each step of a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, compress, pairwise

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import group_ids, group_max
from stepsplit.analyzer.buckets import Kind
from stepsplit.analyzer.split.host_steps import (
    HostStep,
    MarkedSteps,
    count_optimizer_steps,
    find_unmarked_steps,
    read_marked_steps,
)
from stepsplit.analyzer.split.lost_work import (
    MIN_LOST_SHARE,
    collect_launches,
    find_lost_steps,
    find_torn_end_ns,
    note_lost_work,
    select_recorded,
)
from stepsplit.analyzer.split.rl_phases import has_rl_phases, list_phases_of_steps
from stepsplit.analyzer.trace import (
    DEVICE_CATEGORIES,
    RANGE_CODE,
    Bool,
    Category,
    Int64,
    Lack,
    Note,
    RankTrace,
    find_earlier_calls,
)


class StepWindow(Struct, frozen=True):
    """One step: its number, its kind, and its start and end on the rank's own clock in ns.

    host_ns: when the host worked on it, from the end of the mark before its own to the end of its
    own; None without ProfilerStep marks.
    """

    step: int
    kind: Kind
    start_ns: int
    end_ns: int
    host_ns: tuple[int, int] | None = None


class Steps(Struct, frozen=True):
    """The windows of a rank in order, without overlap and adjacent within a loop; notes list the
    assumptions made. shift was added to the numbers of the rank's own marks; marks is how many of
    them a step has, of which the last has its number."""

    windows: tuple[StepWindow, ...]
    notes: tuple[Note, ...]
    shift: int = 0
    marks: int = 1

    @property
    def counted(self) -> tuple[StepWindow, ...]:
        """The full steps, used for sums and medians; all steps if none is full."""
        return tuple(w for w in self.windows if w.kind == "full") or self.windows


class UsableRanks(Struct, frozen=True):
    """The traces that can be split and their steps; left_out has a note on each other rank."""

    traces: tuple[RankTrace, ...]
    steps: tuple[Steps, ...]
    left_out: tuple[Note, ...]


def select_usable_ranks(traces: Sequence[RankTrace]) -> UsableRanks:
    """Leaves out ranks without device data or without steps.

    Raises DataError if no rank has data.
    """
    recorded, left_out = select_recorded(traces)
    steps = find_steps_of_ranks(recorded)
    has_steps = [bool(one.windows) for one in steps]
    if not any(has_steps):
        return UsableRanks(recorded, tuple(steps), left_out)
    text = "no work of this rank lies in its marked steps: left out"
    empty = [
        Note("no_steps_on_rank", text, trace.rank, Lack.STEPS)
        for trace, usable in zip(recorded, has_steps, strict=True)
        if not usable
    ]
    return UsableRanks(
        tuple(compress(recorded, has_steps)),
        tuple(compress(steps, has_steps)),
        (*left_out, *empty),
    )


def find_steps_of_ranks(traces: Sequence[RankTrace]) -> list[Steps]:
    """Finds the steps of each rank.

    A rank whose steps are not found while those of another rank are has one partial step.
    """
    marked = [read_marked_steps(trace) for trace in traces]
    host = [one or find_unmarked_steps(trace) for one, trace in zip(marked, traces, strict=True)]
    found = [_build_steps(*one) for one in zip(traces, host, strict=True)]
    if all(one.whole for one in host):
        return found
    return [
        replace(steps, windows=tuple(replace(w, kind="partial") for w in steps.windows))
        if one.whole
        else steps
        for steps, one in zip(found, host, strict=True)
    ]


def _build_steps(trace: RankTrace, host: MarkedSteps) -> Steps:
    """The windows of the steps, with their kinds; empty ones are dropped with a note."""
    marked = host.steps
    if host.whole or not trace.on_device:
        windows = _build_host_windows(marked, host.restarts)
    else:
        windows = _build_device_windows(trace, marked, host.restarts)
    kinds = _classify_steps(trace, marked)
    windows = [
        replace(w, kind=k) if w.kind == "full" else w for w, k in zip(windows, kinds, strict=True)
    ]
    ends = [step for step in (trace.device_stopped_step, trace.end_step) if step is not None]
    if ends:
        windows = [replace(w, kind="partial") if w.step >= min(ends) else w for w in windows]
    if any(note.lack is Lack.FILE for note in trace.notes):
        torn_ns = find_torn_end_ns(trace.events)
        windows = [replace(w, kind="partial") if w.end_ns >= torn_ns else w for w in windows]
    windows = [replace(w, kind="partial") if w.step in host.partial else w for w in windows]
    notes = [*host.notes]
    if not host.whole and marked[-1].step not in host.partial and _is_torn(trace, marked):
        torn = marked[-1].step
        windows = [replace(w, kind="partial") if w.step == torn else w for w in windows]
        notes.append(Note("step_torn", _TORN_TEXT.format(torn), trace.rank))
    if host.by_profiler:
        spans = _build_host_windows(marked, host.restarts)
        windows = [
            replace(w, host_ns=(span.start_ns, span.end_ns))
            for w, span in zip(windows, spans, strict=True)
        ]
    if trace.on_device:
        windows, lost = _mark_lost_work(trace, marked, windows)
        notes += [*lost, *_note_several_devices(trace), *_note_no_launches(trace)]
    notes += [
        Note("empty_step", f"step {w.step} is empty and was dropped", trace.rank)
        for w in windows
        if w.end_ns <= w.start_ns
    ]
    windows = [w for w in windows if w.end_ns > w.start_ns]
    notes += _note_between_loops(trace.rank, windows)
    return Steps(tuple(windows), tuple(notes), marks=host.marks)


def _note_between_loops(rank: int, windows: Sequence[StepWindow]) -> list[Note]:
    """A note on the time that is of no step: no mark of a loop contains it, such as that of an
    evaluation between two epochs that are profiled."""
    apart = {w.step: w.start_ns - b.end_ns for b, w in pairwise(windows) if w.start_ns > b.end_ns}
    if not apart:
        return []
    spent_ns = sum(apart.values())
    share = units.format_percent(spent_ns / (windows[-1].end_ns - windows[0].start_ns))
    text = (
        f"what ran before step {units.format_number_list(list(apart))}, outside of the marks of a"
        f" loop, is of no step: {units.format_milliseconds(spent_ns)}, {share} of the time from the"
        " first step to the last"
    )
    return [Note("between_loops", text, rank)]


_TORN_TEXT = "step {} has no optimizer step, as where a rank ends in it: partial"

_MIN_STEPPED = 2


def _is_torn(trace: RankTrace, marked: Sequence[HostStep]) -> bool:
    """Whether the last step alone has no optimizer step: the job crashed or stopped in it."""
    count = count_optimizer_steps(trace, marked)
    return len(marked) > _MIN_STEPPED and bool(count[:-1].all()) and not count[-1]


def _note_several_devices(trace: RankTrace) -> list[Note]:
    """A note if the process computes on more than one device."""
    events = trace.events
    lanes = np.unique(events.lane[trace.kinds.computes]).tolist()
    devices = sorted({events.lanes[lane].device for lane in lanes} - {-1})
    if len(devices) < 2:
        return []
    text = (
        f"the process computes on devices {', '.join(map(str, devices))}: time in which any of "
        "them computes counts as compute; with one process per device each is split by itself"
    )
    return [Note("several_devices", text, trace.rank)]


def _note_no_launches(trace: RankTrace) -> list[Note]:
    """A note if the trace says of no device event when it was launched."""
    device = np.flatnonzero(trace.events.is_category(*DEVICE_CATEGORIES))
    if (trace.events.find_launch_ns(device) >= 0).any():
        return []
    text = (
        "the trace has no launches: each kernel counts to the step in which it starts, which is a"
        " later one where the host runs ahead; keep the events of category cuda_runtime"
    )
    return [Note("no_launches", text, trace.rank)]


def _mark_lost_work(
    trace: RankTrace, marked: Sequence[HostStep], windows: Sequence[StepWindow]
) -> tuple[list[StepWindow], list[Note]]:
    """Marks steps whose device work was lost by the profiler as partial."""
    launches = collect_launches(trace.events)
    cut = find_lost_steps(launches, trace.events, [step.start_ns for step in marked])
    # Whether whole steps lack work, or only those that are partial for it.
    step = np.searchsorted([one.start_ns for one in marked], launches.start_ns, side="right") - 1
    in_whole = ~launches.has_work & ~np.append(cut, True)[step]
    lack = Lack.KERNELS if in_whole.sum() > MIN_LOST_SHARE * len(step) else Lack.DEVICE_END
    notes = list(note_lost_work(launches, trace.events, trace.rank, lack))
    partial: list[StepWindow] = [
        replace(w, kind="partial") if is_cut else w
        for w, is_cut in zip(windows, cut.tolist(), strict=True)
    ]
    numbers = [w.step for w in compress(windows, cut.tolist()) if w.end_ns > w.start_ns]
    if numbers:
        listed = units.format_number_list(numbers)
        text = f"the profiler lost device work of step {listed}: partial"
        notes.append(Note("device_work_cut", text, trace.rank, Lack.DEVICE_END))
    return partial, notes


def _build_host_windows(
    marked: Sequence[HostStep], restarts: Sequence[int] = ()
) -> list[StepWindow]:
    """Each window runs from the end of the previous step to its own, even if the marks overlap; the
    first step of another loop (restarts) from its own start."""
    edges = [marked[0].start_ns, *accumulate((step.end_ns for step in marked), max)]
    return [
        StepWindow(
            step.step, "full", max(start, step.start_ns) if step.step in restarts else start, end
        )
        for step, (start, end) in zip(marked, pairwise(edges), strict=True)
    ]


def _build_device_windows(
    trace: RankTrace, marked: Sequence[HostStep], restarts: Sequence[int] = ()
) -> list[StepWindow]:
    """Windows on the device: a step ends with the last kernel that it launched on a main compute
    stream, or with its mark on the host if that ends later: an optimizer on the CPU or a checkpoint
    belongs to the step that does it. The first step of another loop (restarts) begins with its
    mark.

    A mark behind which nothing was launched has only the time of its host; as the last one it is
    empty, for prof.stop() closes one.
    """
    events = trace.events
    device = np.flatnonzero(events.is_category(*DEVICE_CATEGORIES))
    launched = events.find_launch_ns(device)
    launched = np.where(launched < 0, events.start_ns[device], launched)
    ends = events.ends_of(device)
    main = is_on_main_stream(trace, device)
    step_of = np.searchsorted([step.start_ns for step in marked], launched, side="right") - 1
    step_of[events.is_launched_before(device)] = -1
    earlier = ends[step_of < 0]
    host_start = marked[0].start_ns
    start = int(earlier.max()) if len(earlier) else host_start
    limit = np.array([step.end_ns for step in marked], dtype=np.int64)
    own = np.where(main & (launched < limit[step_of]), step_of, -1)
    latest = group_max(own, ends, len(marked)).tolist()
    windows: list[StepWindow] = []
    for i, (step, last) in enumerate(zip(marked, latest, strict=True)):
        if step.step in restarts:
            start = max(start, step.start_ns)
        has_work = last > start
        # Marks that lie elsewhere than all work are empty.
        is_timed = has_work or (max(latest) > step.start_ns and i < len(marked) - 1)
        is_timed &= step.is_end_known
        end = max(start, last, step.end_ns if is_timed else start)
        kind: Kind = "partial" if i == 0 and start > host_start else "full"
        windows.append(StepWindow(step.step, kind if has_work else "other", start, end))
        start = end
    return windows


_MAIN_SHARE = 0.1
"""A stream with this share of the compute of the busiest one is a main compute stream."""


def is_on_main_stream(trace: RankTrace, device: Int64) -> Bool:
    """Whether each device event (given by row) is a kernel on a main compute stream: on the stream
    with the most compute, or on one with a tenth of it, on any device of the process.

    True for all events if no kernel computes.
    """
    events = trace.events
    computes = trace.kinds.computes
    busy = np.bincount(
        events.lane[computes], weights=events.dur_ns[computes], minlength=len(events.lanes)
    )
    if not busy.max(initial=0.0):
        return np.ones(len(device), dtype=np.bool_)
    kernel = events.is_category(Category.KERNEL)[device]
    return np.asarray(kernel & (busy >= _MAIN_SHARE * busy.max())[events.lane[device]])


def _classify_steps(trace: RankTrace, marked: Sequence[HostStep]) -> list[Kind]:
    """The kind of each step: full for the usual communication sequence, other for the rest.

    A call belongs to the step in which the host issued it, because step boundaries shift on the
    device; one that was issued between two marks to the later step, whose window it lies in. What
    was issued before the recording, of which the device may still run whole steps, is of none.
    """
    calls = trace.calls
    when = np.where(calls.issued_ns >= 0, calls.issued_ns, trace.events.start_ns[calls.event])
    begins = [marked[0].start_ns, *accumulate((step.end_ns for step in marked[:-1]), max)]
    step_of = np.searchsorted(begins, when, side="right") - 1
    step_of[find_earlier_calls(trace)] = -1
    counts = _count_calls(trace, step_of, len(marked))
    signatures = _build_signatures(trace, step_of, when, counts)
    usual = _find_usual(signatures, counts, count_optimizer_steps(trace, marked))
    is_usual = [usual in (None, signature) for signature in signatures]
    if has_rl_phases(trace):
        # The steps of RL differ, by the length of what is generated and by what is logged: those of
        # the usual phases are of one kind.
        phases = list_phases_of_steps(trace, begins)
        ((most, _),) = Counter(phases).most_common(1)
        is_usual = [
            is_one or (bool(own) and own == most)
            for own, is_one in zip(phases, is_usual, strict=True)
        ]
    return ["full" if is_one else "other" for is_one in is_usual]


def _find_usual(signatures: Sequence[bytes], counts: Int64, stepped: Int64) -> bytes | None:
    """The signature of most steps; or of about as many as any other, at least two and a third of
    them, if the rest have the same calls and more, as those of an evaluation; None if there is
    none.

    Of a loop that evaluates in every second step either kind may be recorded once more often.
    """
    ranked = Counter(signatures).most_common()
    most = ranked[0][1]
    for signature, count in ranked:
        at = signatures.index(signature)
        are_more = bool((counts >= counts[at]).all()) and counts[at].any()
        # A step without an optimizer, where others have one, is cut off or skipped.
        is_whole = bool(stepped[at]) or not stepped.any()
        is_frequent = count >= max(most - 1, _MIN_USUAL) and 3 * count >= len(signatures)
        if is_frequent and are_more and is_whole:
            return signature
    return ranked[0][0] if 2 * most > len(signatures) else None


_MIN_USUAL = 2


def _count_calls(trace: RankTrace, step_of: Int64, steps: int) -> Int64:
    """The number of calls by step, and by group and op; if a group is unknown by op alone, as far
    as the range of an open call of gloo shows it."""
    calls = trace.calls
    op = calls.op.astype(np.int64)
    of_op = group_ids(calls.group_id, op) if _all_grouped(trace) else RANGE_CODE[op]
    kinds = int(of_op.max(initial=-1)) + 1
    cells = (step_of * kinds + of_op)[step_of >= 0]
    return np.bincount(cells, minlength=steps * kinds).reshape(steps, kinds)


def _build_signatures(trace: RankTrace, step_of: Int64, when: Int64, counts: Int64) -> list[bytes]:
    """The sequence of (group, op) of each step, in issue order within each group.

    The order of calls whose group is unknown, such as those of gloo that no op is paired with, is
    that of the threads that ran them: then it is the number of calls of each op.
    """
    if not _all_grouped(trace):
        return [row.tobytes() for row in counts]
    calls = trace.calls
    rows = np.lexsort((when, calls.group_id, step_of))
    pairs = np.stack((calls.group_id[rows], calls.op[rows].astype(np.int32)), axis=1)
    edges = np.searchsorted(step_of[rows], np.arange(len(counts) + 1)).tolist()
    return [pairs[low:high].tobytes() for low, high in pairwise(edges)]


def _all_grouped(trace: RankTrace) -> bool:
    """Whether the groups of all calls are known."""
    return bool((trace.calls.group_id >= 0).all())
