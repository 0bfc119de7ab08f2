"""RunSplit -> Report: what the split found, as rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import median

import numpy as np

from stepsplit.analyzer.buckets import BUCKETS, StepSplit
from stepsplit.analyzer.readers.recording import Recording
from stepsplit.analyzer.report.build_detail import (
    contention_rows,
    idle_rows,
    path_rows,
    step_times,
)
from stepsplit.analyzer.report.build_records import memory_rows, profiling_slowdown
from stepsplit.analyzer.report.report import (
    AxisSize,
    BlameRow,
    ClockRow,
    CollectiveRow,
    ExposedRow,
    Finding,
    GroupRow,
    Host,
    Pipeline,
    Report,
    Run,
    StageRow,
    StepCallsRow,
    StepRow,
    WarningRow,
)
from stepsplit.analyzer.split.bandwidth import CollectiveStat, StepCalls
from stepsplit.analyzer.split.blame import Blame
from stepsplit.analyzer.split.pipeline import StageHoles
from stepsplit.analyzer.split.run import RankSplit, RunSplit
from stepsplit.analyzer.split.transfers import BUBBLE, COLLECTIVE
from stepsplit.analyzer.trace import Note

UNKNOWN_HOST = "unknown"


def build_report(
    recording: Recording,
    found: RunSplit,
    findings: Sequence[Finding] = (),
    notes: Sequence[Note] = (),
) -> Report:
    """The report of a split recording; times count from the start of its earliest step.

    findings are what holds it up, notes what was not looked for.
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
        collectives=tuple(_collective(stat) for stat in found.collectives),
        step_calls=tuple(map(_step_calls, found.step_calls)),
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


def _collective(stat: CollectiveStat) -> CollectiveRow:
    return CollectiveRow(
        stat.group, stat.op, stat.dtype or None,
        stat.message_bytes if stat.message_bytes >= 0 else None, stat.count,
        stat.transfer_ns_median, stat.wait_ns_median,
        stat.algbw_bytes_per_s, stat.busbw_bytes_per_s,
    )  # fmt: skip


def _step_calls(row: StepCalls) -> StepCallsRow:
    kind = row.kind
    size = kind.message_bytes if kind.message_bytes >= 0 else None
    return StepCallsRow(
        kind.group, kind.op, kind.dtype or None, size, row.calls, row.least, row.most
    )


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
