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
    compute_coverage,
    compute_overlaps,
    infer_phases,
)
from stepsplit.analyzer.split.bandwidth import (
    CollectiveRow,
    StepCallsRow,
    compute_collective_stats,
    count_step_calls,
)
from stepsplit.analyzer.split.blame import (
    Blame,
    RankTime,
    Workload,
    blame,
    build_rank_time,
    compute_workloads,
)
from stepsplit.analyzer.split.classify import Work, collect_work
from stepsplit.analyzer.split.clock_sync import align
from stepsplit.analyzer.split.critical_path import (
    CriticalPaths,
    build_timeline,
    find_critical_paths,
)
from stepsplit.analyzer.split.idle import IdleCause, find_idle_causes
from stepsplit.analyzer.split.kernels import (
    Contention,
    KernelFamily,
    measure_contention,
    sum_kernel_families,
)
from stepsplit.analyzer.split.lateness import (
    Lateness,
    SlowKernel,
    compute_lateness,
    find_slow_kernels,
)
from stepsplit.analyzer.split.matching import Alignment, Clock, MatchedCalls, match
from stepsplit.analyzer.split.mesh import RankLayout, infer_layout
from stepsplit.analyzer.split.pipeline import (
    MicrobatchSlot,
    StageBubble,
    StepGrid,
    build_grid,
    compute_stage_bubbles,
    detect_schedule,
    find_slots,
    normalize_schedule,
    sum_bubble_covered_ns,
)
from stepsplit.analyzer.split.steps import (
    Steps,
    StepWindow,
    Variation,
    compute_variation,
    find_steps,
    unify_step_numbers,
)
from stepsplit.analyzer.split.strategies import detect_strategies
from stepsplit.analyzer.split.strategy_evidence import Strategy
from stepsplit.analyzer.split.transfers import (
    BUBBLE,
    SKEW,
    Arrivals,
    Pieces,
    compute_arrivals,
    remove_lag,
    split_calls,
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
    matched: MatchedCalls
    arrivals: Arrivals
    collectives: tuple[CollectiveRow, ...]
    step_calls: tuple[StepCallsRow, ...]
    schedule: Schedule | None
    stage_bubbles: tuple[StageBubble, ...]
    blame: tuple[Blame, ...]
    detail: Detail
    notes: tuple[Note, ...]
    strategies: tuple[Strategy, ...]


def split_run(
    traces: Sequence[RankTrace], spec: RunSpec | None, ideal_bubble: IdealBubble
) -> RunSplit:
    """Splits all ranks of a recording; traces are in rank order and not empty."""
    layout = infer_layout(spec, traces)
    work = [collect_work(trace) for trace in traces]
    matched, alignment = _match_and_align(traces)
    steps = unify_step_numbers([find_steps(trace) for trace in traces], matched)
    context = RunContext(matched, compute_arrivals(traces, matched, alignment), alignment, layout)
    ranks = [
        split_rank(i, *one, context) for i, one in enumerate(zip(traces, work, steps, strict=True))
    ]
    grids = {(g.rank, g.step): g for rank in ranks for g in rank.grids}
    stage_bubbles = compute_stage_bubbles(layout.pipelines, grids)
    schedule = _infer_schedule(layout, ranks, spec, ideal_bubble) if stage_bubbles else None
    work_done = compute_workloads(traces, [one.windows for one in steps])
    times = [
        _build_time(i, *one, context) for i, one in enumerate(zip(ranks, work_done, strict=True))
    ]
    blame_rows = blame(times, _compute_ideal_ns(stage_bubbles, schedule))
    _check_blame(ranks, blame_rows)
    notes = _collect_notes(traces, steps, layout, alignment, matched)
    if layout.pipelines and not any(grid.slots for grid in grids.values()):
        notes += (_NO_GRID,)
    return RunSplit(
        ranks=tuple(ranks),
        layout=layout,
        alignment=alignment,
        matched=matched,
        arrivals=context.arrivals,
        collectives=compute_collective_stats(traces, matched, context.arrivals),
        step_calls=count_step_calls(traces, steps, matched),
        schedule=schedule,
        stage_bubbles=stage_bubbles,
        blame=blame_rows,
        detail=compute_detail(ranks, context),
        notes=notes,
        strategies=detect_strategies(traces, steps, matched, layout, _find_schedule_name(schedule)),
    )


def _match_and_align(traces: Sequence[RankTrace]) -> tuple[MatchedCalls, Alignment]:
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


def _infer_schedule(
    layout: RankLayout, ranks: Sequence[RankSplit], spec: RunSpec | None, ideal_bubble: IdealBubble
) -> Schedule:
    """The schedule named in run.json, else inferred from the order of work on all stages."""
    by_rank = {rank.trace.rank: rank for rank in ranks}
    line = next(line for line in layout.pipelines if all(rank in by_rank for rank in line))
    slots = {(g.rank, g.step): g.slots for rank in line for g in by_rank[rank].grids}
    steps = sorted({step for _, step in slots})
    detected = detect_schedule([[slots.get((rank, step), ()) for rank in line] for step in steps])
    configured = spec.training.schedule if spec and spec.training else None
    name = normalize_schedule(configured) if configured else detected.name or _UNKNOWN
    ideal = ideal_bubble(name, len(line), detected.microbatches, detected.chunks, detected.times_ns)
    return Schedule(name, detected.microbatches, ideal, detected.chunks, detected.times_ns)


def _find_schedule_name(schedule: Schedule | None) -> str | None:
    return None if schedule is None or schedule.name == _UNKNOWN else schedule.name


def _compute_ideal_ns(
    bubbles: Sequence[StageBubble], schedule: Schedule | None
) -> Mapping[tuple[int, int], int]:
    """The ideal bubble of the schedule for each (rank, step), in ns."""
    ideal = (schedule.ideal_bubble_fraction if schedule else None) or 0.0
    return {(bubble.rank, bubble.step): int(bubble.window_ns * ideal) for bubble in bubbles}


def _build_time(index: int, rank: RankSplit, work: Workload, context: RunContext) -> RankTime:
    rows, arrivals = context.matched.slice_trace(index), context.arrivals
    return build_rank_time(
        rank.trace, rows, rank.attribution, rank.numbers, rank.axis, rank.clock, arrivals, work
    )


def _check_blame(ranks: Sequence[RankSplit], blame_rows: Sequence[Blame]) -> None:
    """Asserts that every instant of skew and bubble is blamed exactly once."""
    splits = [step.split for rank in ranks for step in rank.steps]
    for bucket, caused in (
        (SKEW, [b.skew_ns for b in blame_rows]),
        (BUBBLE, [b.bubble_ns for b in blame_rows]),
    ):
        total_ns = sum(split.buckets_ns[bucket] for split in splits)
        assert sum(caused) == total_ns, f"{BUCKETS[bucket]}: blamed {sum(caused)} of {total_ns} ns"


def _collect_notes(
    traces: Sequence[RankTrace],
    steps: Sequence[Steps],
    layout: RankLayout,
    alignment: Alignment,
    matched: MatchedCalls,
) -> tuple[Note, ...]:
    rank_notes = [
        replace(note, rank=trace.rank)
        for trace, found in zip(traces, steps, strict=True)
        for note in (*trace.notes, *found.notes)
    ]
    present, world_size = {t.rank for t in traces}, max(t.world_size for t in traces)
    missing = [rank for rank in range(world_size) if rank not in present]
    of_traces = [matched.key[matched.slice_trace(i)] for i in range(len(traces))]
    unmatched = [
        _note_unmatched(trace.rank, int((keys < 0).sum()), len(keys))
        for trace, keys in zip(traces, of_traces, strict=True)
        if (keys < 0).any()
    ]
    absent = [_note_missing_ranks(missing, world_size)] if missing else []
    return (*absent, *layout.notes, *alignment.notes, *rank_notes, *matched.notes, *unmatched)


def _note_unmatched(rank: int, count: int, total: int) -> Note:
    problem = f"{count} of {total} collectives and messages have no matching call on the peer ranks"
    return Note(
        "unmatched", f"{problem}: their wait time is estimated (not available without sizes)", rank
    )


def _note_missing_ranks(missing: Sequence[int], world_size: int) -> Note:
    text = f"{len(missing)} of {world_size} ranks are missing from the recording: "
    text += units.format_number_list(missing)
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


def compute_detail(ranks: Sequence[RankSplit], context: RunContext) -> Detail:
    """Computes the detail of all ranks; ranks is not empty."""
    traces = [one.trace for one in ranks]
    windows = [one.windows for one in ranks]
    matched, arrivals, layout = context.matched, context.arrivals, context.layout
    return Detail(
        idle=tuple(find_idle_causes(one.trace, one.attribution.band) for one in ranks),
        families=sum_kernel_families(traces, windows),
        slow_kernels=find_slow_kernels(
            traces, windows, [layout.find_stage(trace.rank) for trace in traces]
        ),
        contention=tuple(_measure_contention(one) for one in ranks),
        variation=compute_variation([step for one in ranks for step in one.steps]),
        paths=find_critical_paths(
            [
                build_timeline(one.trace, one.attribution, one.numbers, one.axis, one.clock)
                for one in ranks
                if one.steps
            ]
        ),
        lateness=compute_lateness(traces, matched, arrivals, layout, [one.steps for one in ranks]),
        overlaps=tuple(row for one in ranks for row in _compute_overlaps(one, context)),
        coverage=compute_coverage(traces, matched, layout),
    )


def _measure_contention(rank: RankSplit) -> Contention | None:
    """Contention on GPU ranks only: op times of a CPU run depend mostly on who shares the core."""
    if not rank.trace.on_device:
        return None
    return measure_contention(rank.trace, rank.windows, rank.pieces)


def _compute_overlaps(rank: RankSplit, context: RunContext) -> tuple[Overlap, ...]:
    axes = [context.layout.find_axis(group) for group in rank.trace.groups]
    windows, compute = rank.windows.counted, rank.work.compute
    return compute_overlaps(rank.trace.rank, rank.trace.calls, axes, windows, rank.pieces, compute)


# The split of one rank.


@dataclass(frozen=True, slots=True)
class RunContext:
    """What needs all ranks: matched calls, arrivals, clocks (in trace order) and rank layout."""

    matched: MatchedCalls
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
    index: int, trace: RankTrace, work: Work, windows: Steps, context: RunContext
) -> RankSplit:
    """Splits one rank; index is the position of its trace."""
    clock, layout = context.alignment.clocks[index], context.layout
    rows = context.matched.slice_trace(index)
    pieces = split_calls(trace, rows, context.arrivals, clock, layout)
    if not trace.on_device:
        pieces = remove_lag(pieces, work.compute)
    attribution = attribute(windows.windows, work, pieces)
    slots = find_slots(trace, layout).slots
    bands = [_select_window(attribution.band, i, clock) for i in range(len(windows.windows))]
    grids = _build_grids(trace.rank, windows.windows, slots, bands, clock)
    guessed = attribution.exposed.window[context.arrivals.estimated[rows][attribution.exposed.call]]
    phases = infer_phases(trace, windows.windows, layout)
    return RankSplit(
        trace=trace,
        windows=windows,
        work=work,
        pieces=pieces,
        attribution=attribution,
        steps=_build_step_splits(windows, attribution, grids, bands, set(guessed.tolist()), clock),
        grids=grids,
        axis=_find_axes(trace, attribution, layout),
        phase=tuple(phases[call] for call in attribution.exposed.call.tolist()),
        clock=clock,
    )


def _find_axes(
    trace: RankTrace, attribution: Attribution, layout: RankLayout
) -> tuple[str | None, ...]:
    """The mesh axis of each exposed row."""
    axes = (*(layout.find_axis(group) for group in trace.groups), None)
    return tuple(axes[group] for group in trace.calls.group_id[attribution.exposed.call].tolist())


def _build_step_splits(
    windows: Steps,
    attribution: Attribution,
    grids: Sequence[StepGrid],
    bands: Sequence[BucketBands],
    estimated: set[int],
    clock: Clock,
) -> tuple[StepSplit, ...]:
    """The step splits on the common clock; a step blocked by an estimated call is estimated."""
    covered = [sum_bubble_covered_ns(g.busy, band) for g, band in zip(grids, bands, strict=True)]
    return tuple(
        StepSplit(
            rank=grids[i].rank,
            step=window.step,
            kind=window.kind,
            start_ns=clock.map_instant_to_common_ns(window.start_ns),
            split=replace(attribution.splits[i], bubble_covered_ns=covered[i]),
            estimated=i in estimated,
        )
        for i, window in enumerate(windows.windows)
    )


def _build_grids(
    rank: int,
    windows: Sequence[StepWindow],
    slots: Sequence[MicrobatchSlot],
    bands: Sequence[BucketBands],
    clock: Clock,
) -> tuple[StepGrid, ...]:
    """The grid of each window, from the slots that start in it; the result is on the common
    clock."""
    own = np.array([(box.start_ns, box.end_ns) for box in slots], dtype=np.int64).reshape(-1, 2)
    start, end = (
        clock.map_to_common_ns(own[:, 0]).tolist(),
        clock.map_to_common_ns(own[:, 1]).tolist(),
    )
    common_slots = [
        replace(box, start_ns=low, end_ns=high)
        for box, low, high in zip(slots, start, end, strict=True)
    ]
    edges = own[:, 0].searchsorted([(w.start_ns, w.end_ns) for w in windows]).reshape(-1, 2)
    return tuple(
        build_grid(rank, window.step, common_slots[low:high], band)
        for window, band, (low, high) in zip(windows, bands, edges.tolist(), strict=True)
    )


def _select_window(band: BucketBands, window: int, clock: Clock) -> BucketBands:
    """The bucket bands of one window, on the common clock."""
    rows = slice(*band.window.searchsorted([window, window + 1]).tolist())
    start, end = (
        clock.map_to_common_ns(band.start_ns[rows]),
        clock.map_to_common_ns(band.end_ns[rows]),
    )
    return BucketBands(band.window[rows], band.bucket[rows], start, end)
