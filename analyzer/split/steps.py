"""Steps: start and end of each step on a rank, and which steps of different ranks correspond."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress, pairwise

import numpy as np
from msgspec import Struct

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import group_ids, group_max, list_distinct
from stepsplit.analyzer.buckets import BUCKETS, WAITS, Kind, StepSplit
from stepsplit.analyzer.significance import SIGMA_OF_MAD
from stepsplit.analyzer.split.classify import (
    collect_launches,
    find_lost_steps,
    note_lost_work,
    select_recorded,
)
from stepsplit.analyzer.split.matching import MatchedCalls
from stepsplit.analyzer.trace import (
    DEVICE_CATEGORIES,
    Bool,
    Category,
    Events,
    Int64,
    Note,
    RankTrace,
)

# Steps of a rank on the host: marked, named by ranges, inferred from what repeats, or one.


# ProfilerStep marks, else numbered ranges.

STEP = re.compile(r"ProfilerStep#(\d{1,9})$")

MERGED = "steps_merged"
"""Code of the note that a step has several marks."""

_NO_MARKS = "no ProfilerStep in the trace"


@dataclass(frozen=True, slots=True)
class HostStep:
    step: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class MarkedSteps:
    """The steps of a rank on the host, in order, and the notes on how they were found.

    partial has the numbers of the steps that the recording may have cut off; whole: the trace is
    one step.
    """

    steps: tuple[HostStep, ...]
    notes: tuple[Note, ...] = ()
    partial: tuple[int, ...] = ()
    whole: bool = False


def read_marked_steps(trace: RankTrace) -> MarkedSteps | None:
    """The steps marked by ProfilerStep, else by ranges such as "Step 3"; None without either."""
    found = _read_marks(trace)
    return None if found is None else _merge_microbatches(trace, found)


def _read_marks(trace: RankTrace) -> MarkedSteps | None:
    events = trace.events
    marked = _read_profiler_steps(events)
    if marked:
        return _close_open_steps(trace, marked)
    ranges = find_step_ranges(events)
    if ranges is None:
        return None
    starts, ends = events.start_ns[ranges.rows].tolist(), events.ends_of(ranges.rows).tolist()
    steps = [HostStep(*one) for one in zip(ranges.numbers, starts, ends, strict=True)]
    note = _note_inferred(f"ranges such as {events.name_of(int(ranges.rows[0]))!r}", trace.rank)
    found = _close_open_steps(trace, steps)
    return replace(found, notes=(note, *found.notes))


def _read_profiler_steps(events: Events) -> list[HostStep]:
    mask = events.is_category(Category.ANNOTATION, Category.OP) & events.match_prefix(
        "ProfilerStep#"
    )
    by_number: dict[int, HostStep] = {}
    for row in np.flatnonzero(mask).tolist():
        if (match := STEP.match(events.names[events.name_id[row]])) is not None:
            number, start = int(match[1]), int(events.start_ns[row])
            step = HostStep(number, start, start + int(events.dur_ns[row]))
            known = by_number.get(number, step)
            by_number[number] = max(known, step, key=lambda one: one.end_ns - one.start_ns)
    return sorted(by_number.values(), key=lambda step: step.start_ns)


def _close_open_steps(trace: RankTrace, steps: Sequence[HostStep]) -> MarkedSteps:
    """The steps; one whose mark has no duration ends where the next begins, or with the trace."""
    is_open = [step.end_ns <= step.start_ns for step in steps]
    if not any(is_open):
        return MarkedSteps(tuple(steps))
    trace_end_ns = int(trace.events.end_ns.max())
    next_ns = [*(step.start_ns for step in steps[1:]), trace_end_ns]
    closed = tuple(
        replace(step, end_ns=end_ns) if without_end else step
        for step, end_ns, without_end in zip(steps, next_ns, is_open, strict=True)
    )
    text = "step marks without a duration: each step ends where the next begins"
    note = Note("steps_open", text, trace.rank)
    return MarkedSteps(closed, (note,), (closed[-1].step,) if is_open[-1] else ())


def _merge_microbatches(trace: RankTrace, found: MarkedSteps) -> MarkedSteps:
    """A step is one optimizer step: marks of microbatches are merged up to the one that has it.

    Only if always one in so many marks has an optimizer step, and two such groups are complete. A
    merged step has the number of its last mark; those at the edges of the recording may lack marks.
    """
    steps = found.steps
    has_optimizer = np.flatnonzero(_count_optimizer_steps(trace, steps))
    periods = np.diff(has_optimizer)
    if len(periods) == 0 or periods[0] < 2 or (periods != periods[0]).any():
        return found
    period = int(periods[0])
    if len(periods) == 1 and has_optimizer[0] < period - 1:
        return found
    lasts = has_optimizer.tolist()
    if lasts[-1] < len(steps) - 1:
        lasts.append(len(steps) - 1)
    merged, begin = list[HostStep](), 0
    partial = set(found.partial)
    for last in lasts:
        merged.append(HostStep(steps[last].step, steps[begin].start_ns, steps[last].end_ns))
        if last - begin + 1 != period or last > has_optimizer[-1]:
            partial.add(steps[last].step)
        begin = last + 1
    text = (
        f"{period} step marks for each optimizer step, as if of microbatches: merged, a step has"
        " the number of its last mark"
    )
    notes = (*found.notes, Note(MERGED, text, trace.rank))
    return MarkedSteps(tuple(merged), notes, tuple(sorted(partial)))


def count_profiled_steps(trace: RankTrace) -> int:
    """The number of steps that ProfilerStep marks, with those of microbatches merged."""
    if not _read_profiler_steps(trace.events):
        return 0
    found = read_marked_steps(trace)
    return len(found.steps) if found else 0


def _count_optimizer_steps(trace: RankTrace, steps: Sequence[HostStep]) -> Int64:
    """The optimizer steps that began in each step."""
    starts = trace.events.start_ns[_select_optimizer_steps(trace.events)]
    step_of = np.searchsorted([step.start_ns for step in steps], starts, side="right") - 1
    return np.bincount(step_of[step_of >= 0], minlength=len(steps))


def find_unmarked_steps(trace: RankTrace) -> MarkedSteps:
    """The steps of a trace without marks: by repetition, else one whole step."""
    boundaries = find_boundaries(trace)
    if boundaries is None:
        return _take_whole_trace(trace)
    steps = _build_repeated_steps(trace.events, boundaries.ends_ns)
    note = _note_inferred(boundaries.source, trace.rank)
    return MarkedSteps(tuple(steps), (note,), (steps[0].step, steps[-1].step))


def _note_inferred(source: str, rank: int) -> Note:
    return Note("steps_inferred", f"{_NO_MARKS}: steps were inferred from {source}", rank)


def _build_repeated_steps(events: Events, ends_ns: Int64) -> list[HostStep]:
    """The steps between these ends, plus the incomplete ones at both edges of the recording."""
    first, last = int(events.start_ns.min()), int(events.end_ns.max())
    edges = [first, *(end for end in ends_ns.tolist() if first < end < last), last]
    return [HostStep(i, start, end) for i, (start, end) in enumerate(pairwise(edges))]


def _take_whole_trace(trace: RankTrace) -> MarkedSteps:
    """One step from the first event of host or device to the last one of the device, if any."""
    events = trace.events
    rows = ~events.is_category(Category.OTHER)
    rows = rows if rows.any() else np.ones(len(events), dtype=np.bool_)
    until = events.is_category(*DEVICE_CATEGORIES) if trace.on_device else rows
    step = HostStep(0, int(events.start_ns[rows].min()), int(events.ends_of(until).max()))
    note = Note("no_steps", f"{_NO_MARKS}: the whole trace counts as one step", trace.rank)
    return MarkedSteps((step,), (note,), whole=True)


# Ranges such as "Step 3", "iteration_7" or "train_step".

STEP_RANGE = re.compile(
    r"\A(?:(?:.*[^a-z])?(?:train(?:ing)?|global)?"
    r"(?:step|iter|iteration|(?<!micro[ _-])(?<!mini[ _-])batch)s?"
    r"[\s_#:=.-]*\d{1,9}(?:\s*(?:/|of)\s*\d{1,9})?[\])}]?$"
    r"|(?:train(?:ing)?[\s_-]?)?(?:step|iter|iteration)$)",
    re.I,
)

_DIGITS = re.compile(r"\d{1,9}")

_TOTAL = re.compile(r"(?<!\s)\s*(?:/|of)\s*\d{1,9}[\])}]?$")
"""The number of steps behind that of the step: "step 3/100"."""


class StepRanges(Struct, frozen=True):
    """The ranges that are the steps of a rank, in order, and the number of each step."""

    rows: Int64
    numbers: tuple[int, ...]


def find_step_ranges(events: Events) -> StepRanges | None:
    """The ranges of the host that are steps by name; None if there are none.

    They have one name apart from its numbers, which increase, and do not overlap. Of several such
    names the one whose ranges take the most time counts: the others are steps within a step, or
    parts of one. Ranges without a number count if there are at least two.
    """
    families: dict[tuple[int, str], list[int]] = defaultdict(list)
    rows = np.flatnonzero(events.is_category(Category.ANNOTATION))
    names = list_distinct(events.name_id[rows]).tolist()
    named = [number for number in names if STEP_RANGE.match(events.names[number])]
    for row in rows[np.isin(events.name_id[rows], named)].tolist():
        family = _DIGITS.sub("#", _TOTAL.sub("", events.name_of(row))).lower()
        families[int(events.lane[row]), family].append(row)
    found = [
        ranges
        for rows in families.values()
        if (ranges := _number_ranges(events, np.array(rows, dtype=np.int64))) is not None
    ]
    return max(found, key=lambda one: int(events.dur_ns[one.rows].sum()), default=None)


def _number_ranges(events: Events, rows: Int64) -> StepRanges | None:
    """The ranges with the number of each; None if they overlap or their numbers do not increase."""
    if (events.ends_of(rows[:-1]) > events.start_ns[rows[1:]]).any():
        return None
    names = [_TOTAL.sub("", events.name_of(row)) for row in rows.tolist()]
    numbers = [tuple(map(int, _DIGITS.findall(name))) for name in names]
    if not numbers[0]:
        return StepRanges(rows, tuple(range(len(rows)))) if len(rows) > 1 else None
    if any(first >= second for first, second in pairwise(numbers)):
        return None
    last = [one[-1] for one in numbers]
    is_unique = all(first < second for first, second in pairwise(last))
    return StepRanges(rows, tuple(last if is_unique else range(len(rows))))


# Steps of a trace without marks, inferred from what repeats.

_FEWEST_CALLS, _FEWEST_TIMES = 4, 3
"""Minimum calls per period and minimum number of periods to infer steps from the call sequence."""


class StepBoundaries(Struct, frozen=True):
    """Host times at which one step ends and the next begins, and what they were inferred from."""

    ends_ns: Int64
    source: str


def find_boundaries(trace: RankTrace) -> StepBoundaries | None:
    """Infers step boundaries from optimizer steps, else from the sequence of calls, else None."""
    ends = _find_optimizer_ends(trace.events)
    if len(ends):
        return StepBoundaries(ends, "optimizer steps")
    ends = _find_period_ends(trace)
    return StepBoundaries(ends, "the repeating sequence of collectives") if len(ends) else None


def _find_optimizer_ends(events: Events) -> Int64:
    """The end of the last optimizer of each step; several optimizers may follow one backward."""
    ends = np.sort(events.ends_of(_select_optimizer_steps(events)))
    backward = np.sort(events.start_ns[events.match_prefix("autograd::engine")])
    if not len(backward):
        return ends
    before = np.searchsorted(backward, ends)
    last = np.ones(len(ends), dtype=np.bool_)
    last[:-1] = before[1:] > before[:-1]
    return ends[last]


def _select_optimizer_steps(events: Events) -> Bool:
    return events.match_prefix("Optimizer.step#") & events.is_category(
        Category.ANNOTATION, Category.OP
    )


def _find_period_ends(trace: RankTrace) -> Int64:
    """The issue time of the last call of each period of the call sequence.

    Only a period in which some call occurs exactly once counts: such a call is issued per step, not
    per layer.
    """
    calls = trace.calls
    known = np.flatnonzero(calls.issued_ns >= 0)
    known = known[np.argsort(calls.issued_ns[known], kind="stable")]
    if len(known) < _FEWEST_TIMES * _FEWEST_CALLS:
        return np.empty(0, dtype=np.int64)
    kind = group_ids(calls.group_id[known], calls.op[known], calls.message_bytes[known])
    count = np.bincount(kind)
    rarest = int(np.flatnonzero(count == count[count > 0].min())[0])
    at = np.flatnonzero(kind == rarest)
    if not _is_period(kind, at):
        return np.empty(0, dtype=np.int64)
    return calls.issued_ns[known[at]] + 1


def _is_period(kind: Int64, at: Int64) -> bool:
    """Whether the calls between consecutive occurrences of the rarest call are always the same."""
    if len(at) < _FEWEST_TIMES:
        return False
    length = np.diff(at)
    period = int(length[0])
    if period < _FEWEST_CALLS or (length != period).any():
        return False
    return bool((kind[:-period] == kind[period:]).all())


# Corresponding steps of different ranks: those that share matched calls.

_NONE = np.iinfo(np.int64).min
"""Marks a call that has no step number yet."""


def unify_step_numbers(steps: Sequence[Steps], matched: MatchedCalls) -> list[Steps]:
    """Renumbers the steps of all ranks like the first rank's; a rank without shared calls keeps its
    own."""
    calls = [_collect_calls(own, i, matched) for i, own in enumerate(steps)]
    numbered = {0: steps[0]}
    number_of = np.full(int(matched.key.max(initial=-1)) + 1, _NONE, dtype=np.int64)
    _record_numbers(number_of, calls[0], steps[0])
    left = set(range(1, len(steps)))
    while left:
        votes = {i: _count_votes(calls[i], number_of) for i in sorted(left)}
        known = [i for i in sorted(left) if votes[i]]
        for i in known or sorted(left):
            numbered[i] = _shift_numbers(steps[i], votes[i])
            _record_numbers(number_of, calls[i], numbered[i])
            left.discard(i)
    return [numbered[i] for i in range(len(steps))]


class _Calls(Struct, frozen=True):
    """The matched calls of a rank that start in one of its windows, sorted by window."""

    key: Int64
    window: Int64


def _collect_calls(steps: Steps, trace: int, matched: MatchedCalls) -> _Calls:
    rows = matched.slice_trace(trace)
    key, start = matched.key[rows], matched.start_ns[rows]
    starts = np.array([window.start_ns for window in steps.windows], dtype=np.int64)
    ends = np.array([window.end_ns for window in steps.windows], dtype=np.int64)
    window = np.searchsorted(starts, start, side="right") - 1
    inside = np.flatnonzero((window >= 0) & (key >= 0))
    inside = inside[start[inside] < ends[window[inside]]]
    inside = inside[np.argsort(window[inside], kind="stable")]
    return _Calls(key[inside], window[inside])


def _record_numbers(number_of: Int64, calls: _Calls, steps: Steps) -> None:
    """Writes, for each matched call, the number of the step in which it started."""
    number = np.array([window.step for window in steps.windows], dtype=np.int64)
    number_of[calls.key] = number[calls.window]


def _count_votes(calls: _Calls, number_of: Int64) -> dict[int, int]:
    """{window: step number}: the number that most of its calls have on other ranks, the first if
    tied."""
    number = number_of[calls.key]
    known = number != _NONE
    label = group_ids(calls.window[known], number[known])
    first, count = np.unique(label, return_index=True, return_counts=True)[1:]
    window = calls.window[known][first]
    best = np.lexsort((first, -count, window))
    best = best[np.flatnonzero(np.diff(window[best], prepend=-1))]
    return dict(zip(window[best].tolist(), number[known][first[best]].tolist(), strict=True))


def _shift_numbers(steps: Steps, votes: Mapping[int, int]) -> Steps:
    shifts = Counter(vote - steps.windows[window].step for window, vote in votes.items())
    shift = shifts.most_common(1)[0][0] if shifts else 0
    if not shift:
        return steps
    text = f"step numbers differ from the first rank's by {-shift:+d} and were renumbered"
    note = Note("steps_renumbered", text)
    renumbered: tuple[StepWindow, ...] = tuple(
        replace(w, step=w.step + shift) for w in steps.windows
    )
    return Steps(renumbered, (*steps.notes, note))


# Start and end of each step of a rank.


@dataclass(frozen=True, slots=True)
class StepWindow:
    """One step: its number, its kind, and its start and end on the rank's own clock in ns."""

    step: int
    kind: Kind
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Steps:
    """The windows of a rank in order, adjacent and without overlap; notes list the assumptions
    made."""

    windows: tuple[StepWindow, ...]
    notes: tuple[Note, ...]

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
        Note("no_steps_on_rank", text, trace.rank)
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
        _mark_all_partial(steps) if one.whole else steps
        for steps, one in zip(found, host, strict=True)
    ]


def _build_steps(trace: RankTrace, host: MarkedSteps) -> Steps:
    """The windows of the steps, with their kinds; empty ones are dropped with a note."""
    marked = host.steps
    if host.whole or not trace.on_device:
        windows = _build_host_windows(marked)
    else:
        windows = _build_device_windows(trace, marked)
    kinds = _classify_steps(trace, marked)
    windows = [
        w if w.kind == "partial" else replace(w, kind=k)
        for w, k in zip(windows, kinds, strict=True)
    ]
    ends = [step for step in (trace.device_stopped_step, trace.end_step) if step is not None]
    if ends:
        windows = [replace(w, kind="partial") if w.step >= min(ends) else w for w in windows]
    windows = [replace(w, kind="partial") if w.step in host.partial else w for w in windows]
    notes = [*host.notes]
    if not host.whole and marked[-1].step not in host.partial and _is_torn(trace, marked):
        torn = marked[-1].step
        windows = [replace(w, kind="partial") if w.step == torn else w for w in windows]
        notes.append(Note("step_torn", _TORN_TEXT.format(torn), trace.rank))
    if trace.on_device:
        windows, lost = _mark_lost_work(trace, marked, windows)
        notes += [*lost, *_note_several_devices(trace), *_note_no_launches(trace)]
    notes += [_note_empty(w, trace.rank) for w in windows if w.end_ns <= w.start_ns]
    return Steps(tuple(w for w in windows if w.end_ns > w.start_ns), tuple(notes))


_TORN_TEXT = "step {} has no optimizer step, as where a rank ends in it: partial"

_MIN_STEPPED = 2


def _is_torn(trace: RankTrace, marked: Sequence[HostStep]) -> bool:
    """Whether the last step alone has no optimizer step: the job crashed or stopped in it."""
    count = _count_optimizer_steps(trace, marked)
    return len(marked) > _MIN_STEPPED and bool(count[:-1].all()) and not count[-1]


def _note_empty(window: StepWindow, rank: int) -> Note:
    return Note("empty_step", f"step {window.step} is empty and was dropped", rank)


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


def _mark_all_partial(steps: Steps) -> Steps:
    windows: tuple[StepWindow, ...] = tuple(replace(w, kind="partial") for w in steps.windows)
    return replace(steps, windows=windows)


def _mark_lost_work(
    trace: RankTrace, marked: Sequence[HostStep], windows: Sequence[StepWindow]
) -> tuple[list[StepWindow], list[Note]]:
    """Marks steps whose device work was lost by the profiler as partial."""
    launches = collect_launches(trace.events)
    cut = find_lost_steps(launches, trace.events, [step.start_ns for step in marked])
    notes = list(note_lost_work(launches, trace.events, trace.rank))
    partial: list[StepWindow] = [
        replace(w, kind="partial") if is_cut else w
        for w, is_cut in zip(windows, cut.tolist(), strict=True)
    ]
    numbers = [w.step for w in compress(windows, cut.tolist()) if w.end_ns > w.start_ns]
    if numbers:
        listed = units.format_number_list(numbers)
        text = f"the profiler lost device work of step {listed}: partial"
        notes.append(Note("device_work_cut", text, trace.rank))
    return partial, notes


def _build_host_windows(marked: Sequence[HostStep]) -> list[StepWindow]:
    """Each window runs from the end of the previous step to its own, even if the marks overlap."""
    edges = [marked[0].start_ns, *accumulate((step.end_ns for step in marked), max)]
    return [
        StepWindow(step.step, "full", start, end)
        for step, (start, end) in zip(marked, pairwise(edges), strict=True)
    ]


def _build_device_windows(trace: RankTrace, marked: Sequence[HostStep]) -> list[StepWindow]:
    """Windows on the device: a step ends with the last kernel that it launched on a main compute
    stream."""
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
        end = max(start, last)
        kind: Kind = "partial" if i == 0 and start > host_start else "full"
        windows.append(StepWindow(step.step, kind, start, end))
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
    device; one that was issued between two marks to the later step, whose window it lies in.
    """
    calls = trace.calls
    when = np.where(calls.issued_ns >= 0, calls.issued_ns, trace.events.start_ns[calls.event])
    begins = [marked[0].start_ns, *accumulate((step.end_ns for step in marked[:-1]), max)]
    step_of = np.searchsorted(begins, when, side="right") - 1
    counts = _count_calls(trace, step_of, len(marked))
    signatures = _build_signatures(trace, step_of, when, counts)
    usual = _find_usual(signatures, counts)
    return ["full" if usual in (None, signature) else "other" for signature in signatures]


def _find_usual(signatures: Sequence[bytes], counts: Int64) -> bytes | None:
    """The signature of most steps; or of a third of them, if no other one is of as many and the
    rest have the same calls and more, as those of an evaluation; None if there is none."""
    (usual, most), *others = Counter(signatures).most_common(2)
    if 2 * most > len(signatures):
        return usual
    are_more = bool((counts >= counts[signatures.index(usual)]).all())
    is_first = all(count < most for _, count in others)
    return usual if are_more and is_first and 3 * most >= len(signatures) else None


def _count_calls(trace: RankTrace, step_of: Int64, steps: int) -> Int64:
    """The number of calls by step, and by group and op; by op alone if a group is unknown."""
    calls = trace.calls
    op = calls.op.astype(np.int64)
    of_op = group_ids(calls.group_id, op) if _all_grouped(trace) else op
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


# Step time variation: median, tail, and the causes of slow steps.

MIN_STEPS = 6
"""Minimum number of steps for detecting slow ones."""

MIN_EXCESS = 0.03
"""A step must exceed the median by at least this fraction to be slow."""

SIGMAS = 5.0


@dataclass(frozen=True, slots=True)
class StepDurations:
    """Step time statistics over the full steps of one rank, or of the run.

    For the run (rank is None) the duration of a step is that of its slowest rank.

    Attributes:
        rank: Global rank; None for the whole run.
        steps: Number of full steps.
        median_ns: Median step time in ns.
        p99_ns: 99th percentile (nearest rank) in ns; equals longest_ns for fewer than 100 steps.
        longest_ns: Longest step time in ns.
        slow_steps: Numbers of the slow steps (outliers), ascending.

    Examples:
        >>> report = analyze("sample_traces/tp2_pp2")
        >>> [row.median_ns for row in report.step_times if row.rank is None]
        [175986355]
    """

    rank: int | None
    steps: int
    median_ns: int
    p99_ns: int
    longest_ns: int
    slow_steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlowStep:
    """A slow step of the run, and the bucket and rank where its excess over the median arose.

    Waits (skew and bubble) are reported only if no other bucket explains half of the excess,
    because a wait is usually the effect of a delay on another rank.

    Attributes:
        step: Step number.
        step_ns: Step time on the slowest rank in ns.
        excess_ns: step_ns minus the median step time of the run in ns.
        rank: Rank on which the bucket exceeded its median most.
        bucket: Name of that bucket, one of BUCKETS.
        excess_in_bucket_ns: Time of that bucket beyond its median on that rank in ns.

    Examples:
        >>> report = analyze("sample_traces/tp2_pp2")
        >>> [(row.step, row.rank, row.bucket) for row in report.slow_steps]
        []
    """

    step: int
    step_ns: int
    excess_ns: int
    rank: int
    bucket: str
    excess_in_bucket_ns: int


class Variation(Struct, frozen=True):
    """Step time statistics by rank and of the run; run is None if no step is full on every rank."""

    ranks: tuple[StepDurations, ...]
    run: StepDurations | None
    slow: tuple[SlowStep, ...]


def compute_variation(steps: Sequence[StepSplit]) -> Variation:
    """Computes step time statistics over the full steps.

    A step is slow if it exceeds the median by SIGMAS standard deviations (estimated from the MAD)
    and by LEAST_EXCESS; at least LEAST_STEPS steps are needed.
    """
    by_rank = defaultdict[int, dict[int, StepSplit]](dict)
    for split in steps:
        if split.kind == "full":
            by_rank[split.rank][split.step] = split
    ranks = [
        _build_durations(rank, _map_durations(by_rank[rank].values())) for rank in sorted(by_rank)
    ]
    common = sorted(set.intersection(*map(set, by_rank.values()))) if by_rank else []
    if not common:
        return Variation(tuple(ranks), None, ())
    run = _build_durations(
        None, {n: max(_map_durations(_select_step(by_rank, n)).values()) for n in common}
    )
    return Variation(tuple(ranks), run, _find_slow_steps(by_rank, common, run))


_Splits = Mapping[int, Mapping[int, StepSplit]]
"""Step splits by rank and step number."""


def _select_step(by_rank: _Splits, step: int) -> list[StepSplit]:
    return [of_rank[step] for of_rank in by_rank.values()]


def _map_durations(steps: Iterable[StepSplit]) -> Mapping[int, int]:
    return {one.step: one.split.step_ns for one in steps}


def _build_durations(rank: int | None, length_ns: Mapping[int, int]) -> StepDurations:
    ordered = np.sort(np.array(list(length_ns.values()), dtype=np.int64))
    middle = _compute_median(ordered)
    slow = tuple(n for n, ns in sorted(length_ns.items()) if _is_slow(ns, ordered, middle))
    place = -(-99 * len(ordered) // 100) - 1
    return StepDurations(rank, len(ordered), middle, int(ordered[place]), int(ordered[-1]), slow)


def _compute_median(values: Int64) -> int:
    """The median; for an even count the mean of the two middle values, rounded down."""
    ordered = np.sort(values)
    return int(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2


def _is_slow(step_ns: int, all_ns: Int64, middle: int) -> bool:
    if len(all_ns) < MIN_STEPS:
        return False
    sigma = SIGMA_OF_MAD * _compute_median(np.abs(all_ns - middle))
    return step_ns - middle > max(SIGMAS * sigma, MIN_EXCESS * middle)


def _find_slow_steps(
    by_rank: _Splits, common: Sequence[int], run: StepDurations
) -> tuple[SlowStep, ...]:
    ranks = sorted(by_rank)
    buckets = np.array(
        [[by_rank[rank][n].split.buckets_ns for rank in ranks] for n in common], dtype=np.int64
    )
    usual = np.sort(buckets, axis=0)[(len(common) - 1) // 2]
    return tuple(
        _explain_slow_step(step, buckets[common.index(step)], usual, ranks, run)
        for step in run.slow_steps
    )


def _explain_slow_step(
    step: int, buckets_ns: Int64, usual_ns: Int64, ranks: Sequence[int], run: StepDurations
) -> SlowStep:
    step_ns = int(buckets_ns.sum(axis=1).max())
    excess, beyond = step_ns - run.median_ns, buckets_ns - usual_ns
    waits = [BUCKETS.index(bucket) for bucket in WAITS]
    own = beyond.copy()
    own[:, waits] = np.iinfo(np.int64).min
    candidates = own if 2 * int(own.max()) >= excess else beyond
    row, bucket = divmod(int(candidates.argmax()), len(BUCKETS))
    return SlowStep(step, step_ns, excess, ranks[row], BUCKETS[bucket], int(beyond[row, bucket]))
