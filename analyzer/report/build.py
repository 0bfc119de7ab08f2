"""From a RunSplit to a Report: steps, exposed communication, collectives, idle time as rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from statistics import median

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS, StepSplit
from stepsplit.analyzer.readers.recording import Recording
from stepsplit.analyzer.report.report import (
    AxisSize,
    BlameRow,
    ClockRow,
    ContentionRow,
    ExposedRow,
    Finding,
    GroupRow,
    Host,
    IdleRow,
    MemoryRow,
    Pipeline,
    Report,
    Run,
    StageRow,
    StepRow,
    WarningRow,
)
from stepsplit.analyzer.split.blame import Blame
from stepsplit.analyzer.split.critical_path import PathPart, PathStep
from stepsplit.analyzer.split.idle import IdleCause
from stepsplit.analyzer.split.pipeline import StageHoles
from stepsplit.analyzer.split.run import RankSplit, RunSplit
from stepsplit.analyzer.split.steps import StepDurations
from stepsplit.analyzer.split.transfers import BUBBLE, COLLECTIVE
from stepsplit.analyzer.trace import Note
from stepsplit.collectors.rank_record import MemoryState, RankRecord

# RunSplit -> Report: the results of the split as rows.

UNKNOWN_HOST = "unknown"


def build_report(
    recording: Recording,
    found: RunSplit,
    findings: Sequence[Finding] = (),
    notes: Sequence[Note] = (),
) -> Report:
    """Build the report of a split recording; times count from the start of its earliest step.

    findings are its bottlenecks, notes the analyses that were skipped.
    """
    origin = origin_ns(found)
    steps = tuple(_step(step, origin) for rank in found.ranks for step in rank.steps)
    blamed = _blame(found.blame)
    pipeline = _pipeline(found)
    parts, path_steps = path_rows(found, origin)
    idle = idle_rows(found)
    detail = found.detail
    return Report(
        run=_run(recording, found, origin),
        warnings=tuple(
            WarningRow(n.code, n.message, n.rank) for n in (*recording.notes, *found.notes, *notes)
        ),
        groups=_groups(found),
        steps=steps,
        exposed=tuple(row for rank in found.ranks for row in _exposed(rank)),
        clocks=_clocks(found, origin),
        collectives=found.collectives,
        step_calls=found.step_calls,
        blame=blamed,
        pipeline=pipeline,
        idle=idle,
        kernels=detail.families,
        slow_kernels=detail.slow_kernels,
        contention=contention_rows(found),
        overlap=detail.overlaps,
        lateness=detail.lateness,
        critical_path=parts,
        path_steps=path_steps,
        step_times=step_times(found),
        slow_steps=detail.variation.slow,
        coverage=detail.coverage,
        memory=memory_rows(recording.records),
        findings=tuple(findings),
    )


def origin_ns(found: RunSplit) -> int:
    """The start of the earliest step, on the split's common clock."""
    return min((rank.steps[0].start_ns for rank in found.ranks if rank.steps), default=0)


def _run(recording: Recording, found: RunSplit, origin: int) -> Run:
    traces, spec, mesh = recording.traces, recording.spec, found.layout.mesh
    where = {info.rank: info for info in spec.ranks} if spec else {}
    hosts: dict[str, list[int]] = defaultdict(list)
    for trace in traces:
        stated = where[trace.rank].host if trace.rank in where else ""
        hosts[trace.host or stated or UNKNOWN_HOST].append(trace.rank)
    first = traces[0]
    seen = "gpu" if first.on_device else "cpu"
    device = first.device or (where[first.rank].device if first.rank in where else "") or seen
    backend = traces[0].backend or (spec.backend if spec else "")
    return Run(
        name=recording.name,
        world_size=spec.world_size if spec else max(trace.world_size for trace in traces),
        ranks=tuple(trace.rank for trace in traces),
        hosts=tuple(Host(host, tuple(ranks)) for host, ranks in hosts.items()),
        backend=backend or None,
        device=device,
        mesh=None if mesh is None else tuple(map(AxisSize, mesh.axes, mesh.sizes)),
        mesh_source=found.layout.source,
        torch=spec.version("torch") if spec else None,
        nccl=spec.version("nccl") if spec else None,
        driver=spec.version("driver") if spec else None,
        t0_unix_ns=str(found.alignment.t0_unix_ns + origin),
        strategies=found.strategies,
        profiling_slowdown=profiling_slowdown(recording.records),
    )


def _groups(found: RunSplit) -> tuple[GroupRow, ...]:
    used = set(found.matched.group.tolist())
    return tuple(
        GroupRow(i, found.layout.axis_of(group), group.description, group.ranks)
        for i, group in enumerate(found.matched.groups)
        if i in used
    )


def _step(step: StepSplit, origin: int) -> StepRow:
    return StepRow(
        rank=step.rank,
        step=step.step,
        kind=step.kind,
        start_ns=step.start_ns - origin,
        step_ns=step.split.step_ns,
        estimated=step.estimated,
        **asdict(step.split),
    )


def _exposed(rank: RankSplit) -> Iterable[ExposedRow]:
    exposed = rank.attribution.exposed
    sums: dict[tuple[int, str, str], list[int]] = defaultdict(
        lambda: [0] * (BUBBLE - COLLECTIVE + 1)
    )
    length = (exposed.end_ns - exposed.start_ns).tolist()
    steps = [rank.steps[i].step for i in exposed.window.tolist()]
    for row, (step, bucket) in enumerate(zip(steps, exposed.bucket.tolist(), strict=True)):
        sums[step, rank.axis[row] or "", rank.phase[row]][bucket - COLLECTIVE] += length[row]
    for (step, axis, phase), parts in sorted(sums.items()):
        yield ExposedRow(rank.trace.rank, step, axis or None, phase, *parts)


def _clocks(found: RunSplit, origin: int) -> tuple[ClockRow, ...]:
    """The clocks with their offsets at the report's t0, from which their drift counts."""
    return tuple(
        ClockRow(
            c.rank, c.host or UNKNOWN_HOST, c.offset_at(origin),
            c.drift_ppm, c.sigma_ns, c.residual_ns,
        )
        for c in found.alignment.clocks
    )  # fmt: skip


def _blame(blamed: Sequence[Blame]) -> tuple[BlameRow, ...]:
    together: dict[tuple[int | None, str, str | None], list[Blame]] = defaultdict(list)
    for one in blamed:
        if one.skew_ns or one.bubble_ns:
            together[one.rank, one.cause, one.axis].append(one)
    rows = [
        BlameRow(
            rank, cause, sum(b.skew_ns for b in same), sum(b.bubble_ns for b in same),
            sum(b.skew_ns + b.bubble_ns for b in same), axis, tuple(sorted({b.step for b in same})),
        )
        for (rank, cause, axis), same in together.items()
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -row.caused_ns))


def _pipeline(found: RunSplit) -> Pipeline | None:
    """Medians over the full steps, of the mean over the pipelines and stages of each step."""
    kinds = {(step.rank, step.step): step.kind for rank in found.ranks for step in rank.steps}
    holes = [hole for hole in found.holes if kinds.get((hole.rank, hole.step)) == "full"]
    if not holes or found.schedule is None:
        return None
    stages = sorted({hole.stage for hole in holes})
    fraction = _median_fraction(holes)
    return Pipeline(
        stages=tuple(_stage(stage, [h for h in holes if h.stage == stage]) for stage in stages),
        microbatches=found.schedule.microbatches,
        schedule=found.schedule.name,
        bubble_fraction=fraction,
        ideal_bubble_fraction=found.schedule.ideal_bubble_fraction,
        bubble_overhead=fraction / (1 - fraction) if fraction < 1 else 0.0,
    )


def _stage(stage: int, holes: Sequence[StageHoles]) -> StageRow:
    return StageRow(stage, int(median(h.holes_ns for h in holes)), _median_fraction(holes))


def _median_fraction(holes: Sequence[StageHoles]) -> float:
    steps = sorted({hole.step for hole in holes})
    sums = [
        (
            sum(h.holes_ns for h in holes if h.step == step),
            sum(h.window_ns for h in holes if h.step == step),
        )
        for step in steps
    ]
    return float(np.median([part / whole for part, whole in sums]))


assert BUCKETS[COLLECTIVE : BUBBLE + 1] == ("collective", "p2p", "skew", "bubble")


# Detail -> the rows of a report: sums over the full steps, and times from the report's t0.

_MOST_OPS = 5
"""Number of ops listed per rank and cause; the rest is summed in one row."""


def idle_rows(found: RunSplit) -> tuple[IdleRow, ...]:
    """The idle time of each rank by cause over its full steps, largest cause first."""
    pairs = zip(found.ranks, found.detail.idle, strict=True)
    return tuple(row for rank, causes in pairs for row in _idle_of(rank, causes))


def _idle_of(rank: RankSplit, causes: Sequence[IdleCause]) -> list[IdleRow]:
    full = _full(rank.steps)
    sums: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for one in causes:
        if one.window in full:
            pair = sums[one.cause][one.op]
            pair[0], pair[1] = pair[0] + one.idle_ns, pair[1] + one.count
    rows = [row for cause, ops in sums.items() for row in _of_cause(rank.trace.rank, cause, ops)]
    held = sum(rank.steps[window].split.idle_ns for window in full)
    assert sum(row.idle_ns for row in rows) == held, f"rank {rank.trace.rank}: idle is lost"
    return sorted(rows, key=lambda row: -row.idle_ns)


def _of_cause(rank: int, cause: str, ops: dict[str, list[int]]) -> Iterable[IdleRow]:
    named = sorted(ops.items(), key=lambda item: -item[1][0])
    for op, (idle_ns, count) in named[:_MOST_OPS]:
        yield IdleRow(rank, cause, op, idle_ns, count)
    if rest := named[_MOST_OPS:]:
        yield IdleRow(rank, cause, None, sum(v[0] for _, v in rest), sum(v[1] for _, v in rest))


def _full(steps: Sequence[StepSplit]) -> frozenset[int]:
    """The indices of the full steps; of all steps if none is full."""
    full = frozenset(i for i, step in enumerate(steps) if step.kind == "full")
    return full or frozenset(range(len(steps)))


def contention_rows(found: RunSplit) -> tuple[ContentionRow, ...]:
    """How much communication slows the compute of each rank, where it could be measured."""
    return tuple(
        ContentionRow(rank.trace.rank, one.ratio, one.places, one.lost_ns)
        for rank, one in zip(found.ranks, found.detail.contention, strict=True)
        if one is not None
    )


def path_rows(found: RunSplit, origin: int) -> tuple[tuple[PathPart, ...], tuple[PathStep, ...]]:
    """The critical paths of the steps that are full on some rank."""
    steps = [rank.steps for rank in found.ranks]
    full = {of_rank[i].step for of_rank in steps for i in _full(of_rank)}
    paths = found.detail.paths
    return (
        tuple(part for part in paths.parts if part.step in full),
        tuple(
            replace(step, start_ns=step.start_ns - origin, end_ns=step.end_ns - origin)
            for step in paths.steps
            if step.step in full
        ),
    )


def step_times(found: RunSplit) -> tuple[StepDurations, ...]:
    """Step durations: of the run (rank None) first, then of each rank."""
    variation = found.detail.variation
    return (*((variation.run,) if variation.run else ()), *variation.ranks)


# Records of the ranks -> rows of the report: memory and profiling overhead.

FEWEST_STEPS = 3
"""Number of steps without the profiler needed to estimate its overhead."""


def memory_rows(records: Sequence[RankRecord]) -> tuple[MemoryRow, ...] | None:
    """A row for each rank that measured its memory; None if no rank did."""
    rows = (_row(r.rank.rank, r.memory) for r in records if r.memory is not None)
    return tuple(rows) or None


def profiling_slowdown(records: Sequence[RankRecord]) -> float | None:
    """Profiling overhead: how much longer profiled steps take, as a fraction of unprofiled steps.

    The median over the ranks of the ratio of their medians, minus 1; None if too few steps were
    timed without the profiler. A small negative value is noise.
    """
    ratios = [
        median(times.profiled_ns) / median(beside) - 1
        for times in (record.steps for record in records)
        if len(beside := (*times.before_ns, *times.after_ns)) >= FEWEST_STEPS and times.profiled_ns
    ]
    return median(ratios) if ratios else None


def _row(rank: int, memory: MemoryState) -> MemoryRow:
    return MemoryRow(
        rank=rank,
        peak_allocated_bytes=memory.peak_allocated_bytes,
        peak_reserved_bytes=memory.peak_reserved_bytes,
        weights_bytes=memory.weights_bytes,
        gradients_bytes=memory.gradients_bytes,
        optimizer_bytes=memory.optimizer_bytes,
        activations_bytes=memory.activations_bytes,
        transient_bytes=None,
        other_bytes=None,
    )


# The causes of idle time as text.

IDLE_MEANING = {
    "data_loading": "waiting for the data loader",
    "allocation": "memory allocation",
    "synchronize": "late launches after a synchronization",
    "launch_bound": "launch-bound host work",
    "python": "Python code between ops",
    "launch_latency": "kernel launch latency",
    "dependency": "waiting for another stream",
    "late_start": "late start of work launched in time",
    "other": "host work",
    "unknown": "idle time of unknown cause",
}

_MOST_LETTERS = 60

SCHEDULE_NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zb-h1": "ZB-H1",
    "zb-h2": "ZB-H2",
    "zb-v": "ZB-V",
    "dualpipe": "DualPipe",
    "dualpipe-v": "DualPipe-V",
}
"""Display names of schedules, if different from the identifier."""


def why_idle(causes: Iterable[IdleCause]) -> str:
    """The largest cause of idle time, its share of it and its main op; "" without idle time."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for one in causes:
        sums[one.cause][one.op or ""] += one.idle_ns
    total = sum(ops.total() for ops in sums.values())
    if not total:
        return ""
    cause = max(sums, key=lambda name: sums[name].total())
    op = sums[cause].most_common(1)[0][0]
    where = f" in {_short(op)}" if op else ""
    return f"{units.percent(sums[cause].total() / total)} of it is {IDLE_MEANING[cause]}{where}"


def _short(op: str) -> str:
    op = op.removeprefix("autograd::engine::evaluate_function: ")
    return op if len(op) <= _MOST_LETTERS else op[: _MOST_LETTERS - 3] + "..."
