"""Split of a whole recording: every rank and every step, on one clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS, StepSplit
from stepsplit.analyzer.split.attribute import (
    Attribution,
    BucketBands,
    Coverage,
    Overlap,
    attribute,
    coverage_of,
    overlaps_of,
    phases_of,
)
from stepsplit.analyzer.split.bandwidth import (
    CollectiveRow,
    StepCallsRow,
    collective_stats,
    step_calls,
)
from stepsplit.analyzer.split.blame import Blame, RankTime, Workload, blame, rank_time, workloads
from stepsplit.analyzer.split.classify import Work, work_of
from stepsplit.analyzer.split.clock_sync import align
from stepsplit.analyzer.split.critical_path import CriticalPaths, critical_paths, timeline_of
from stepsplit.analyzer.split.idle import IdleCause, idle_causes
from stepsplit.analyzer.split.kernels import (
    Contention,
    KernelFamily,
    kernel_families,
    slowdown_under_communication,
)
from stepsplit.analyzer.split.lateness import Lateness, SlowKernel, lateness_of, slow_kernels
from stepsplit.analyzer.split.matching import Alignment, Clock, Matched, match
from stepsplit.analyzer.split.mesh import RankLayout, layout_of
from stepsplit.analyzer.split.pipeline import (
    Box,
    StageHoles,
    StepGrid,
    covered_ns,
    found_boxes,
    grid_of,
    holes_of,
    schedule_named,
    schedule_seen,
)
from stepsplit.analyzer.split.steps import (
    Steps,
    StepWindow,
    Variation,
    agreed,
    steps_of,
    variation_of,
)
from stepsplit.analyzer.split.strategies import strategies_of
from stepsplit.analyzer.split.strategy_evidence import Strategy
from stepsplit.analyzer.split.transfers import (
    BUBBLE,
    SKEW,
    Arrivals,
    Pieces,
    arrivals_of,
    pieces_of,
    without_lag,
)
from stepsplit.analyzer.trace import Note, RankTrace
from stepsplit.collectors.run_spec import RunSpec

# The split of a whole recording.

IdealBubble = Callable[[str, int, int, int, tuple[float, float, float] | None], float | None]
"""(schedule, stages, microbatches, chunks, times_ns) -> ideal bubble fraction for equal stages;
times_ns are the forward, input-gradient and weight-gradient times of one microbatch on one
stage."""

_UNKNOWN = "unknown"

_NO_GRID = Note(
    "no_grid",
    "no pipeline grid: forwards and backwards are not annotated and cannot be inferred from the "
    "messages; record with profile_run or one of torch's interleaved schedules to annotate them",
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The pipeline schedule as run: microbatches per step, chunks per rank, ideal bubble.

    times_ns are the forward, input-gradient and weight-gradient times of one microbatch on one
    stage; None if the backward is not split.
    """

    name: str
    microbatches: int
    ideal_bubble_fraction: float | None
    chunks: int = 1
    times_ns: tuple[float, float, float] | None = None


@dataclass(frozen=True, slots=True)
class RunSplit:
    """Result of split_run: the splits of all ranks and everything derived from them."""

    ranks: tuple[RankSplit, ...]
    layout: RankLayout
    alignment: Alignment
    matched: Matched
    arrivals: Arrivals
    collectives: tuple[CollectiveRow, ...]
    step_calls: tuple[StepCallsRow, ...]
    schedule: Schedule | None
    holes: tuple[StageHoles, ...]
    blame: tuple[Blame, ...]
    detail: Detail
    notes: tuple[Note, ...]
    strategies: tuple[Strategy, ...]


def split_run(
    traces: Sequence[RankTrace], spec: RunSpec | None, ideal_bubble: IdealBubble
) -> RunSplit:
    """Splits all ranks of a recording; traces are in rank order and not empty."""
    layout = layout_of(spec, traces)
    work = [work_of(trace) for trace in traces]
    matched, alignment = _matched_and_aligned(traces)
    steps = agreed([steps_of(trace) for trace in traces], matched)
    together = Together(matched, arrivals_of(traces, matched, alignment), alignment, layout)
    ranks = [
        split_rank(i, *one, together) for i, one in enumerate(zip(traces, work, steps, strict=True))
    ]
    grids = {(g.rank, g.step): g for rank in ranks for g in rank.grids}
    holes = holes_of(layout.pipelines, grids)
    schedule = _schedule(layout, ranks, spec, ideal_bubble) if holes else None
    work_done = workloads(traces, [one.windows for one in steps])
    times = [_time(i, *one, together) for i, one in enumerate(zip(ranks, work_done, strict=True))]
    blamed = blame(times, _ideal_ns(holes, schedule))
    _check(ranks, blamed)
    notes = _notes(traces, steps, layout, alignment, matched)
    if layout.pipelines and not any(grid.boxes for grid in grids.values()):
        notes += (_NO_GRID,)
    return RunSplit(
        ranks=tuple(ranks),
        layout=layout,
        alignment=alignment,
        matched=matched,
        arrivals=together.arrivals,
        collectives=collective_stats(traces, matched, together.arrivals),
        step_calls=step_calls(traces, steps, matched),
        schedule=schedule,
        holes=holes,
        blame=blamed,
        detail=detail_of(ranks, together),
        notes=notes,
        strategies=strategies_of(traces, steps, matched, layout, _named(schedule)),
    )


def _matched_and_aligned(traces: Sequence[RankTrace]) -> tuple[Matched, Alignment]:
    """Matches the calls and aligns the clocks, a second time with aligned clocks for several hosts.

    Messages between hosts whose recordings start at different times are matched by time, which
    needs clocks aligned by collectives first.
    """
    matched = match(traces)
    alignment = align(traces, matched)
    if len({trace.host for trace in traces}) > 1 and matched.is_message.any():
        matched = match(traces, alignment)
        alignment = align(traces, matched)
    return matched, alignment


def _schedule(
    layout: RankLayout, ranks: Sequence[RankSplit], spec: RunSpec | None, ideal_bubble: IdealBubble
) -> Schedule:
    """The schedule named in run.json, else inferred from the order of work on all stages."""
    by_rank = {rank.trace.rank: rank for rank in ranks}
    line = next(line for line in layout.pipelines if all(rank in by_rank for rank in line))
    boxes = {(g.rank, g.step): g.boxes for rank in line for g in by_rank[rank].grids}
    steps = sorted({step for _, step in boxes})
    seen = schedule_seen([[boxes.get((rank, step), ()) for rank in line] for step in steps])
    stated = spec.training.schedule if spec and spec.training else None
    name = schedule_named(stated) if stated else seen.name or _UNKNOWN
    ideal = ideal_bubble(name, len(line), seen.microbatches, seen.chunks, seen.times_ns)
    return Schedule(name, seen.microbatches, ideal, seen.chunks, seen.times_ns)


def _named(schedule: Schedule | None) -> str | None:
    return None if schedule is None or schedule.name == _UNKNOWN else schedule.name


def _ideal_ns(
    holes: Sequence[StageHoles], schedule: Schedule | None
) -> Mapping[tuple[int, int], int]:
    """The ideal bubble of the schedule for each (rank, step), in ns."""
    ideal = (schedule.ideal_bubble_fraction if schedule else None) or 0.0
    return {(hole.rank, hole.step): int(hole.window_ns * ideal) for hole in holes}


def _time(index: int, rank: RankSplit, work: Workload, together: Together) -> RankTime:
    rows, arrivals = together.matched.of_trace(index), together.arrivals
    return rank_time(
        rank.trace, rows, rank.attribution, rank.numbers, rank.axis, rank.clock, arrivals, work
    )


def _check(ranks: Sequence[RankSplit], blamed: Sequence[Blame]) -> None:
    """Asserts that every instant of skew and bubble is blamed exactly once."""
    splits = [step.split for rank in ranks for step in rank.steps]
    for bucket, caused in (
        (SKEW, [b.skew_ns for b in blamed]),
        (BUBBLE, [b.bubble_ns for b in blamed]),
    ):
        held = sum(split.buckets_ns[bucket] for split in splits)
        assert sum(caused) == held, f"{BUCKETS[bucket]}: blamed {sum(caused)} of {held} ns"


def _notes(
    traces: Sequence[RankTrace],
    steps: Sequence[Steps],
    layout: RankLayout,
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
    lack = f"{count} of {total} collectives and messages have no matching call on the peer ranks"
    return Note(
        "unmatched", f"{lack}: their wait time is estimated (not available without sizes)", rank
    )


def _absent(missing: Sequence[int], world_size: int) -> Note:
    text = f"{len(missing)} of {world_size} ranks are missing from the recording: "
    text += units.listed(missing)
    return Note("ranks_missing", text)


# Detail of the split: idle causes, kernel families, slow kernels, stragglers, critical path.


@dataclass(frozen=True, slots=True)
class Detail:
    """Derived results of a recording; idle and contention have one entry per rank.

    The window of an idle cause is an index into the steps of its rank; contention is None if it
    cannot be measured on that rank.
    """

    idle: tuple[tuple[IdleCause, ...], ...]
    families: tuple[KernelFamily, ...]
    slow_kernels: tuple[SlowKernel, ...]
    contention: tuple[Contention | None, ...]
    variation: Variation
    paths: CriticalPaths
    lateness: tuple[Lateness, ...]
    overlaps: tuple[Overlap, ...]
    coverage: tuple[Coverage, ...]


def detail_of(ranks: Sequence[RankSplit], together: Together) -> Detail:
    """Computes the detail of all ranks; ranks is not empty."""
    traces = [one.trace for one in ranks]
    windows = [one.windows for one in ranks]
    matched, arrivals, layout = together.matched, together.arrivals, together.layout
    return Detail(
        idle=tuple(idle_causes(one.trace, one.attribution.band) for one in ranks),
        families=kernel_families(traces, windows),
        slow_kernels=slow_kernels(traces, windows),
        contention=tuple(_contention(one) for one in ranks),
        variation=variation_of([step for one in ranks for step in one.steps]),
        paths=critical_paths(
            [
                timeline_of(one.trace, one.attribution, one.numbers, one.axis, one.clock)
                for one in ranks
                if one.steps
            ]
        ),
        lateness=lateness_of(traces, matched, arrivals, layout, [one.steps for one in ranks]),
        overlaps=tuple(row for one in ranks for row in _overlaps(one, together)),
        coverage=coverage_of(traces, matched, layout),
    )


def _contention(one: RankSplit) -> Contention | None:
    """Contention on GPU ranks only: op times of a CPU run depend mostly on who shares the core."""
    if not one.trace.on_device:
        return None
    return slowdown_under_communication(one.trace, one.windows, one.pieces)


def _overlaps(one: RankSplit, together: Together) -> tuple[Overlap, ...]:
    axes = [together.layout.axis_of(group) for group in one.trace.groups]
    windows, compute = one.windows.counted, one.work.compute
    return overlaps_of(one.trace.rank, one.trace.calls, axes, windows, one.pieces, compute)


# The split of one rank.


@dataclass(frozen=True, slots=True)
class Together:
    """What needs all ranks: matched calls, arrivals, clocks (in trace order) and rank layout."""

    matched: Matched
    arrivals: Arrivals
    alignment: Alignment
    layout: RankLayout


@dataclass(frozen=True, slots=True)
class RankSplit:
    """The split of one rank: steps and grids on the common clock, everything else on its own clock.

    steps and grids have one entry per window, axis and phase one entry per exposed row.
    """

    trace: RankTrace
    windows: Steps
    work: Work
    pieces: Pieces
    attribution: Attribution
    steps: tuple[StepSplit, ...]
    grids: tuple[StepGrid, ...]
    axis: tuple[str | None, ...]
    phase: tuple[str, ...]
    clock: Clock

    @property
    def numbers(self) -> tuple[int, ...]:
        """The number of each step."""
        return tuple(step.step for step in self.steps)


def split_rank(
    index: int, trace: RankTrace, work: Work, windows: Steps, together: Together
) -> RankSplit:
    """Splits one rank; index is the position of its trace."""
    clock, layout = together.alignment.clocks[index], together.layout
    rows = together.matched.of_trace(index)
    pieces = pieces_of(trace, rows, together.arrivals, clock, layout)
    if not trace.on_device:
        pieces = without_lag(pieces, work.compute)
    found = attribute(windows.windows, work, pieces)
    boxes = found_boxes(trace, layout).boxes
    bands = [_cut(found.band, i, clock) for i in range(len(windows.windows))]
    grids = _grids(trace.rank, windows.windows, boxes, bands, clock)
    guessed = found.exposed.window[together.arrivals.estimated[rows][found.exposed.call]]
    phases = phases_of(trace, windows.windows, layout)
    return RankSplit(
        trace=trace,
        windows=windows,
        work=work,
        pieces=pieces,
        attribution=found,
        steps=_steps(windows, found, grids, bands, set(guessed.tolist()), clock),
        grids=grids,
        axis=_axes(trace, found, layout),
        phase=tuple(phases[call] for call in found.exposed.call.tolist()),
        clock=clock,
    )


def _axes(trace: RankTrace, found: Attribution, layout: RankLayout) -> tuple[str | None, ...]:
    """The mesh axis of each exposed row."""
    axes = (*(layout.axis_of(group) for group in trace.groups), None)
    return tuple(axes[group] for group in trace.calls.group_id[found.exposed.call].tolist())


def _steps(
    windows: Steps,
    found: Attribution,
    grids: Sequence[StepGrid],
    bands: Sequence[BucketBands],
    estimated: set[int],
    clock: Clock,
) -> tuple[StepSplit, ...]:
    """The step splits on the common clock; a step blocked by an estimated call is estimated."""
    covered = [covered_ns(g.busy, band) for g, band in zip(grids, bands, strict=True)]
    return tuple(
        StepSplit(
            rank=grids[i].rank,
            step=window.step,
            kind=window.kind,
            start_ns=clock.common_at(window.start_ns),
            split=replace(found.splits[i], bubble_covered_ns=covered[i]),
            estimated=i in estimated,
        )
        for i, window in enumerate(windows.windows)
    )


def _grids(
    rank: int,
    windows: Sequence[StepWindow],
    boxes: Sequence[Box],
    bands: Sequence[BucketBands],
    clock: Clock,
) -> tuple[StepGrid, ...]:
    """The grid of each window, from the slots that start in it; the result is on the common
    clock."""
    own = np.array([(box.start_ns, box.end_ns) for box in boxes], dtype=np.int64).reshape(-1, 2)
    start, end = clock.common_ns(own[:, 0]).tolist(), clock.common_ns(own[:, 1]).tolist()
    moved = [
        replace(box, start_ns=low, end_ns=high)
        for box, low, high in zip(boxes, start, end, strict=True)
    ]
    edges = own[:, 0].searchsorted([(w.start_ns, w.end_ns) for w in windows]).reshape(-1, 2)
    return tuple(
        grid_of(rank, window.step, moved[low:high], band)
        for window, band, (low, high) in zip(windows, bands, edges.tolist(), strict=True)
    )


def _cut(band: BucketBands, window: int, clock: Clock) -> BucketBands:
    """The bucket bands of one window, on the common clock."""
    rows = slice(*band.window.searchsorted([window, window + 1]).tolist())
    start, end = clock.common_ns(band.start_ns[rows]), clock.common_ns(band.end_ns[rows])
    return BucketBands(band.window[rows], band.bucket[rows], start, end)
