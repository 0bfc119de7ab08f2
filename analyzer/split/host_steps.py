"""Steps of a rank on the host: marked, named by ranges, inferred from what repeats, or one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import group_ids, list_distinct
from stepsplit.analyzer.trace import Bool, Category, Events, Int64, Lack, Note, RankTrace

# ProfilerStep marks, else numbered ranges.

STEP = re.compile(r"ProfilerStep#(\d{1,9})$")

_NO_MARKS = "no ProfilerStep in the trace"


class HostStep(Struct, frozen=True):
    """A step on the host; is_end_known: whether the trace says when it ended there, or only when
    the next one began."""

    step: int
    start_ns: int
    end_ns: int
    is_end_known: bool = True


class MarkedSteps(Struct, frozen=True):
    """The steps of a rank on the host, in order, and the notes on how they were found.

    partial has the numbers of the steps that the recording may have cut off; whole: the trace is
    one step. restarts has the numbers of the steps before which the loop was left: what ran
    between is of no step. by_profiler: ProfilerStep marks them. marks is how many marks a step has:
    more than one where those of microbatches are merged.
    """

    steps: tuple[HostStep, ...]
    notes: tuple[Note, ...] = ()
    partial: tuple[int, ...] = ()
    whole: bool = False
    restarts: tuple[int, ...] = ()
    by_profiler: bool = False
    marks: int = 1


def read_marked_steps(trace: RankTrace) -> MarkedSteps | None:
    """The steps marked by ProfilerStep, else by ranges such as "Step 3"; None without either."""
    found = _read_marks(trace)
    return None if found is None else _merge_microbatches(trace, found)


def _read_marks(trace: RankTrace) -> MarkedSteps | None:
    events = trace.events
    marked = _read_profiler_steps(events)
    if marked:
        closed = _close_open_steps(trace, marked)
        return replace(_number_in_order(closed, trace.rank), by_profiler=True)
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
    by_number: dict[int, list[HostStep]] = defaultdict(list)
    for row in np.flatnonzero(mask).tolist():
        if (match := STEP.match(events.names[events.name_id[row]])) is not None:
            number, start = int(match[1]), int(events.start_ns[row])
            step = HostStep(number, start, start + int(events.dur_ns[row]))
            by_number[number].append(step)
    steps = [step for same in by_number.values() for step in _drop_copies(same)]
    return sorted(steps, key=lambda step: step.start_ns)


_COPY_SHARE = 0.01
"""A mark with less of the longest mark's duration is a copy of it, not a step of its own."""


def _drop_copies(same: Sequence[HostStep]) -> list[HostStep]:
    """The marks of one number without copies: of those that overlap the longest, and no tiny ones.

    Marks of one number after each other are of several loops in one recording.
    """
    longest_ns = max(step.end_ns - step.start_ns for step in same)
    kept: list[HostStep] = []
    for step in sorted(same, key=lambda one: one.start_ns - one.end_ns):
        is_tiny = bool(kept) and step.end_ns - step.start_ns < _COPY_SHARE * longest_ns
        overlaps = any(
            step.start_ns == one.start_ns
            or (step.start_ns < one.end_ns and one.start_ns < step.end_ns)
            for one in kept
        )
        if not is_tiny and not overlaps:
            kept.append(step)
    return kept


_BREAK_SHARE = 0.1
"""The loop was left before a step that begins so much of its duration after the mark before it."""


def _number_in_order(marked: MarkedSteps, rank: int) -> MarkedSteps:
    """The steps with increasing numbers, and notes if those of the marks repeat or skip."""
    steps, notes, partial = marked.steps, list(marked.notes), marked.partial
    numbers = [step.step for step in steps]
    jumps = [(one, two) for one, two in pairwise(numbers) if two != one + 1]
    if not jumps:
        return marked
    skipped = [number for one, two in jumps for number in range(one + 1, min(two, one + 9))]
    if skipped:
        count = sum(max(two - one - 1, 0) for one, two in jumps)
        missing = "1 step number has" if count == 1 else f"{count:,} step numbers have"
        text = f"{missing} no ProfilerStep: {units.format_number_list(skipped)}"
        notes.append(Note("step_numbers_skip", text, rank, Lack.STEPS))
    anew = sum(two <= one for one, two in jumps)
    if anew:
        first, last = numbers[0], numbers[0] + len(steps) - 1
        steps = tuple(replace(step, step=first + i) for i, step in enumerate(steps))
        partial = (last,) if partial else ()
        text = (
            f"the numbers of ProfilerStep repeat, as in {anew + 1:,} loops: {len(steps):,} steps"
            f" have {len(set(numbers)):,} numbers, and are numbered {first} to {last} in order"
        )
        notes.append(Note("step_numbers_repeat", text, rank))
    restarts = tuple(
        step.step
        for i, (before, step) in enumerate(pairwise(steps))
        if numbers[i + 1] != numbers[i] + 1
        and step.start_ns - before.end_ns > _BREAK_SHARE * (step.end_ns - step.start_ns)
    )
    return replace(marked, steps=steps, notes=tuple(notes), partial=partial, restarts=restarts)


def _close_open_steps(trace: RankTrace, steps: Sequence[HostStep]) -> MarkedSteps:
    """The steps; one whose mark has no duration ends where the next begins, or with the trace."""
    is_open = [step.end_ns <= step.start_ns for step in steps]
    if not any(is_open):
        return MarkedSteps(tuple(steps))
    trace_end_ns = int(trace.events.end_ns.max())
    next_ns = [*(step.start_ns for step in steps[1:]), trace_end_ns]
    closed = tuple(
        replace(step, end_ns=end_ns, is_end_known=False) if without_end else step
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
    has_optimizer = np.flatnonzero(count_optimizer_steps(trace, steps))
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
    partial, restarts = set(found.partial), list[int]()
    for last in lasts:
        merged.append(HostStep(steps[last].step, steps[begin].start_ns, steps[last].end_ns))
        if last - begin + 1 != period or last > has_optimizer[-1]:
            partial.add(steps[last].step)
        if steps[begin].step in found.restarts:
            restarts.append(steps[last].step)
        begin = last + 1
    text = (
        f"{period} step marks for each optimizer step, as if of microbatches: merged, a step has"
        " the number of its last mark"
    )
    notes = (*found.notes, Note("steps_merged", text, trace.rank))
    return replace(
        found,
        steps=tuple(merged),
        notes=notes,
        partial=tuple(sorted(partial)),
        restarts=tuple(restarts),
        marks=period,
    )


def count_profiled_steps(trace: RankTrace) -> int:
    """The number of steps that ProfilerStep marks, with those of microbatches merged."""
    if not _read_profiler_steps(trace.events):
        return 0
    found = read_marked_steps(trace)
    return len(found.steps) if found else 0


def count_optimizer_steps(trace: RankTrace, steps: Sequence[HostStep]) -> Int64:
    """The optimizer steps that began in each step."""
    starts = trace.events.start_ns[_select_optimizer_steps(trace.events)]
    step_of = np.searchsorted([step.start_ns for step in steps], starts, side="right") - 1
    return np.bincount(step_of[step_of >= 0], minlength=len(steps))


def find_unmarked_steps(trace: RankTrace) -> MarkedSteps:
    """The steps of a trace without marks: by repetition, else one whole step."""
    boundaries = find_boundaries(trace)
    if boundaries is None:
        # One step from the first event of host or device to the last one.
        events = trace.events
        rows = ~events.is_category(Category.OTHER)
        rows = rows if rows.any() else np.ones(len(events), dtype=np.bool_)
        step = HostStep(0, int(events.start_ns[rows].min()), int(events.ends_of(rows).max()))
        note = Note("no_steps", f"{_NO_MARKS}: the whole trace counts as one step", trace.rank)
        return MarkedSteps((step,), (note,), whole=True)
    # The steps between these ends, plus the incomplete ones at both edges of the recording.
    first, last = int(trace.events.start_ns.min()), int(trace.events.end_ns.max())
    edges = [first, *(end for end in boundaries.ends_ns.tolist() if first < end < last), last]
    steps = [
        HostStep(i, start, end, is_end_known=boundaries.are_ends)
        for i, (start, end) in enumerate(pairwise(edges))
    ]
    note = _note_inferred(boundaries.source, trace.rank)
    return MarkedSteps(tuple(steps), (note,), (steps[0].step, steps[-1].step))


def _note_inferred(source: str, rank: int) -> Note:
    return Note("steps_inferred", f"{_NO_MARKS}: steps were inferred from {source}", rank)


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
    """Host times at which one step ends and the next begins, and what they were inferred from.

    are_ends: whether the work of the step on the host ends then, as with its optimizer.
    """

    ends_ns: Int64
    source: str
    are_ends: bool


def find_boundaries(trace: RankTrace) -> StepBoundaries | None:
    """Infers step boundaries from optimizer steps, else from the sequence of calls, else None."""
    ends = _find_optimizer_ends(trace.events)
    if len(ends):
        return StepBoundaries(ends, "optimizer steps", are_ends=True)
    ends = _find_period_ends(trace)
    source = "the repeating sequence of collectives"
    return StepBoundaries(ends, source, are_ends=False) if len(ends) else None


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
