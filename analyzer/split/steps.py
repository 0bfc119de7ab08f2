"""Steps: start and end of each step on a rank, and which steps of different ranks correspond."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from stepsplit.analyzer.arrays import group_ids, group_max
from stepsplit.analyzer.buckets import BUCKETS, WAITS, Kind, StepSplit
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


@dataclass(frozen=True, slots=True)
class _Calls:
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

STEP = re.compile(r"ProfilerStep#(\d{1,9})$")


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


@dataclass(frozen=True, slots=True)
class _HostStep:
    step: int
    start_ns: int
    end_ns: int


def find_steps(trace: RankTrace) -> Steps:
    """Finds the steps of a rank by ProfilerStep marks, else by repetition, else as one whole
    step."""
    marked = _read_marked_steps(trace.events)
    boundaries = find_boundaries(trace) if not marked else None
    if boundaries is not None:
        marked = _build_repeated_steps(trace.events, boundaries.ends_ns)
    if not marked:
        return _take_whole_trace(trace)
    windows = (
        _build_device_windows(trace, marked) if trace.on_device else _build_host_windows(marked)
    )
    kinds = _classify_steps(trace, marked)
    windows = [
        w if w.kind == "partial" else replace(w, kind=k)
        for w, k in zip(windows, kinds, strict=True)
    ]
    inferred = () if boundaries is None else (_note_inferred(boundaries.source, trace.rank),)
    if boundaries is not None:
        windows = [_mark_partial(w, marked) for w in windows]
    nonempty = tuple(w for w in windows if w.end_ns > w.start_ns)
    notes = tuple(
        Note("empty_step", f"step {w.step} is empty and was dropped", trace.rank)
        for w in windows
        if w.end_ns <= w.start_ns
    )
    return Steps(nonempty, (*inferred, *notes))


def _note_inferred(source: str, rank: int) -> Note:
    text = f"no ProfilerStep in the trace: steps were inferred from {source}"
    return Note("steps_inferred", text, rank)


def _build_repeated_steps(events: Events, ends_ns: Int64) -> list[_HostStep]:
    """The steps between these ends, plus the incomplete ones at both edges of the recording."""
    first, last = int(events.start_ns.min()), int(events.end_ns.max())
    edges = [first, *(end for end in ends_ns.tolist() if first < end < last), last]
    return [_HostStep(i, start, end) for i, (start, end) in enumerate(pairwise(edges))]


def _mark_partial(window: StepWindow, marked: Sequence[_HostStep]) -> StepWindow:
    """Marks the first and the last inferred step as partial: the recording may cut them off."""
    outer = window.step in (marked[0].step, marked[-1].step)
    return replace(window, kind="partial") if outer else window


def _read_marked_steps(events: Events) -> list[_HostStep]:
    mask = events.is_category(Category.ANNOTATION, Category.OP) & events.match_prefix(
        "ProfilerStep#"
    )
    by_number = {}
    for row in np.flatnonzero(mask).tolist():
        if (match := STEP.match(events.names[events.name_id[row]])) is not None:
            start = int(events.start_ns[row])
            by_number[int(match[1])] = _HostStep(
                int(match[1]), start, start + int(events.dur_ns[row])
            )
    return sorted(by_number.values(), key=lambda step: step.start_ns)


def _take_whole_trace(trace: RankTrace) -> Steps:
    events = trace.events
    rows = (
        events.is_category(*DEVICE_CATEGORIES)
        if trace.on_device
        else events.is_category(Category.OP)
    )
    rows = rows if rows.any() else np.ones(len(events), dtype=np.bool_)
    window = StepWindow(0, "full", int(events.start_ns[rows].min()), int(events.end_ns[rows].max()))
    note = Note(
        "no_steps", "no ProfilerStep in the trace: the whole trace counts as one step", trace.rank
    )
    return Steps((window,) if window.end_ns > window.start_ns else (), (note,))


def _build_host_windows(marked: Sequence[_HostStep]) -> list[StepWindow]:
    """Each window runs from the end of the previous step to its own, even if the marks overlap."""
    edges = [marked[0].start_ns, *accumulate((step.end_ns for step in marked), max)]
    return [
        StepWindow(step.step, "full", start, end)
        for step, (start, end) in zip(marked, pairwise(edges), strict=True)
    ]


def _build_device_windows(trace: RankTrace, marked: Sequence[_HostStep]) -> list[StepWindow]:
    """Windows on the device: a step ends with the last kernel that it launched on the main compute
    stream."""
    events = trace.events
    device = np.flatnonzero(events.is_category(*DEVICE_CATEGORIES))
    launched = events.launch_ns()
    launched = np.where(launched < 0, events.start_ns, launched)[device]
    ends = events.end_ns[device]
    main = is_on_main_stream(trace, device)
    step_of = np.searchsorted([step.start_ns for step in marked], launched, side="right") - 1
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


def is_on_main_stream(trace: RankTrace, device: Int64) -> Bool:
    """Whether each device event (given by row) is a kernel on the stream with the most compute.

    True for all events if no kernel computes.
    """
    events = trace.events
    computes = trace.kinds.computes
    busy = np.bincount(
        events.lane[computes], weights=events.dur_ns[computes], minlength=len(events.lanes)
    )
    if not busy.max(initial=0.0):
        return np.ones(len(device), dtype=np.bool_)
    kernel = events.category[device] == Category.KERNEL
    return np.asarray(kernel & (events.lane[device] == int(busy.argmax())))


def _classify_steps(trace: RankTrace, marked: Sequence[_HostStep]) -> list[Kind]:
    """The kind of each step: full for the usual communication sequence, other for the rest.

    A call belongs to the step in which the host issued it, because step boundaries shift on the
    device.
    """
    calls = trace.calls
    when = np.where(calls.issued_ns >= 0, calls.issued_ns, trace.events.start_ns[calls.event])
    starts = [step.start_ns for step in marked]
    step_of = np.searchsorted(starts, when, side="right") - 1
    signatures = _build_signatures(trace, step_of, when, len(marked))
    usual, count = Counter(signatures).most_common(1)[0]
    alike = 2 * count <= len(marked)
    return ["full" if alike or signature == usual else "other" for signature in signatures]


def _build_signatures(trace: RankTrace, step_of: Int64, when: Int64, count: int) -> list[bytes]:
    """The sequence of (group, op) of each step, in issue order within each group."""
    calls = trace.calls
    rows = np.lexsort((when, calls.group_id, step_of))
    pairs = np.stack((calls.group_id[rows], calls.op[rows].astype(np.int32)), axis=1)
    edges = np.searchsorted(step_of[rows], np.arange(count + 1)).tolist()
    return [pairs[low:high].tobytes() for low, high in pairwise(edges)]


# Steps of a trace without ProfilerStep marks, inferred from what repeats.

_FEWEST_CALLS, _FEWEST_TIMES = 4, 3
"""Minimum calls per period and minimum number of periods to infer steps from the call sequence."""


@dataclass(frozen=True, slots=True)
class StepBoundaries:
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
    marks = events.match_prefix("Optimizer.step#") & events.is_category(
        Category.ANNOTATION, Category.OP
    )
    ends = np.sort(events.end_ns[marks])
    backward = np.sort(events.start_ns[events.match_prefix("autograd::engine")])
    if not len(backward):
        return ends
    before = np.searchsorted(backward, ends)
    last = np.ones(len(ends), dtype=np.bool_)
    last[:-1] = before[1:] > before[:-1]
    return ends[last]


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


# Step time variation: median, tail, and the causes of slow steps.

MIN_STEPS = 6
"""Minimum number of steps for detecting slow ones."""

MIN_EXCESS = 0.03
"""A step must exceed the median by at least this fraction to be slow."""

SIGMAS = 5.0

_SIGMA_OF_MAD = 1.4826


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


@dataclass(frozen=True, slots=True)
class Variation:
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
    sigma = _SIGMA_OF_MAD * _compute_median(np.abs(all_ns - middle))
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
