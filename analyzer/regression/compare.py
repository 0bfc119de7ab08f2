"""Comparison of two reports by bucket, call and kernel family."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import msgspec
from msgspec import structs

from stepsplit.analyzer.buckets import BUCKETS, Split
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.ops import MESSAGES
from stepsplit.analyzer.regression.part_kernels import explain_part
from stepsplit.analyzer.report.axis_names import AxisGroup, name_axis, name_group
from stepsplit.analyzer.report.headline import compute_mean_split
from stepsplit.analyzer.report.io import Document
from stepsplit.analyzer.report.report import (
    MIN_GAIN_SHARE,
    AxisSize,
    Report,
    compute_token_rate,
    find_world_size,
    format_world_size,
)
from stepsplit.analyzer.report.step_rows import compute_step_median_ns, select_full_steps
from stepsplit.analyzer.split.bandwidth import CollectiveRow
from stepsplit.analyzer.split.mesh import find_spread_axes, format_axes
from stepsplit.collectors.formats.run_spec import Mesh

# Two reports -> comparison of their runs.


def compare_reports(baseline: Report, candidate: Report) -> RunComparison:
    """Compare two runs. Raises UsageError if one of them has no step.

    Runs with different layouts are compared as well; the settings list the differences. An axis of
    an inferred mesh whose groups are those of an axis of the other mesh is compared with it; if the
    meshes have other axes nonetheless, calls are compared by op and waits by bucket.
    """
    settings = find_changed_settings(baseline, candidate)
    aligned = align_axes(baseline, candidate)
    return _compare_aligned(*aligned, settings, by_axis=not have_other_axes(*aligned))


def _compare_aligned(
    baseline: Report, candidate: Report, settings: tuple[Setting, ...], by_axis: bool
) -> RunComparison:
    return RunComparison(
        baseline=build_side(baseline),
        candidate=build_side(candidate),
        settings=settings,
        exposed=compare_exposed(baseline, candidate, by_axis),
        collectives=compare_collectives(baseline, candidate, by_axis),
        kernels=compare_families(baseline, candidate),
        parts=compare_parts(baseline, candidate),
        findings=compare_findings(baseline, candidate),
        meshes_differ=have_other_axes(baseline, candidate),
    )


def compare_with_baseline(reports: Sequence[Report]) -> tuple[RunComparison, ...]:
    """Compare each run but the first with the first, each by the axes of its own mesh.

    An inferred axis takes the name of a stated mesh's axis that has the same groups. Raises
    UsageError if one of them has no step.
    """
    baseline, *candidates = reports
    stated = (report for report in reports if report.run.mesh and not _is_inferred(report))
    reference = next(stated, baseline)
    first, *others = (align_axes(reference, report)[1] for report in reports)
    return tuple(
        _compare_aligned(first, aligned, find_changed_settings(baseline, candidate), by_axis=True)
        for candidate, aligned in zip(candidates, others, strict=True)
    )


# The bottlenecks of both runs.


def compare_findings(baseline: Report, candidate: Report) -> tuple[FindingChange, ...]:
    """A row for each bottleneck, by cause and ranks, in either run."""
    one, other = (
        {(found.code, found.ranks): found for found in report.findings}
        for report in (baseline, candidate)
    )
    rows = [
        FindingChange(
            baseline_ns=one[key].gain_ns if key in one else 0,
            candidate_ns=other[key].gain_ns if key in other else 0,
            code=key[0],
            ranks=key[1],
            message=(other.get(key) or one[key]).message,
        )
        for key in dict.fromkeys((*other, *one))
    ]
    return tuple(sorted(rows, key=order_by_change))


# Meshes that were inferred from the calls, and differ because the calls do.

MESH_FROM_CALLS = ("rank sets and operations", "messages")
"""The sources of a mesh that is inferred from the calls, and may change with them."""


def align_axes(baseline: Report, candidate: Report) -> tuple[Report, Report]:
    """Both reports with the axes of one mesh, if the groups of all axes are those of its axes.

    A mesh that is stated or named is that of the job, else the baseline's is. A report with another
    stated mesh, or with other groups, stays as it is. Raises UsageError for a mesh that no job has.
    """
    known = [report for report in (baseline, candidate) if report.run.mesh is not None]
    stated = [report for report in known if not _is_inferred(report)]
    if not known:
        return baseline, candidate
    reference = next(iter(stated or known)).run
    try:
        mesh = Mesh.of({row.axis: row.size for row in reference.mesh or ()})
    except ValueError as error:
        raise UsageError(f"{reference.name}: {error}; analyze the run again") from None
    aligned = [
        _take_axes(report, mesh)
        if _is_inferred(report) and report.run.mesh != reference.mesh
        else report
        for report in (baseline, candidate)
    ]
    return aligned[0], aligned[1]


def _is_inferred(report: Report) -> bool:
    return report.run.mesh is None or report.run.mesh_source in MESH_FROM_CALLS


def _take_axes(report: Report, mesh: Mesh) -> Report:
    if report.run.world_size != mesh.world_size:
        return report
    names = map_axes(mesh, report.groups)
    if names is None:
        return report
    renamed = [
        msgspec.structs.replace(one, **rename_group(one, names, mesh)) for one in report.groups
    ]
    before, after = (map(name_group, groups) for groups in (report.groups, renamed))
    named = {**names, **dict(zip(before, after, strict=True))}
    exposed = [
        msgspec.structs.replace(row, axis=named.get(row.axis or "", row.axis))
        for row in report.exposed
    ]
    coverage = [
        structs.replace(row, axis=named.get(row.axis or "", row.axis)) for row in report.coverage
    ]
    sizes = tuple(AxisSize(*row) for row in zip(mesh.axes, mesh.sizes, strict=True))
    run = msgspec.structs.replace(report.run, mesh=sizes)
    return msgspec.structs.replace(
        report, run=run, groups=tuple(renamed), exposed=tuple(exposed), coverage=tuple(coverage)
    )


def map_axes(mesh: Mesh, groups: Iterable[AxisGroup]) -> Mapping[str, str] | None:
    """The mesh's axis for each axis of the groups: the one of which each of its groups is a line.

    Groups on no single axis are mapped by their description, or keep it. None if the groups of an
    axis are not lines of one axis of the mesh, or if two have the same: that is another mesh. A
    pipeline is one by its messages, so pp is never the same as another axis.
    """
    along: dict[str, set[str | None]] = defaultdict(set)
    own_axes = set()
    for group in groups:
        if len(group.ranks) < 2:
            continue
        own_axes |= {group.axis} if group.axis else set()
        is_within = max(group.ranks) < mesh.world_size
        lines = (
            axis
            for axis in mesh.axes
            if is_within and mesh.line(group.ranks[0], axis) == tuple(sorted(group.ranks))
        )
        along[format_axis(group)].add(next(lines, None))
    names: dict[str, str] = {}
    for name, found in along.items():
        axis = next(iter(found)) if len(found) == 1 else None
        if axis is not None and ("pp" in (name, axis)) <= (name == axis):
            names[name] = axis
        elif name in own_axes:
            return None
    taken = [names[name] for name in own_axes]
    return names if len(set(taken)) == len(taken) else None


def rename_group(
    group: AxisGroup, names: Mapping[str, str], mesh: Mesh
) -> Mapping[str, str | None]:
    """Axis and name of the group in the mesh, of which names are the axes by those of the group."""
    axis = names.get(format_axis(group), group.axis)
    is_within = max(group.ranks, default=mesh.world_size) < mesh.world_size
    spanned = format_axes(find_spread_axes(mesh, group.ranks)) if is_within else ""
    return {"axis": axis, "name": axis or spanned or group.name}


def have_other_axes(baseline: Report, candidate: Report) -> bool:
    """Whether both meshes are known, and one has an axis of several ranks that the other lacks."""
    meshes = (baseline.run.mesh, candidate.run.mesh)
    one, other = ({row.axis for row in mesh or () if row.size > 1} for mesh in meshes)
    return None not in meshes and one != other


# The collectives and messages of both runs.

UNKNOWN = "unknown"

CallKind = tuple[str, str, str | None, int | None]
"""Axis, op, dtype and message_bytes, by which calls of two runs are matched."""


def compare_collectives(
    baseline: Report, candidate: Report, by_axis: bool = True
) -> tuple[CallsChange, ...]:
    """A row for each kind of call in either run; without by_axis for each op, dtype and size."""
    one, other = (_collect_call_stats(report, by_axis) for report in (baseline, candidate))
    rows = []
    for kind in dict.fromkeys((*one, *other)):
        before, own = one.get(kind), other.get(kind)
        axis, candidate_axis = join_axes(before.axes if before else (), own.axes if own else ())
        stats = before.stats if before else None, own.stats if own else None
        rows.append(CallsChange(axis, *kind[1:], *stats, candidate_axis))
    return tuple(sorted(rows, key=order_by_change))


class _CallsOfKind(msgspec.Struct, frozen=True):
    """The calls of one kind in one run, and the axes that have them."""

    axes: tuple[str, ...]
    stats: CallStats


def _collect_call_stats(report: Report, by_axis: bool) -> Mapping[CallKind, _CallsOfKind]:
    """The calls by kind, whose axis is "" without by_axis: groups merged, by the medians of their
    medians."""
    groups = {group.id: group for group in report.groups}
    same: dict[CallKind, dict[str, list[CollectiveRow]]] = defaultdict(lambda: defaultdict(list))
    for row in report.collectives:
        axis = name_group(groups.get(row.group))
        kind = (axis if by_axis else "", row.op, row.dtype, row.message_bytes)
        same[kind][axis].append(row)
    ranks, steps = set(report.run.ranks), len({row.step for row in report.steps})
    unmatched = {name_axis(one.axis) for one in report.coverage if one.holds == "estimated"}
    # A collective counts once for each recorded member; a message counts once per end, and so does
    # each call on an axis without matched calls. An older report has no names of groups, nor of its
    # coverage.
    members = {
        id_: len(set(group.ranks) & ranks) or 1
        for id_, group in groups.items()
        if name_axis(group.name or group.axis) not in unmatched
    }
    found = {}
    for kind, by_own_axis in same.items():
        rows = [row for of_axis in by_own_axis.values() for row in of_axis]
        rates = [row.busbw_bytes_per_s for row in rows if row.busbw_bytes_per_s is not None]
        calls = sum(
            row.count * (1 if row.op in MESSAGES else members.get(row.group, 1)) for row in rows
        )
        stats = CallStats(
            count=calls / (len(report.run.ranks) * steps),
            transfer_ns=int(median(row.transfer_ns_median for row in rows)),
            wait_ns=int(median(row.wait_ns_median for row in rows)),
            busbw_bytes_per_s=median(rates) if rates else None,
        )
        found[kind] = _CallsOfKind(tuple(by_own_axis), stats)
    return found


def join_axes(baseline: Sequence[str], candidate: Sequence[str]) -> tuple[str, str | None]:
    """The axes of a row in the baseline and, if they are others, in the candidate; those of the
    other run if one has none."""
    one, other = (" + ".join(sorted(axes)) for axes in (baseline, candidate))
    return one or other, other if one and other and one != other else None


def format_axis(group: AxisGroup | None) -> str:
    """The axis of the group, else its description."""
    return (group and (group.axis or group.description)) or UNKNOWN


# The exposed communication of both runs by axis.

_BUCKETS = ("collective", "p2p", "skew", "bubble")

_Sums = Mapping[tuple[str, str | None], int]
"""Mean ns per step and rank, by bucket and axis."""


def compare_exposed(
    baseline: Report, candidate: Report, by_axis: bool = True
) -> tuple[ExposedChange, ...]:
    """A row for each axis and bucket with exposed communication in either run; without by_axis for
    each bucket."""
    one, other = _compute_exposed_means(baseline), _compute_exposed_means(candidate)
    if by_axis:
        rows = [
            ExposedChange(one.get(kind, 0), other.get(kind, 0), *kind)
            for kind in dict.fromkeys((*one, *other))
        ]
        return tuple(sorted(rows, key=order_by_change))
    rows = []
    for bucket in dict.fromkeys(bucket for bucket, _ in (*one, *other)):
        before, own = ({k: ns for k, ns in s.items() if k[0] == bucket} for s in (one, other))
        axes = join_axes(*([name_axis(axis) for _, axis in side] for side in (before, own)))
        rows.append(ExposedChange(sum(before.values()), sum(own.values()), bucket, *axes))
    return tuple(sorted(rows, key=order_by_change))


def _compute_exposed_means(report: Report) -> _Sums:
    full = {(row.rank, row.step) for row in select_full_steps(report.steps)}
    sums: dict[tuple[str, str | None], int] = defaultdict(int)
    for row in report.exposed:
        if (row.rank, row.step) in full:
            for bucket in _BUCKETS:
                sums[bucket, row.axis] += getattr(row, f"{bucket}_ns")
    return {kind: ns // len(full) for kind, ns in sums.items() if ns}


# The compute of both runs by kernel family.


def compare_families(baseline: Report, candidate: Report) -> tuple[FamilyChange, ...]:
    """A row for each family in either run; empty if a report has no kernel families."""
    if not (baseline.kernels and candidate.kernels):
        return ()
    before, own = _compute_family_means(baseline), _compute_family_means(candidate)
    rows = []
    for family in dict.fromkeys((*before, *own)):
        (ns, count), (own_ns, own_count) = before.get(family, (0, 0.0)), own.get(family, (0, 0.0))
        rows.append(FamilyChange(ns, own_ns, family, count, own_count))
    return tuple(sorted(rows, key=order_by_change))


def _compute_family_means(report: Report) -> Mapping[str, tuple[int, float]]:
    """By family: (ns, kernels) per step and rank."""
    steps = len(select_full_steps(report.steps))
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in report.kernels:
        totals[row.family][0] += row.total_ns
        totals[row.family][1] += row.count
    return {family: (ns // steps, count / steps) for family, (ns, count) in totals.items()}


# The mean step of both runs by part of the model.


def compare_parts(baseline: Report, candidate: Report) -> tuple[PartChange, ...]:
    """A row for each part in either run; empty if in one of them nothing shows the parts."""
    for report in (baseline, candidate):
        if report.part_evidence is None or report.part_evidence.evidence == "none":
            return ()
    sides = [Counter[str](), Counter[str]()]
    for times, report in zip(sides, (baseline, candidate), strict=True):
        for row in report.parts:
            times[row.part] += row.total_ns
    before, own = sides
    rows = [
        PartChange(
            before[part],
            own[part],
            part,
            explain_part(part, baseline, candidate, own[part] - before[part]),
        )
        for part in dict.fromkeys((*before, *own))
    ]
    return tuple(sorted(rows, key=order_by_change))


# Configuration differences as text.

NONE = "none detected"


def find_changed_settings(baseline: Report, candidate: Report) -> tuple[Setting, ...]:
    """One row for each setting that differs."""
    before, own = _list_settings(baseline), _list_settings(candidate)
    known = baseline.run.mesh is not None and candidate.run.mesh is not None
    inferred = known and (_is_inferred(baseline) or _is_inferred(candidate))
    return tuple(
        Setting("inferred mesh" if name == "mesh" and inferred else name, value, own[name])
        for name, value in before.items()
        if value != own[name]
    )


def _list_settings(report: Report) -> Mapping[str, str | None]:
    """The settings of one run as text, in display order; None if unknown."""
    run, pipeline = report.run, report.pipeline
    return {
        "world size": None if find_world_size(report) is None else format_world_size(report),
        "ranks recorded": f"{len(run.ranks):,}",
        "hosts": f"{len(run.hosts):,}",
        "device": run.device,
        "mesh": format_mesh(run.mesh),
        "backend": run.backend,
        "torch": run.torch,
        "NCCL": run.nccl,
        "driver": run.driver,
        "schedule": NONE if pipeline is None else pipeline.schedule,
        "microbatches": NONE if pipeline is None else f"{pipeline.microbatches:,}",
        "strategies": ", ".join(one.in_words for one in run.strategies) or NONE,
    }


def format_mesh(mesh: Sequence[AxisSize] | None) -> str | None:
    """The mesh as text, such as "pp 2 tp 4"; None if it is unknown."""
    return None if mesh is None else " ".join(f"{row.axis} {row.size}" for row in mesh)


# The summary of one run.


def build_side(report: Report) -> Side:
    """The summary of a run over its full steps. Raises UsageError if it has no step."""
    rows = select_full_steps(report.steps)
    if not rows:
        raise UsageError(f"{report.run.name}: no step to compare; record at least one full step")
    by_step: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        by_step[row.step].append(row.step_ns)
    steps_ns = [int(median(over_ranks_ns)) for over_ranks_ns in by_step.values()]
    return Side(
        name=report.run.name,
        steps=len(steps_ns),
        median_ns=compute_step_median_ns(rows),
        low_ns=min(steps_ns),
        high_ns=max(steps_ns),
        mean=compute_mean_split(rows),
        bubble_fraction=None if report.pipeline is None else report.pipeline.bubble_fraction,
        peak_allocated_bytes=find_peak_bytes(report),
        mfu=report.mfu,
        microbatches=None if report.pipeline is None else report.pipeline.microbatches,
        tokens_per_s=compute_token_rate(report),
    )


def find_peak_bytes(report: Report) -> int | None:
    """The peak memory of the fullest rank; None if unknown."""
    peaks = [row.peak_allocated_bytes for row in report.memory or ()]
    return max((peak for peak in peaks if peak is not None), default=None)


# JSON with the schema "stepsplit.compare/1": ComparisonFile.

_HINT = "compare the runs again"


def to_json(comparison: RunComparison) -> bytes:
    """The comparison as JSON text."""
    one = comparison
    file = ComparisonFile(
        baseline=one.baseline,
        candidate=one.candidate,
        step=StepChange(one.difference_ns, one.ratio, one.within_noise),
        settings=one.settings,
        buckets=tuple(
            BucketRow(row.bucket, row.baseline_ns, row.candidate_ns, row.difference_ns)
            for row in one.buckets
        ),
        exposed=one.exposed,
        collectives=one.collectives,
        kernels=one.kernels,
        parts=one.parts,
        findings=one.findings,
        meshes_differ=one.meshes_differ,
    )
    return msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"


def from_json(text: bytes, source: object = "compare.json") -> RunComparison:
    """Decode a comparison. Raises DataError if the text does not have this schema."""
    document = Document(RunComparison, SCHEMA, "a stepsplit comparison", _HINT)
    return document.decode(text, source)


# The comparison of a candidate with a baseline.
#
# Every table is sorted by the size of the change. Times are ns, sizes bytes, ratios 0..1.

SCHEMA = "stepsplit.compare/1"

MIN_STEPS = 2
"""Number of full steps per side needed to estimate the noise."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A configuration difference between two runs.

    Attributes:
        name: name of the setting.
        baseline: value in the baseline, as text; None if unknown.
        candidate: value in the candidate, as text; None if unknown.
    """

    name: str
    baseline: str | None
    candidate: str | None


@dataclass(frozen=True, slots=True)
class Side:
    """The summary of one run over its full steps.

    Attributes:
        name: name of the run.
        steps: number of full steps.
        median_ns: median step over ranks and steps.
        low_ns: fastest step, as median over the ranks.
        high_ns: slowest step, as median over the ranks.
        mean: mean split over ranks and steps; its buckets add up to the mean step.
        bubble_fraction: pipeline bubble; None without a pipeline.
        peak_allocated_bytes: peak memory of the fullest rank; None if unknown.
        mfu: model FLOPs utilization, 0..1; None if unknown.
        microbatches: microbatches of a step; None without a pipeline.
        tokens_per_s: tokens/s of one GPU by the mean step; None if the job is unknown.
    """

    name: str
    steps: int
    median_ns: int
    low_ns: int
    high_ns: int
    mean: Split
    bubble_fraction: float | None
    peak_allocated_bytes: int | None
    mfu: float | None
    microbatches: int | None = None
    tokens_per_s: float | None = None

    @property
    def microbatch_ns(self) -> float | None:
        """Median step per microbatch."""
        return self.median_ns / self.microbatches if self.microbatches else None

    @property
    def tokens(self) -> float | None:
        """Tokens of a step and GPU."""
        return None if self.tokens_per_s is None else self.tokens_per_s * self.mean.step_ns / 1e9


@dataclass(frozen=True, slots=True)
class Change:
    """A mean time per step and rank on both sides, in ns."""

    baseline_ns: int
    candidate_ns: int

    @property
    def difference_ns(self) -> int:
        """candidate - baseline."""
        return self.candidate_ns - self.baseline_ns

    @property
    def changed_ns(self) -> int:
        """Absolute value of the change."""
        return abs(self.difference_ns)


@dataclass(frozen=True, slots=True)
class BucketChange(Change):
    """The change of one bucket per step and rank, in ns.

    Attributes:
        baseline_ns: mean in the baseline.
        candidate_ns: mean in the candidate.
        bucket: one of `BUCKETS`.
    """

    bucket: str


@dataclass(frozen=True, slots=True)
class ExposedChange(BucketChange):
    """The change of a bucket on one axis per step and rank, in ns.

    Attributes:
        baseline_ns: mean in the baseline.
        candidate_ns: mean in the candidate.
        bucket: "collective", "p2p", "skew" or "bubble".
        axis: mesh axis, or the name of the groups; None if unknown. If the meshes differ, all that
            have the bucket in the baseline, joined by " + "; the candidate's if it has none.
        candidate_axis: those of the candidate; None if they are the same.
    """

    axis: str | None
    candidate_axis: str | None = None


@dataclass(frozen=True, slots=True)
class FamilyChange(Change):
    """The change of one kernel family (CPU runs: ops) per step and rank.

    Attributes:
        baseline_ns: mean time in the baseline.
        candidate_ns: mean time in the candidate.
        family: kernel family, such as "gemm".
        baseline_count: kernels in the baseline.
        candidate_count: kernels in the candidate.
    """

    family: str
    baseline_count: float
    candidate_count: float


@dataclass(frozen=True, slots=True)
class PartChange(Change):
    """The change of a part of the model in the mean step of a rank, over all layers and phases.

    Attributes:
        baseline_ns: its time in the baseline.
        candidate_ns: its time in the candidate.
        part: what it does, such as "attention".
        reason: what changed in its kernels, such as "no longer fused: 64 kernels of a step became
            320"; "" if the reports do not say it.
    """

    part: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FindingChange(Change):
    """The change of a bottleneck.

    Attributes:
        baseline_ns: estimated saving per step in the baseline; 0 if it is not among its findings.
        candidate_ns: the same in the candidate.
        code: identifier, such as "slow_rank".
        ranks: ranks to blame; empty if all.
        message: the finding in one sentence, the candidate's if it has it.
    """

    code: str
    ranks: tuple[int, ...]
    message: str


@dataclass(frozen=True, slots=True)
class CallStats:
    """Calls of one kind.

    Attributes:
        count: calls per step and rank.
        transfer_ns: median transfer time of one call.
        wait_ns: median wait of one call.
        busbw_bytes_per_s: median bus bandwidth; None if unknown.
    """

    count: float
    transfer_ns: int
    wait_ns: int
    busbw_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class CallsChange:
    """The calls of one op, dtype and size on one axis in both runs.

    Attributes:
        axis: mesh axis, or the name of the groups. If the meshes differ, all that have the
            op in the baseline, joined by " + "; the candidate's if it has none.
        op: operation, such as "all_reduce".
        dtype: data type; None if unknown.
        message_bytes: size of one call; None if unknown.
        baseline: calls in the baseline; None if there are none.
        candidate: calls in the candidate; None if there are none.
        candidate_axis: the axes in the candidate; None if they are the same.
    """

    axis: str
    op: str
    dtype: str | None
    message_bytes: int | None
    baseline: CallStats | None
    candidate: CallStats | None
    candidate_axis: str | None = None

    @property
    def changed_ns(self) -> float:
        """Change of transfers plus change of waits per step, from medians; only a sort key."""
        one, other = self.baseline or _NO_CALLS, self.candidate or _NO_CALLS
        moved = other.count * other.transfer_ns - one.count * one.transfer_ns
        waited = other.count * other.wait_ns - one.count * one.wait_ns
        return abs(moved) + abs(waited)


_NO_CALLS = CallStats(0.0, 0, 0, None)


_SAME_TOKENS = 0.005
"""Steps whose numbers of tokens differ by less, which is rounding, do the same work."""


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The comparison of a candidate with a baseline; see `compare_runs`.

    Tables are sorted by the size of the change, and empty if a side lacks the data.

    Attributes:
        baseline: summary of the baseline.
        candidate: summary of the candidate.
        settings: configuration differences.
        exposed: exposed communication by axis and bucket.
        collectives: calls by axis, op, dtype and size.
        kernels: compute by kernel family.
        findings: bottlenecks by cause and ranks.
        parts: the mean step by part of the model.
        meshes_differ: whether one mesh has an axis that the other lacks; then each run keeps its
            axes, collectives are matched by op, dtype and size, and exposed by bucket.
    """

    baseline: Side
    candidate: Side
    settings: tuple[Setting, ...]
    exposed: tuple[ExposedChange, ...]
    collectives: tuple[CallsChange, ...]
    kernels: tuple[FamilyChange, ...]
    findings: tuple[FindingChange, ...] = ()
    meshes_differ: bool = False
    parts: tuple[PartChange, ...] = ()

    def __post_init__(self) -> None:
        explained = sum(row.difference_ns for row in self.buckets)
        whole = self.candidate.mean.step_ns - self.baseline.mean.step_ns
        assert explained == whole, f"{whole - explained} ns of the difference are not in any bucket"

    @property
    def buckets(self) -> tuple[BucketChange, ...]:
        """The seven buckets; their differences add up to that of the mean step."""
        both = zip(
            BUCKETS, self.baseline.mean.buckets_ns, self.candidate.mean.buckets_ns, strict=True
        )
        return tuple(
            sorted(
                (BucketChange(one, other, bucket) for bucket, one, other in both),
                key=order_by_change,
            )
        )

    @property
    def difference_ns(self) -> int:
        """Median step of the candidate - baseline, in ns; positive if it is slower."""
        return self.candidate.median_ns - self.baseline.median_ns

    @property
    def ratio(self) -> float | None:
        """Median step of the candidate / baseline; None if the baseline is 0."""
        return (
            self.candidate.median_ns / self.baseline.median_ns if self.baseline.median_ns else None
        )

    @property
    def token_ratio(self) -> float | None:
        """Tokens/s of a GPU, candidate / baseline, if their steps process different numbers of
        tokens; else None."""
        one, other = self.baseline, self.candidate
        if not one.tokens or not other.tokens or not one.tokens_per_s or not other.tokens_per_s:
            return None
        same = abs(other.tokens / one.tokens - 1) < _SAME_TOKENS
        return None if same else other.tokens_per_s / one.tokens_per_s

    @property
    def microbatch_ratio(self) -> float | None:
        """Time per microbatch, candidate / baseline, if their numbers differ; else None."""
        one, other = self.baseline, self.candidate
        if one.microbatches == other.microbatches:
            return None
        if not one.microbatch_ns or not other.microbatch_ns:
            return None
        return other.microbatch_ns / one.microbatch_ns

    @property
    def within_noise(self) -> bool | None:
        """Whether the median step of each side lies in the range of the other side's steps.

        Not a statistical test. A single step within the other side's range is within the noise;
        None if it is outside, as it may be an odd one, or if both sides have a single step.
        """
        one, other = self.baseline, self.candidate
        reached = [
            side.low_ns <= median_ns <= side.high_ns
            for side, median_ns in ((one, other.median_ns), (other, one.median_ns))
            if side.steps >= MIN_STEPS
        ]
        is_within = bool(reached) and all(reached)
        return is_within if is_within or len(reached) == 2 else None

    @property
    def changed_findings(self) -> tuple[FindingChange, ...]:
        """The bottlenecks whose saving changed by at least a fiftieth of the baseline's step.

        Below a hundredth a saving is unknown. None if the steps differ by no more than noise.
        """
        if self.within_noise:
            return ()
        least = 2 * MIN_GAIN_SHARE * self.baseline.mean.step_ns
        return tuple(row for row in self.findings if row.changed_ns >= least)

    @property
    def same(self) -> bool:
        """Whether the runs are equal except for the name."""
        rows = (*self.exposed, *self.kernels, *self.findings)
        return (
            replace(self.baseline, name="") == replace(self.candidate, name="")
            and not self.settings
            and all(row.baseline_ns == row.candidate_ns for row in rows)
            and all(row.baseline == row.candidate for row in self.collectives)
        )


class StepChange(msgspec.Struct, frozen=True):
    """The change of the median step.

    Attributes:
        difference_ns: candidate - baseline, in ns.
        ratio: candidate / baseline; None if the baseline is 0.
        within_noise: whether the change is within the noise of the steps; None if they are too few
            to tell.
    """

    difference_ns: int
    ratio: float | None
    within_noise: bool | None


class BucketRow(msgspec.Struct, frozen=True):
    """The means of a bucket per step and rank, in ns.

    Attributes:
        bucket: one of `BUCKETS`.
        baseline_ns: mean in the baseline.
        candidate_ns: mean in the candidate.
        difference_ns: candidate - baseline; they add up to the difference of the mean step.
    """

    bucket: str
    baseline_ns: int
    candidate_ns: int
    difference_ns: int


class ComparisonFile(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison as JSON. Rows are sorted by the size of the change.

    Attributes:
        schema: version of the JSON, "stepsplit.compare/1".
        baseline: summary of the baseline.
        candidate: summary of the candidate.
        step: change of the median step.
        settings: configuration differences.
        buckets: the seven buckets.
        exposed: exposed communication by axis and bucket, per step and rank.
        collectives: calls by axis, op, dtype and size, per step and rank; null on a side without.
        kernels: compute by kernel family, per step and rank.
        parts: the mean step by part of the model, its differences add up to that of the mean step.
        findings: bottlenecks by cause and ranks; the gain of fixing each, 0 on a side without it.
        meshes_differ: whether one mesh has an axis that the other lacks: collectives are then
            compared by op, dtype and size, and exposed by bucket.
    """

    schema: str = SCHEMA
    baseline: Side
    candidate: Side
    step: StepChange
    settings: tuple[Setting, ...]
    buckets: tuple[BucketRow, ...]
    exposed: tuple[ExposedChange, ...]
    collectives: tuple[CallsChange, ...]
    kernels: tuple[FamilyChange, ...]
    findings: tuple[FindingChange, ...]
    meshes_differ: bool
    parts: tuple[PartChange, ...] = ()


def order_by_change(row: Change | CallsChange) -> float:
    """The sort key by the size of the change."""
    return -row.changed_ns
