"""A whole recording split: every rank, every step, on one clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from stepsplit.analyzer.buckets import BUCKETS, StepSplit
from stepsplit.analyzer.split.align import Alignment, align
from stepsplit.analyzer.split.attribute import Attribution, Band, attribute
from stepsplit.analyzer.split.bandwidth import CollectiveStat, collective_stats
from stepsplit.analyzer.split.blame import Blame, RankTime, blame, rank_time
from stepsplit.analyzer.split.classify import Work, work_of
from stepsplit.analyzer.split.layout import Layout, layout_of
from stepsplit.analyzer.split.match import Matched, match
from stepsplit.analyzer.split.phases import phases_of
from stepsplit.analyzer.split.pipeline import (
    Box,
    StageHoles,
    StepGrid,
    boxes_of,
    covered_ns,
    grid_of,
    holes_of,
    schedule_named,
    schedule_of,
)
from stepsplit.analyzer.split.same_steps import agreed
from stepsplit.analyzer.split.steps import Steps, StepWindow, steps_of
from stepsplit.analyzer.split.waits import (
    BUBBLE,
    SKEW,
    Arrivals,
    arrivals_of,
    pieces_of,
    without_lag,
)
from stepsplit.analyzer.trace import Note, RankTrace
from stepsplit.collectors.run_spec import RunSpec

IdealBubble = Callable[[str, int, int, int], float | None]
"""(schedule, stages, microbatches, chunks) -> the bubble fraction of equal stages."""
_NO_GRID = Note(
    "no_grid",
    "forwards and backwards are not marked: no pipeline grid; profile_run and torch's interleaved "
    "schedules mark them",
)


@dataclass(frozen=True, slots=True)
class RankSplit:
    """One rank: its steps on the common clock, and what they are made of, on its own.

    lead_ns + own = common clock. steps and grids have one entry a window of the attribution, axis
    and phase one a row of its exposed pieces.
    """

    trace: RankTrace
    steps: tuple[StepSplit, ...]
    attribution: Attribution
    grids: tuple[StepGrid, ...]
    axis: tuple[str | None, ...]
    phase: tuple[str, ...]
    lead_ns: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The pipeline schedule as run: microbatches a step, chunks a rank, and its ideal bubble."""

    name: str
    microbatches: int
    ideal_bubble_fraction: float | None


@dataclass(frozen=True, slots=True)
class RunSplit:
    """Everything that the split knows of a recording."""

    ranks: tuple[RankSplit, ...]
    layout: Layout
    alignment: Alignment
    matched: Matched
    collectives: tuple[CollectiveStat, ...]
    schedule: Schedule | None
    holes: tuple[StageHoles, ...]
    blame: tuple[Blame, ...]
    notes: tuple[Note, ...]


def split_run(
    traces: Sequence[RankTrace], spec: RunSpec | None, ideal_bubble: IdealBubble
) -> RunSplit:
    """The split of all ranks. traces are in the order of their ranks, at least one."""
    layout = layout_of(spec, traces)
    work = [work_of(trace) for trace in traces]
    matched = match(traces)
    steps = agreed([steps_of(trace) for trace in traces], matched)
    alignment = align(traces, matched)
    together = _Together(matched, arrivals_of(traces, matched, alignment), alignment, layout)
    ranks = [
        _rank(i, *one, together) for i, one in enumerate(zip(traces, work, steps, strict=True))
    ]
    grids = {(g.rank, g.step): g for rank in ranks for g in rank.grids}
    holes = holes_of(layout.pipelines, grids)
    schedule = _schedule(layout, ranks, spec, ideal_bubble) if holes else None
    blamed = blame([_time(rank) for rank in ranks], _ideal_ns(holes, schedule))
    _check(ranks, blamed)
    notes = _notes(traces, steps, layout, alignment, matched)
    if layout.pipelines and not any(grid.boxes for grid in grids.values()):
        notes += (_NO_GRID,)
    stats = collective_stats(traces, matched, together.arrivals)
    return RunSplit(tuple(ranks), layout, alignment, matched, stats, schedule, holes, blamed, notes)


@dataclass(frozen=True, slots=True)
class _Together:
    """What only all ranks together tell."""

    matched: Matched
    arrivals: Arrivals
    alignment: Alignment
    layout: Layout


def _rank(index: int, trace: RankTrace, work: Work, steps: Steps, together: _Together) -> RankSplit:
    lead_ns, layout = together.alignment.lead_ns[index], together.layout
    found = _attributed(index, trace, work, steps, together)
    boxes = boxes_of(trace)
    bands = [_cut(found.band, i) for i in range(len(steps.windows))]
    grids = [
        _grid(trace.rank, window, boxes, band, lead_ns)
        for window, band in zip(steps.windows, bands, strict=True)
    ]
    axes = [layout.axis_of(group) for group in trace.groups]
    phases = phases_of(trace, steps.windows, layout)
    calls = found.exposed.call.tolist()
    groups = trace.calls.group_id[found.exposed.call].tolist()
    return RankSplit(
        trace=trace,
        steps=_step_splits(index, steps, found, grids, bands, together),
        attribution=found,
        grids=tuple(grids),
        axis=tuple(axes[group] if group >= 0 else None for group in groups),
        phase=tuple(phases[call] for call in calls),
        lead_ns=lead_ns,
    )


def _attributed(
    index: int, trace: RankTrace, work: Work, steps: Steps, together: _Together
) -> Attribution:
    lead_ns = together.alignment.lead_ns[index]
    pieces = pieces_of(index, trace, together.matched, together.arrivals, lead_ns, together.layout)
    if not trace.on_device:
        pieces = without_lag(pieces, work.compute)
    return attribute(steps.windows, work, pieces)


def _step_splits(
    index: int,
    steps: Steps,
    found: Attribution,
    grids: Sequence[StepGrid],
    bands: Sequence[Band],
    together: _Together,
) -> tuple[StepSplit, ...]:
    """The rank's steps on the common clock; a step that a guessed call held up is estimated."""
    lead_ns = together.alignment.lead_ns[index]
    guessed = together.arrivals.estimated[together.matched.of_trace(index)][found.exposed.call]
    estimated = set(found.exposed.window[guessed].tolist())
    covered = [covered_ns(g.busy, band, lead_ns) for g, band in zip(grids, bands, strict=True)]
    return tuple(
        StepSplit(
            rank=grids[i].rank,
            step=window.step,
            kind=window.kind,
            start_ns=window.start_ns + lead_ns,
            split=replace(found.splits[i], bubble_covered_ns=covered[i]),
            estimated=i in estimated,
        )
        for i, window in enumerate(steps.windows)
    )


def _grid(
    rank: int, window: StepWindow, boxes: Sequence[Box], band: Band, lead_ns: int
) -> StepGrid:
    inside = [box for box in boxes if window.start_ns <= box.start_ns < window.end_ns]
    return grid_of(rank, window.step, inside, band, lead_ns)


def _cut(band: Band, window: int) -> Band:
    rows = band.window == window
    return Band(band.window[rows], band.bucket[rows], band.start_ns[rows], band.end_ns[rows])


def _schedule(
    layout: Layout, ranks: Sequence[RankSplit], spec: RunSpec | None, ideal_bubble: IdealBubble
) -> Schedule:
    """The schedule that run.json states, else by the order of work on the last stage."""
    by_rank = {rank.trace.rank: rank for rank in ranks}
    line = next(line for line in layout.pipelines if all(rank in by_rank for rank in line))
    grid = next(grid for grid in by_rank[line[-1]].grids if grid.boxes)
    chunks = len({box.stage for box in grid.boxes})
    microbatches = len({box.microbatch for box in grid.boxes})
    stated = spec.training.schedule if spec and spec.training else None
    name = schedule_named(stated) if stated else schedule_of(grid.boxes, chunks)
    return Schedule(name, microbatches, ideal_bubble(name, len(line), microbatches, chunks))


def _ideal_ns(
    holes: Sequence[StageHoles], schedule: Schedule | None
) -> Mapping[tuple[int, int], int]:
    """The bubble that the schedule itself costs each (rank, step)."""
    ideal = (schedule.ideal_bubble_fraction if schedule else None) or 0.0
    return {(hole.rank, hole.step): int(hole.window_ns * ideal) for hole in holes}


def _time(rank: RankSplit) -> RankTime:
    numbers = [step.step for step in rank.steps]
    band, exposed = rank.attribution.band, rank.attribution.exposed
    return rank_time(rank.trace.rank, numbers, band, exposed, rank.axis, rank.lead_ns)


def _check(ranks: Sequence[RankSplit], blamed: Sequence[Blame]) -> None:
    """Every instant of skew and bubble is blamed once."""
    splits = [step.split for rank in ranks for step in rank.steps]
    for bucket, caused in (
        (SKEW, [b.skew_ns for b in blamed]),
        (BUBBLE, [b.bubble_ns for b in blamed]),
    ):
        held = sum(split.buckets_ns[bucket] for split in splits)
        assert sum(caused) == held, f"{BUCKETS[bucket]}: {sum(caused)} ns blamed of {held}"


def _notes(
    traces: Sequence[RankTrace],
    steps: Sequence[Steps],
    layout: Layout,
    alignment: Alignment,
    matched: Matched,
) -> tuple[Note, ...]:
    of_ranks = [
        replace(note, rank=trace.rank)
        for trace, found in zip(traces, steps, strict=True)
        for note in (*trace.notes, *found.notes)
    ]
    present, world_size = {t.rank for t in traces}, max(t.world_size for t in traces)
    missing = [rank for rank in range(world_size) if rank not in present]
    of_traces = [matched.key[matched.of_trace(i)] for i in range(len(traces))]
    unmatched = [
        _unmatched(trace.rank, int((keys < 0).sum()), len(keys))
        for trace, keys in zip(traces, of_traces, strict=True)
        if (keys < 0).any()
    ]
    absent = [_absent(missing, world_size)] if missing else []
    return (*absent, *layout.notes, *alignment.notes, *of_ranks, *matched.notes, *unmatched)


def _unmatched(rank: int, count: int, total: int) -> Note:
    lack = f"{count} of {total} collectives and messages have no counterpart in the recording"
    return Note(
        "unmatched", f"{lack}: their wait is an estimate, none where sizes are unknown", rank
    )


def _absent(missing: Sequence[int], world_size: int) -> Note:
    some = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    text = f"{len(missing)} of {world_size} ranks are not in the recording: {some}"
    return Note("ranks_missing", text)
