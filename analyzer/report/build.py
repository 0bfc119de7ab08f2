"""From a RunSplit to a Report: steps, exposed communication, collectives, idle time as rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import median

from msgspec import UNSET, Struct

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import COMMUNICATION, StepSplit
from stepsplit.analyzer.parts.breakdown import Breakdown
from stepsplit.analyzer.readers.recording import Recording
from stepsplit.analyzer.report.diagnosis_rows import (
    Lateness,
    PathKernel,
    PathPart,
    PathStep,
    SlowKernel,
)
from stepsplit.analyzer.report.headline import LackingRow, summarize
from stepsplit.analyzer.report.kind_rows import build_kind_rows
from stepsplit.analyzer.report.part_rows import build_part_rows
from stepsplit.analyzer.report.report import (
    UNKNOWN_HOST,
    AxisSize,
    BlameRow,
    ClockRow,
    ContentionRow,
    Finding,
    GroupRow,
    Host,
    IdleRow,
    JobLabel,
    MemoryRow,
    Pipeline,
    Report,
    Run,
    StageRow,
    WarningRow,
)
from stepsplit.analyzer.report.step_rows import ExposedRow, StepRow
from stepsplit.analyzer.report.work_rows import StepWorkRow, WorkSummary
from stepsplit.analyzer.split.pipeline import StageBubble
from stepsplit.analyzer.split.run import RankSplit, RunSplit
from stepsplit.analyzer.trace import Lack, Note
from stepsplit.collectors.formats.rank_record import RankRecord, StepTimes

# RunSplit -> Report: the results of the split as rows.


class Diagnosis(Struct, frozen=True):
    """What diagnosis adds to the report of a split; times count from the start of its earliest
    step. notes are warnings about analyses that were skipped or are incomplete."""

    findings: tuple[Finding, ...]
    blame: tuple[BlameRow, ...]
    critical_path: tuple[PathPart, ...]
    path_steps: tuple[PathStep, ...]
    path_kernels: tuple[PathKernel, ...]
    lateness: tuple[Lateness, ...]
    slow_kernels: tuple[SlowKernel, ...]
    notes: tuple[Note, ...]
    step_work: tuple[StepWorkRow, ...] = ()
    work: WorkSummary | None = None


MAX_KERNELS = 30
"""Number of kernels in report.json; the tables have all."""


def build_report(
    recording: Recording,
    split: RunSplit,
    diagnosis: Diagnosis,
    breakdown: Breakdown = Breakdown(),  # noqa: B008
) -> Report:
    """Build the report of a split recording; times count from the start of its earliest step."""
    origin = find_origin_ns(split)
    steps = tuple(
        StepRow(
            rank=step.rank,
            step=step.step,
            kind=step.kind,
            start_ns=step.start_ns - origin,
            step_ns=step.split.step_ns,
            estimated=step.estimated,
            **asdict(step.split),
        )
        for rank in split.ranks
        for step in rank.steps
    )
    pipeline = _build_pipeline(split)
    idle = build_idle_rows(split)
    exposed = tuple(row for rank in split.ranks for row in _build_exposed(rank))
    parts, part_evidence = build_part_rows(breakdown.parts, steps)
    detail, variation = split.detail, split.detail.variation
    run = build_run(recording, split, origin)
    all_notes = [*recording.notes, *split.notes, *diagnosis.notes]
    slowdown = run.slowdown_after_profiling
    # On a CPU steps that are slower after the profiler are noise: it leaves nothing behind there.
    if run.device != "cpu" and slowdown is not None and slowdown >= LASTING_SLOWDOWN:
        text = (
            f"steps after the recording take {units.format_percent(slowdown)} longer than before "
            "it: CUPTI stays attached and slows the rest of the job down; set TEARDOWN_CUPTI=1 "
            "(CUDA 12.6 and later, without CUDA graphs)"
        )
        all_notes.append(Note("profiler_lasting", text))
    return Report(
        run=run,
        warnings=tuple(WarningRow(n.code, n.message, n.rank) for n in all_notes),
        groups=_build_groups(split),
        summary=summarize(steps, exposed, _build_lacks(run, all_notes)),
        steps=steps,
        step_kinds=build_kind_rows(
            split.kinds, steps, on_device=any(rank.trace.on_device for rank in split.ranks)
        ),
        exposed=exposed,
        clocks=tuple(
            ClockRow(
                clock.rank,
                clock.host or UNKNOWN_HOST,
                # At the report's t0, from which the drift counts.
                clock.compute_offset_at(origin),
                clock.drift_ppm,
                clock.sigma_ns if clock.island is None else None,
                clock.residual_ns if clock.island is None else None,
            )
            for clock in split.alignment.clocks
        ),
        collectives=split.collectives,
        step_calls=split.step_calls,
        blame=diagnosis.blame,
        pipeline=pipeline,
        idle=idle,
        kernels=detail.families,
        kernel_table=breakdown.kernels[:MAX_KERNELS],
        parts=parts,
        part_evidence=part_evidence,
        slow_kernels=diagnosis.slow_kernels,
        contention=tuple(
            ContentionRow(rank.trace.rank, one.ratio, one.places, one.lost_ns)
            for rank, one in zip(split.ranks, detail.contention, strict=True)
            if one is not None
        ),
        overlap=detail.overlaps,
        lateness=diagnosis.lateness,
        critical_path=diagnosis.critical_path,
        path_steps=diagnosis.path_steps,
        path_kernels=diagnosis.path_kernels,
        step_times=(*((variation.run,) if variation.run else ()), *variation.ranks),
        slow_steps=variation.slow,
        coverage=detail.coverage,
        memory=build_memory_rows(recording.records),
        findings=diagnosis.findings,
        # Left out of the JSON where the job counted nothing.
        step_work=diagnosis.step_work or UNSET,
        work=diagnosis.work or UNSET,
    )


def _build_lacks(run: Run, notes: Sequence[Note]) -> tuple[LackingRow, ...]:
    """What the recording lacks, each with its ranks, in the order of Lack."""
    ranks: dict[Lack, set[int]] = {}
    for note in notes:
        if note.lack is not None:
            ranks.setdefault(note.lack, set()).update([] if note.rank is None else [note.rank])
    if Lack.RANKS in ranks:
        left_out = {note.rank for note in notes}
        ranks[Lack.RANKS] = set(range(run.world_size)) - set(run.ranks) - left_out
    return tuple(LackingRow(lack, tuple(sorted(ranks[lack]))) for lack in Lack if lack in ranks)


def find_origin_ns(split: RunSplit) -> int:
    """The start of the earliest step, on the split's common clock."""
    return min((rank.steps[0].start_ns for rank in split.ranks if rank.steps), default=0)


def build_run(recording: Recording, split: RunSplit, origin: int) -> Run:
    traces = [rank.trace for rank in split.ranks]
    spec, mesh = recording.spec, split.layout.mesh
    where = {info.rank: info for info in spec.ranks} if spec else {}
    hosts: dict[str, list[int]] = defaultdict(list)
    for trace in traces:
        recorded = where[trace.rank].host if trace.rank in where else ""
        hosts[trace.host or recorded or UNKNOWN_HOST].append(trace.rank)
    first = traces[0]
    kind = "gpu" if first.on_device else "cpu"
    device = first.device or (where[first.rank].device if first.rank in where else "") or kind
    backend = traces[0].backend or (spec.backend if spec else "")
    return Run(
        name=recording.name,
        world_size=split.size.ranks,
        ranks=tuple(trace.rank for trace in traces),
        hosts=tuple(Host(host, tuple(ranks)) for host, ranks in hosts.items()),
        backend=backend or None,
        device=device,
        mesh=None if mesh is None else tuple(map(AxisSize, mesh.axes, mesh.sizes)),
        mesh_source=split.layout.source,
        torch=spec.version("torch") if spec else None,
        nccl=spec.version("nccl") if spec else None,
        driver=spec.version("driver") if spec else None,
        t0_unix_ns=str(split.alignment.t0_unix_ns + origin),
        strategies=split.strategies,
        profiling_slowdown=compute_profiling_slowdown(recording.records),
        slowdown_after_profiling=compute_slowdown_after(recording.records),
        labels=tuple(JobLabel(*label) for label in spec.labels) if spec and spec.labels else UNSET,
    )


def _build_groups(split: RunSplit) -> tuple[GroupRow, ...]:
    used, layout = set(split.matched.group.tolist()), split.layout
    return tuple(
        GroupRow(
            i,
            layout.find_axis(group),
            group.description,
            group.ranks,
            layout.name_group(group) or "",
        )
        for i, group in enumerate(split.matched.groups)
        if i in used
    )


def _build_exposed(rank: RankSplit) -> Iterable[ExposedRow]:
    exposed = rank.attribution.exposed
    sums: dict[tuple[int, str, str], list[int]] = defaultdict(lambda: [0] * len(COMMUNICATION))
    length = (exposed.end_ns - exposed.start_ns).tolist()
    steps = [rank.steps[i].step for i in exposed.window.tolist()]
    for row, (step, bucket) in enumerate(zip(steps, exposed.bucket.tolist(), strict=True)):
        parts = sums[step, rank.axis[row] or "", rank.phase[row]]
        parts[COMMUNICATION.index(bucket)] += length[row]
    for (step, axis, phase), parts in sorted(sums.items()):
        yield ExposedRow(rank.trace.rank, step, axis or None, phase, *parts)


def _build_pipeline(split: RunSplit) -> Pipeline | None:
    """Sums over the full steps, so that the share of all lies between those of the stages."""
    holes = list_full_bubbles(split)
    if not holes or split.schedule is None:
        return None
    stages = sorted({hole.stage for hole in holes})
    rows = []
    for stage in stages:
        own = [hole for hole in holes if hole.stage == stage]
        bubble_ns = round(sum(hole.bubble_ns for hole in own) / len(own))
        rows.append(StageRow(stage, bubble_ns, compute_bubble_fraction(own)))
    fraction, ideal = compute_bubble_fraction(holes), split.schedule.ideal_bubble_fraction
    return Pipeline(
        stages=tuple(rows),
        microbatches=split.schedule.microbatches,
        schedule=split.schedule.name,
        bubble_fraction=fraction,
        # That of equal microbatches; those of unequal length may fit better.
        ideal_bubble_fraction=None if ideal is None else min(ideal, fraction),
        bubble_overhead=fraction / (1 - fraction) if fraction < 1 else 0.0,
    )


def list_full_bubbles(split: RunSplit) -> list[StageBubble]:
    """The bubbles of the full steps of all stages."""
    kinds = {(step.rank, step.step): step.kind for rank in split.ranks for step in rank.steps}
    return [one for one in split.stage_bubbles if kinds.get((one.rank, one.step)) == "full"]


def compute_bubble_fraction(holes: Sequence[StageBubble]) -> float:
    """The share of the bubble in the pipeline's time, over all of these."""
    return sum(hole.bubble_ns for hole in holes) / sum(hole.window_ns for hole in holes)


# Detail -> the rows of a report: sums over the full steps, and times from the report's t0.

_MAX_OPS = 5
"""Number of ops listed per rank and cause; the rest is summed in one row."""


def build_idle_rows(split: RunSplit) -> tuple[IdleRow, ...]:
    """The idle time of each rank by cause over its full steps, largest cause first."""
    built: list[IdleRow] = []
    for rank, causes in zip(split.ranks, split.detail.idle, strict=True):
        full, number = _find_full_steps(rank.steps), rank.trace.rank
        sums: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
        for one in causes:
            if one.window in full:
                pair = sums[one.cause][one.op]
                pair[0], pair[1] = pair[0] + one.idle_ns, pair[1] + one.count
        rows: list[IdleRow] = []
        for cause, ops in sums.items():
            named = sorted(ops.items(), key=lambda item: -item[1][0])
            rows += [IdleRow(number, cause, op, *pair) for op, pair in named[:_MAX_OPS]]
            if rest := [pair for _, pair in named[_MAX_OPS:]]:
                rows.append(IdleRow(number, cause, None, *map(sum, zip(*rest, strict=True))))
        idle_ns = sum(rank.steps[window].split.idle_ns for window in full)
        assert sum(row.idle_ns for row in rows) == idle_ns, f"rank {number}: idle is lost"
        built += sorted(rows, key=lambda row: -row.idle_ns)
    return tuple(built)


def find_full_numbers(split: RunSplit) -> frozenset[int]:
    """The numbers of the steps that are full on some rank; of all steps if none is."""
    steps = [step for rank in split.ranks for step in rank.steps]
    full = frozenset(step.step for step in steps if step.kind == "full")
    return full or frozenset(step.step for step in steps)


def _find_full_steps(steps: Sequence[StepSplit]) -> frozenset[int]:
    """The indices of the full steps; of all steps if none is full."""
    full = frozenset(i for i, step in enumerate(steps) if step.kind == "full")
    return full or frozenset(range(len(steps)))


# Records of the ranks -> rows of the report: memory and profiling overhead.

MIN_TIMED_STEPS = 3
"""Number of steps before and after the profiler that an estimate of its overhead needs."""

LASTING_SLOWDOWN = 0.03
"""Slowdown after the profiler that is worth a warning."""


def build_memory_rows(records: Sequence[RankRecord]) -> tuple[MemoryRow, ...] | None:
    """A row for each rank that measured its memory; None if no rank did."""
    rows = tuple(
        MemoryRow(
            rank=record.rank.rank,
            peak_allocated_bytes=memory.peak_allocated_bytes,
            peak_reserved_bytes=memory.peak_reserved_bytes,
            weights_bytes=memory.weights_bytes,
            gradients_bytes=memory.gradients_bytes,
            optimizer_bytes=memory.optimizer_bytes,
            activations_bytes=memory.activations_bytes,
            transient_bytes=None,
            other_bytes=None,
        )
        for record in records
        if (memory := record.memory) is not None
    )
    return rows or None


def compute_profiling_slowdown(records: Sequence[RankRecord]) -> float | None:
    """Profiling overhead: how much longer profiled steps take, as a fraction of unprofiled steps.

    The median over the ranks of the ratio of their medians, minus 1; None if too few steps were
    timed without the profiler. A small negative value is noise. The steps before count; those after
    only where too few are known, as CUPTI may slow them down as well.
    """
    times = [_choose_clock(record.steps) for record in records]
    return _compute_slowdown(
        (each.profiled_ns, each.before_ns if _are_enough(each.before_ns) else each.after_ns)
        for each in times
        if each.profiled_ns
    )


def compute_slowdown_after(records: Sequence[RankRecord]) -> float | None:
    """How much longer the steps after the profiler take than those before, as a fraction."""
    times = [_choose_clock(record.steps) for record in records]
    return _compute_slowdown((t.after_ns, t.before_ns) for t in times if _are_enough(t.after_ns))


def _choose_clock(times: StepTimes) -> StepTimes:
    """The times on the GPU, if the rank has them; the host runs ahead of it."""
    if not times.gpu_profiled_ns:
        return times
    return StepTimes(times.gpu_before_ns, times.gpu_profiled_ns, times.gpu_after_ns)


def _compute_slowdown(
    pairs: Iterable[tuple[Sequence[int], Sequence[int]]],
) -> float | None:
    ratios = [median(slower) / median(usual) - 1 for slower, usual in pairs if _are_enough(usual)]
    return median(ratios) if ratios else None


def _are_enough(times_ns: Sequence[int]) -> bool:
    return len(times_ns) >= MIN_TIMED_STEPS
