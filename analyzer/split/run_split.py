"""A whole recording split: every rank, every step, on one clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.split.blame.blame import Blame, blame
from stepsplit.analyzer.split.blame.levels import RankTime, rank_time
from stepsplit.analyzer.split.blame.workload import Workload, workloads
from stepsplit.analyzer.split.calls.arrivals import Arrivals, arrivals_of
from stepsplit.analyzer.split.calls.bandwidth import CollectiveStat, collective_stats
from stepsplit.analyzer.split.calls.match import Matched, match
from stepsplit.analyzer.split.calls.step_calls import StepCalls, step_calls
from stepsplit.analyzer.split.calls.waits import BUBBLE, SKEW
from stepsplit.analyzer.split.classify import work_of
from stepsplit.analyzer.split.clocks.align import align
from stepsplit.analyzer.split.clocks.clock import Alignment
from stepsplit.analyzer.split.detail import Detail, detail_of
from stepsplit.analyzer.split.mesh.layout import Layout, layout_of
from stepsplit.analyzer.split.pipeline.grid import StageHoles, holes_of
from stepsplit.analyzer.split.pipeline.schedule_kind import schedule_named, schedule_seen
from stepsplit.analyzer.split.rank_split import RankSplit, Together, split_rank
from stepsplit.analyzer.split.same_steps import agreed
from stepsplit.analyzer.split.steps import Steps, steps_of
from stepsplit.analyzer.split.strategy.recognize import strategies_of
from stepsplit.analyzer.split.strategy.strategy import Strategy
from stepsplit.analyzer.trace import Note, RankTrace
from stepsplit.collectors.run_spec import RunSpec

IdealBubble = Callable[[str, int, int, int, tuple[float, float, float] | None], float | None]
"""(schedule, stages, microbatches, chunks, times_ns) -> the bubble fraction of equal stages;
times_ns of a microbatch on a stage: forward, input and weight gradient."""
_UNKNOWN = "unknown"
_NO_GRID = Note(
    "no_grid",
    "forwards and backwards are not marked, and the messages do not tell them: no pipeline grid; "
    "profile_run and torch's interleaved schedules mark them",
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The pipeline schedule as run: microbatches a step, chunks a rank, and its ideal bubble.

    times_ns is what one microbatch takes on a stage: forward, input and weight gradient; None where
    the backward is not split.
    """

    name: str
    microbatches: int
    ideal_bubble_fraction: float | None
    chunks: int = 1
    times_ns: tuple[float, float, float] | None = None


@dataclass(frozen=True, slots=True)
class RunSplit:
    """Everything that the split knows of a recording."""

    ranks: tuple[RankSplit, ...]
    layout: Layout
    alignment: Alignment
    matched: Matched
    arrivals: Arrivals
    collectives: tuple[CollectiveStat, ...]
    step_calls: tuple[StepCalls, ...]
    schedule: Schedule | None
    holes: tuple[StageHoles, ...]
    blame: tuple[Blame, ...]
    detail: Detail
    notes: tuple[Note, ...]
    strategies: tuple[Strategy, ...]


def split_run(
    traces: Sequence[RankTrace],
    spec: RunSpec | None,
    ideal_bubble: IdealBubble,
    rules: Rules = BUILT_IN,
) -> RunSplit:
    """The split of all ranks. traces are in the order of their ranks, at least one."""
    layout = layout_of(spec, traces)
    work = [work_of(trace, rules) for trace in traces]
    matched, alignment = _matched_and_aligned(traces)
    steps = agreed([steps_of(trace) for trace in traces], matched)
    together = Together(matched, arrivals_of(traces, matched, alignment), alignment, layout)
    ranks = [
        split_rank(i, *one, together) for i, one in enumerate(zip(traces, work, steps, strict=True))
    ]
    grids = {(g.rank, g.step): g for rank in ranks for g in rank.grids}
    holes = holes_of(layout.pipelines, grids)
    schedule = _schedule(layout, ranks, spec, ideal_bubble) if holes else None
    work_done = workloads(traces, [one.windows for one in steps], rules)
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
        detail=detail_of(ranks, together, rules),
        notes=notes,
        strategies=strategies_of(traces, steps, matched, layout, _named(schedule)),
    )


def _matched_and_aligned(traces: Sequence[RankTrace]) -> tuple[Matched, Alignment]:
    """The calls and the clocks; of several hosts, once more by the clocks that the first try gave.

    Messages between hosts whose windows begin apart are told by time, and time by collectives.
    """
    matched = match(traces)
    alignment = align(traces, matched)
    if len({trace.host for trace in traces}) > 1 and matched.is_message.any():
        matched = match(traces, alignment)
        alignment = align(traces, matched)
    return matched, alignment


def _schedule(
    layout: Layout, ranks: Sequence[RankSplit], spec: RunSpec | None, ideal_bubble: IdealBubble
) -> Schedule:
    """The schedule that run.json states, else by the order of work on all stages."""
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
    """The bubble that the schedule itself costs each (rank, step)."""
    ideal = (schedule.ideal_bubble_fraction if schedule else None) or 0.0
    return {(hole.rank, hole.step): int(hole.window_ns * ideal) for hole in holes}


def _time(index: int, rank: RankSplit, work: Workload, together: Together) -> RankTime:
    rows, arrivals = together.matched.of_trace(index), together.arrivals
    return rank_time(
        rank.trace, rows, rank.attribution, rank.numbers, rank.axis, rank.clock, arrivals, work
    )


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
    text = f"{len(missing)} of {world_size} ranks are not in the recording: {units.listed(missing)}"
    return Note("ranks_missing", text)
