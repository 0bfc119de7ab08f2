"""Split of a whole recording: every rank and every step, on one clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from operator import is_

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import Intervals
from stepsplit.analyzer.buckets import Bucket, StepSplit
from stepsplit.analyzer.split.attribute import Attribution, BucketBands, Exposed, attribute
from stepsplit.analyzer.split.bandwidth import (
    CollectiveRow,
    StepCallsRow,
    compute_collective_stats,
    count_step_calls,
)
from stepsplit.analyzer.split.clock import Alignment, Clock
from stepsplit.analyzer.split.clock_sync import align
from stepsplit.analyzer.split.contention import Contention, measure_contention
from stepsplit.analyzer.split.copy_ends import extend_copy_ends
from stepsplit.analyzer.split.coverage import Coverage, compute_coverage
from stepsplit.analyzer.split.gaps import HeldGaps, find_held_gaps
from stepsplit.analyzer.split.idle import IdleCause, IdleParts, find_idle_parts, sum_idle_causes
from stepsplit.analyzer.split.job_size import JobSize, find_job_size
from stepsplit.analyzer.split.kernels import KernelFamily, KernelSums, sum_kernel_families
from stepsplit.analyzer.split.matching import MatchedCalls, match
from stepsplit.analyzer.split.mesh import RankLayout, assign_message_groups, infer_layout
from stepsplit.analyzer.split.microbatch_slots import DetectedSlots, count_chunks, find_slots
from stepsplit.analyzer.split.overlap import Overlap, compute_overlaps
from stepsplit.analyzer.split.phases import infer_phases
from stepsplit.analyzer.split.pipeline import (
    StageBubble,
    StepGrid,
    build_grid,
    compute_stage_bubbles,
    sum_bubble_covered_ns,
)
from stepsplit.analyzer.split.schedule import detect_schedule, normalize_schedule
from stepsplit.analyzer.split.step_kinds import StepKind, find_step_kinds, mark_more_work
from stepsplit.analyzer.split.step_numbers import unify_step_numbers
from stepsplit.analyzer.split.step_times import Variation, compute_variation
from stepsplit.analyzer.split.steps import Steps, UsableRanks, select_usable_ranks
from stepsplit.analyzer.split.strategies import detect_strategies
from stepsplit.analyzer.split.strategy import Strategy
from stepsplit.analyzer.split.transfers import (
    Arrivals,
    Pieces,
    TransferModel,
    compute_arrivals,
    map_call_times,
    split_calls,
)
from stepsplit.analyzer.split.unnamed_groups import (
    FoundGroups,
    find_unnamed_groups,
    has_unnamed_calls,
)
from stepsplit.analyzer.split.work import Work, collect_work
from stepsplit.analyzer.split.world_group import assign_world_group, drop_lone_calls
from stepsplit.analyzer.trace import (
    COMPILES,
    RANKS_MISSING,
    WORLD_SIZE_UNKNOWN,
    Bool,
    Category,
    Group,
    Lack,
    Note,
    RankTrace,
    find_earlier_calls,
)
from stepsplit.collectors.formats.run_spec import Mesh, RunSpec

# The split of a whole recording.

IdealBubble = Callable[[str, int, int, int, tuple[float, float, float] | None], float | None]
"""(schedule, stages, microbatches, chunks, times_ns) -> ideal bubble fraction for equal stages;
times_ns are the forward, input-gradient and weight-gradient times of one microbatch on one
stage."""

_UNKNOWN = "unknown"

_MOST_IDLE = 0.95
"""Share of idle time from which a CPU run is suspected to be incomplete."""

_NO_GRID = Note(
    "no_grid",
    "no pipeline grid: forwards and backwards are not annotated and cannot be inferred from the "
    "messages; record with profile_run or one of torch's interleaved schedules to annotate them",
)


class Schedule(Struct, frozen=True):
    """The pipeline schedule as run: microbatches per step, chunks per rank, ideal bubble.

    times_ns are the forward, input-gradient and weight-gradient times of one microbatch on one
    stage; None if the backward is not split.
    """

    name: str
    microbatches: int
    ideal_bubble_fraction: float | None
    chunks: int = 1
    times_ns: tuple[float, float, float] | None = None


class RunSplit(Struct, frozen=True):
    """Result of split_run: the splits of all ranks and everything derived from them."""

    ranks: tuple[RankSplit, ...]
    size: JobSize
    layout: RankLayout
    alignment: Alignment
    matched: MatchedCalls
    arrivals: Arrivals
    collectives: tuple[CollectiveRow, ...]
    step_calls: tuple[StepCallsRow, ...]
    schedule: Schedule | None
    stage_bubbles: tuple[StageBubble, ...]
    detail: Detail
    notes: tuple[Note, ...]
    strategies: tuple[Strategy, ...]
    kinds: tuple[StepKind, ...] = ()


def split_run(
    traces: Sequence[RankTrace],
    spec: RunSpec | None,
    ideal_bubble: IdealBubble,
    mesh: Mesh | None = None,
    model: TransferModel | None = None,
) -> RunSplit:
    """Splits all ranks of a recording; traces are in rank order and not empty.

    mesh is the job's mesh as the user states it, which outweighs that of run.json. model says how
    long a call can take of which not all members were recorded.

    A rank without device data or steps is left out, with a note. Raises DataError if none is left.
    """
    usable = select_usable_ranks([drop_lone_calls(trace) for trace in traces])
    size = find_job_size(spec, usable.traces, mesh)
    named, found = None, FoundGroups(usable.traces, ())
    if has_unnamed_calls(usable.traces):
        # By the clocks and the steps that the calls with arguments show.
        named = _match_and_align(usable.traces)
        listed = [Group(g.name, g.ranks, g.description) for g in spec.groups] if spec else []
        listed += dict.fromkeys(group for trace in usable.traces for group in trace.groups)
        found = find_unnamed_groups(
            usable.traces, unify_step_numbers(usable.steps, named[0]), *named, listed,
            mesh if mesh is not None else spec.mesh if spec is not None else None, size,
        )  # fmt: skip
    traces = assign_world_group(found.traces)
    layout = infer_layout(spec, traces, mesh, size)
    traces = [assign_message_groups(trace, layout) for trace in traces]
    work = [collect_work(trace) for trace in traces]
    if named is not None and all(map(is_, traces, usable.traces)):
        matched, alignment = named
    else:
        matched, alignment = _match_and_align(traces)
    traces, matched = extend_copy_ends(traces, matched, alignment)
    steps = mark_more_work(traces, unify_step_numbers(usable.steps, matched))
    arrivals = compute_arrivals(traces, matched, alignment, model)
    context = RunContext(matched, arrivals, alignment, layout, count_chunks(traces, layout))
    ranks = [
        split_rank(i, *one, context) for i, one in enumerate(zip(traces, work, steps, strict=True))
    ]
    grids = {(g.rank, g.step): g for rank in ranks for g in rank.grids}
    stage_bubbles = compute_stage_bubbles(layout.pipelines, grids)
    schedule = (
        _infer_schedule(layout, ranks, spec, ideal_bubble, stage_bubbles) if stage_bubbles else None
    )
    notes = (*_collect_notes(usable, size, steps, layout, alignment, matched), *found.notes)
    notes += tuple(note for rank in ranks if (note := _note_few_ops(rank)) is not None)
    complete = any({rank.trace.rank for rank in ranks} >= {*line} for line in layout.pipelines)
    inferred = stage_bubbles if complete else [grid for grid in grids.values() if grid.slots]
    if layout.pipelines and not inferred:
        notes += (_NO_GRID,)
    if (
        schedule is not None
        and schedule.name == _UNKNOWN
        and not all(rank.slots.are_whole for rank in ranks)
    ):
        notes += (_SPLIT_UNKNOWN,)
    return RunSplit(
        ranks=tuple(ranks),
        size=size,
        layout=layout,
        alignment=alignment,
        matched=matched,
        arrivals=arrivals,
        collectives=compute_collective_stats(traces, matched, arrivals),
        step_calls=count_step_calls(traces, steps, matched),
        schedule=schedule,
        stage_bubbles=stage_bubbles,
        detail=compute_detail(ranks, context),
        notes=notes,
        strategies=detect_strategies(
            traces,
            steps,
            matched,
            layout,
            None if schedule is None or schedule.name == _UNKNOWN else schedule.name,
        ),
        kinds=find_step_kinds(traces, steps, matched, layout),
    )


def _match_and_align(traces: Sequence[RankTrace]) -> tuple[MatchedCalls, Alignment]:
    """Matches the calls and aligns the clocks, a second time with aligned clocks for several hosts.

    Messages between hosts whose recordings start at different times are matched by time, which
    needs clocks aligned by collectives first. Calls of ranks whose clocks nothing aligns are not
    matched.
    """
    matched = match(traces)
    alignment = align(traces, matched)
    by_time = len({trace.host for trace in traces}) > 1 and matched.is_message.any()
    if by_time or any(clock.island is not None for clock in alignment.clocks):
        matched = match(traces, alignment)
        alignment = align(traces, matched)
    return matched, alignment


_FITS_BETTER = 0.02
"""By how much microbatches of unequal length may leave less of a bubble than equal ones. If it is
less by more, work without marks was ordered as by another schedule, whose ideal is unknown."""


def _infer_schedule(
    layout: RankLayout,
    ranks: Sequence[RankSplit],
    spec: RunSpec | None,
    ideal_bubble: IdealBubble,
    bubbles: Sequence[StageBubble],
) -> Schedule:
    """The schedule named in run.json, else inferred from the order of work on all stages."""
    by_rank = {rank.trace.rank: rank for rank in ranks}
    line = next(line for line in layout.pipelines if all(rank in by_rank for rank in line))
    slots = {(g.rank, g.step): g.slots for rank in line for g in by_rank[rank].grids}
    steps = sorted({step for _, step in slots})
    detected = detect_schedule([[slots.get((rank, step), ()) for rank in line] for step in steps])
    configured = spec.training.schedule if spec and spec.training else None
    name = normalize_schedule(configured) if configured else detected.name or _UNKNOWN
    # An order of whole backwards is that of a zero-bubble schedule, too, if some rank may split
    # them and compute their weight gradients elsewhere.
    whole = all(by_rank[rank].slots.are_whole for rank in line)
    if not configured and detected.name in ("1f1b", "interleaved") and not whole:
        name = _UNKNOWN
    ideal = ideal_bubble(name, len(line), detected.microbatches, detected.chunks, detected.times_ns)
    measured = sum(one.bubble_ns for one in bubbles) / max(1, sum(one.window_ns for one in bubbles))
    if ideal is not None and ideal > measured + _FITS_BETTER:
        marked = any(rank.slots.are_marked for rank in ranks)
        ideal = ideal if configured or marked else None
    return Schedule(name, detected.microbatches, ideal, detected.chunks, detected.times_ns)


_SPLIT_UNKNOWN = Note(
    "schedule_unknown",
    "the pipeline schedule is 1F1B, or a zero-bubble one (ZB-H1) whose backwards are split: the "
    "messages do not show where weight gradients are computed, and no ideal bubble is named",
)


def _collect_notes(
    usable: UsableRanks,
    size: JobSize,
    steps: Sequence[Steps],
    layout: RankLayout,
    alignment: Alignment,
    matched: MatchedCalls,
) -> tuple[Note, ...]:
    traces = usable.traces
    present = {trace.rank for trace in traces} | {note.rank for note in usable.left_out}
    missing = [rank for rank in range(size.ranks) if rank not in present]
    # The number in the name of a single file may be no rank: it does not show that others exist.
    are_missing = bool(missing) and (size.is_known or len(present - {None}) > 1)
    rank_notes = [
        replace(note, rank=trace.rank)
        for trace, found in zip(traces, steps, strict=True)
        for note in (*trace.notes, *found.notes)
    ]
    unmatched = []
    for i, trace in enumerate(traces):
        # Calls of steps before the recording have no counterparts and need none.
        keys = matched.key[matched.slice_trace(i)][~find_earlier_calls(trace)]
        if (keys < 0).any():
            text = (
                f"{int((keys < 0).sum())} of {len(keys)} collectives and messages have no matching "
                "call on the peer ranks: their wait time is estimated (not available without sizes)"
            )
            unmatched.append(Note("unmatched", text, trace.rank))
    absent = []
    if are_missing:
        count = f"{len(missing)} of {size.ranks}" if size.is_known else f"at least {len(missing)}"
        text = f"{count} ranks are missing from the recording: {units.format_number_list(missing)}"
        absent.append(Note(RANKS_MISSING, text, lack=Lack.RANKS))
    unsized = []
    if not size.is_known:
        text = "the recording does not say how many ranks the job has: "
        if are_missing or size.ranks > 1 + max(trace.rank for trace in traces):
            text += f"at least {size.ranks}, by the numbers and groups of those in it"
        else:
            text += "whether some are missing is unknown"
        unsized.append(Note(WORLD_SIZE_UNKNOWN, text))
    # What a recording lacks comes before what follows from that: clocks and groups without a shared
    # call.
    lacking = [note for note in rank_notes if note.lack is not None]
    others = [note for note in rank_notes if note.lack is None]
    return (
        *absent, *usable.left_out, *lacking, *unsized, *layout.notes, *alignment.notes, *others,
        *matched.notes, *unmatched,
    )  # fmt: skip


def _note_few_ops(rank: RankSplit) -> Note | None:
    """A note on a CPU run that shows hardly any work: part of a trace, or of other threads."""
    step_ns = sum(step.split.step_ns for step in rank.steps)
    idle_ns = sum(step.split.idle_ns for step in rank.steps)
    # A compiler is known, though what it traces is no work.
    compiling = rank.trace.events.match_names(COMPILES).any()
    if rank.trace.on_device or idle_ns <= _MOST_IDLE * step_ns or compiling:
        return None
    count = int(rank.trace.events.is_category(Category.OP).sum())
    length, share = units.format_milliseconds(step_ns), units.format_percent(idle_ns / step_ns)
    text = f"{count:,} ops in {length} leave {share} idle: the trace may be a fragment of the work"
    return Note("few_ops", text, rank.trace.rank)


# Detail of the split: idle causes, kernel families, contention, overlaps.


class Detail(Struct, frozen=True):
    """Derived results of a recording; idle_parts, idle and contention have one entry per rank.

    The gap of an idle part is a row of the rank's bucket bands, the window of an idle cause an
    index into the steps of its rank; contention is None if it cannot be measured on that rank.
    """

    idle_parts: tuple[IdleParts, ...]
    idle: tuple[tuple[IdleCause, ...], ...]
    families: tuple[KernelFamily, ...]
    contention: tuple[Contention | None, ...]
    variation: Variation
    overlaps: tuple[Overlap, ...]
    coverage: tuple[Coverage, ...]


def compute_detail(ranks: Sequence[RankSplit], context: RunContext) -> Detail:
    """Computes the detail of all ranks; ranks is not empty."""
    traces = [one.trace for one in ranks]
    windows = [one.windows for one in ranks]
    idle_parts = tuple(find_idle_parts(one.trace, one.attribution.band) for one in ranks)
    return Detail(
        idle_parts=idle_parts,
        idle=tuple(
            sum_idle_causes(one.trace.events, one.attribution.band.window, parts)
            for one, parts in zip(ranks, idle_parts, strict=True)
        ),
        families=sum_kernel_families(traces, windows),
        # Op times of a CPU run depend mostly on who shares the core.
        contention=tuple(
            measure_contention(one.trace, one.windows, one.pieces) if one.trace.on_device else None
            for one in ranks
        ),
        variation=compute_variation([step for one in ranks for step in one.steps]),
        overlaps=tuple(row for one in ranks for row in _compute_overlaps(one, context)),
        coverage=compute_coverage(traces, context.matched, context.layout),
    )


def _compute_overlaps(rank: RankSplit, context: RunContext) -> tuple[Overlap, ...]:
    axes = [context.layout.name_group(group) for group in rank.trace.groups]
    return compute_overlaps(
        rank.trace.rank, rank.trace.calls, axes, rank.windows.counted,
        rank.pieces, rank.held, rank.work.compute,
    )  # fmt: skip


# The split of one rank.


class RunContext(Struct, frozen=True):
    """What needs all ranks: matched calls, arrivals, clocks (in trace order), rank layout, and the
    stages on each rank of a pipeline where there are several."""

    matched: MatchedCalls
    arrivals: Arrivals
    alignment: Alignment
    layout: RankLayout
    chunks: Mapping[int, int] = field(default_factory=dict)


class RankSplit(Struct, frozen=True, dict=True):
    """The split of one rank: steps and grids on the common clock, everything else on its own clock.

    steps and grids have one entry per window, axis and phase one entry per exposed row.
    slots are on its own clock.
    """

    trace: RankTrace
    windows: Steps
    work: Work
    pieces: Pieces
    held: HeldGaps
    attribution: Attribution
    steps: tuple[StepSplit, ...]
    grids: tuple[StepGrid, ...]
    slots: DetectedSlots
    axis: tuple[str | None, ...]
    phase: tuple[str, ...]
    clock: Clock

    @property
    def numbers(self) -> tuple[int, ...]:
        """The number of each step."""
        return tuple(step.step for step in self.steps)

    @cached_property
    def kernels(self) -> KernelSums:
        """The compute by kind of work, summed when it is first asked for."""
        return KernelSums.collect(self.trace, self.windows)


def split_rank(
    index: int, trace: RankTrace, work: Work, windows: Steps, context: RunContext
) -> RankSplit:
    """Splits one rank; index is the position of its trace."""
    clock, layout = context.alignment.clocks[index], context.layout
    rows = context.matched.slice_trace(index)
    times = map_call_times(trace, rows, context.arrivals, clock)
    held = find_held_gaps(trace, times, work.compute)
    pieces = held.end_calls(split_calls(trace, times, context.arrivals.last[rows], layout))
    attribution = attribute(windows.windows, work, pieces, held)
    detected = find_slots(trace, layout, context.chunks.get(trace.rank, 1))
    slots = detected.slots
    bands = [_select_window(attribution.band, i, clock) for i in range(len(windows.windows))]
    # The grid of each window, from the slots that start in it; the result is on the common clock.
    own = np.array([(box.start_ns, box.end_ns) for box in slots], dtype=np.int64).reshape(-1, 2)
    start, end = (
        clock.map_to_common_ns(own[:, 0]).tolist(),
        clock.map_to_common_ns(own[:, 1]).tolist(),
    )
    common_slots = [
        replace(box, start_ns=low, end_ns=high)
        for box, low, high in zip(slots, start, end, strict=True)
    ]
    edges = own[:, 0].searchsorted([(w.start_ns, w.end_ns) for w in windows.windows]).reshape(-1, 2)
    guesses = context.arrivals.estimated[rows] | held.estimated
    guessed = attribution.exposed.window[guesses[attribution.exposed.call]]
    phases = infer_phases(trace, windows.windows, layout)
    # Group -1, of a call whose group is unknown, has no name.
    axes = (*(layout.name_group(group) for group in trace.groups), None)
    exposed_groups = trace.calls.group_id[attribution.exposed.call]
    axis = tuple(axes[group] for group in exposed_groups.tolist())
    single = (*(layout.find_axis(group) for group in trace.groups), None)
    is_within = np.array([one not in ("pp", None) for one in single])[exposed_groups]
    waits = _list_pipeline_waits(attribution.exposed, is_within, len(windows.windows), clock)
    grids = tuple(
        build_grid(trace.rank, window.step, common_slots[low:high], own)
        for window, own, (low, high) in zip(windows.windows, waits, edges.tolist(), strict=True)
    )
    # The step splits on the common clock; a step blocked by an estimated call is estimated.
    estimated = set(guessed.tolist())
    covered = [sum_bubble_covered_ns(g.busy, band) for g, band in zip(grids, bands, strict=True)]
    return RankSplit(
        trace=trace,
        windows=windows,
        work=work,
        pieces=pieces,
        held=held,
        attribution=attribution,
        steps=tuple(
            StepSplit(
                rank=grids[i].rank,
                step=window.step,
                kind=window.kind,
                start_ns=clock.map_instant_to_common_ns(window.start_ns),
                split=dataclasses.replace(attribution.splits[i], bubble_covered_ns=covered[i]),
                estimated=i in estimated,
            )
            for i, window in enumerate(windows.windows)
        ),
        grids=grids,
        slots=detected,
        axis=axis,
        phase=tuple(phases[call] for call in attribution.exposed.call.tolist()),
        clock=clock,
    )


def _list_pipeline_waits(
    exposed: Exposed, is_within: Bool, steps: int, clock: Clock
) -> Iterator[Intervals]:
    """When a rank waits for other stages and for their messages in each step, on the common clock;
    messages within a stage (is_within), as of a context-parallel ring, are part of its passes."""
    is_message = (exposed.bucket == Bucket.P2P) & ~is_within
    rows = np.flatnonzero(is_message | (exposed.bucket == Bucket.BUBBLE))
    rows = rows[np.lexsort((exposed.start_ns[rows], exposed.window[rows]))]
    start = clock.map_to_common_ns(exposed.start_ns[rows])
    end = clock.map_to_common_ns(exposed.end_ns[rows])
    edges = np.searchsorted(exposed.window[rows], np.arange(steps + 1)).tolist()
    return (Intervals(start[low:high], end[low:high]) for low, high in pairwise(edges))


def _select_window(band: BucketBands, window: int, clock: Clock) -> BucketBands:
    """The bucket bands of one window, on the common clock."""
    rows = slice(*band.window.searchsorted([window, window + 1]).tolist())
    start, end = (
        clock.map_to_common_ns(band.start_ns[rows]),
        clock.map_to_common_ns(band.end_ns[rows]),
    )
    return BucketBands(band.window[rows], band.bucket[rows], start, end)


def find_recorded_device(spec: RunSpec | None, split: RunSplit) -> str:
    """The name of the device that the ranks ran on, as its driver reports it; "cpu" without one."""
    recorded = [host.gpu for host in spec.hosts if host.gpu] if spec else []
    if not all(rank.trace.on_device for rank in split.ranks):
        return "cpu"
    return next(iter(recorded), split.ranks[0].trace.device or "")
