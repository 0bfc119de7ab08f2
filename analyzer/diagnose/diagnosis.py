"""The diagnosis of a split recording: its bottlenecks, who caused which waits, critical paths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from msgspec import structs

from stepsplit.analyzer import units
from stepsplit.analyzer.allocator import return_freed_memory
from stepsplit.analyzer.diagnose.causes.findings import find_bottlenecks
from stepsplit.analyzer.diagnose.counted_work import WorkLaw, read_counted_work
from stepsplit.analyzer.diagnose.graph.blame import Blame, blame
from stepsplit.analyzer.diagnose.graph.charges import KnownDelay
from stepsplit.analyzer.diagnose.graph.critical_path import find_critical_paths
from stepsplit.analyzer.diagnose.graph.dependency_graph import build_dependency_graph
from stepsplit.analyzer.diagnose.late_arrivals import compute_lateness
from stepsplit.analyzer.diagnose.slow_kernels import find_slow_kernels, sum_slow_ranks
from stepsplit.analyzer.report.build import Diagnosis, find_full_numbers, find_origin_ns
from stepsplit.analyzer.report.report import BlameRow
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.trace import Lack, Note
from stepsplit.collectors.formats.rank_record import RankRecord


def diagnose(split: RunSplit, records: Sequence[RankRecord] = ()) -> Diagnosis:
    """Diagnose a split recording; records are what each rank recorded about its own device."""
    origin, numbers = find_origin_ns(split), find_full_numbers(split)
    slow_kernels, lateness = find_slow_kernels(split), compute_lateness(split)
    graph = build_dependency_graph(split)
    work = read_counted_work(split, graph.steps.rank, graph.steps.full, records)
    law = work.law if work.law is not None and work.law.uneven.any() else None
    if law is not None:
        # Of ranks with different work, kernels are equal only by their shapes: a grid may be that
        # of a kernel that takes more tokens in a longer time.
        times = {
            rank.trace.rank: law.bound_times(index, graph.steps.rank)
            for index, rank in enumerate(split.ranks)
        }
        slow_kernels = tuple(
            one
            for one in slow_kernels
            if one.ratio > times[one.rank] or sum_slow_ranks([one])[0].equal == "shapes"
        )
    return_freed_memory()
    bottlenecks = find_bottlenecks(split, graph, origin, records, slow_kernels, law)
    return_freed_memory()
    slow_ranks = frozenset(one.rank for one in slow_kernels)
    if law is not None:
        slow_ranks |= {split.ranks[index].trace.rank for index in law.slow}
        unjudged = {split.ranks[index].trace.rank for index in law.unjudged}
        found = [one.ranks for one in bottlenecks.findings if one.code == "slow_rank"]
        slow_ranks |= unjudged.intersection({rank for ranks in found for rank in ranks})
    # What a finding says of a rank is no variation in the blame.
    known = [
        KnownDelay(rank, step, one.bucket)
        for one in bottlenecks.findings
        for rank in one.ranks
        for step in one.steps
    ]
    # No rank is blamed in a step of which it lacks events: what the others wait for is unknown.
    torn = {note.rank for note in split.notes if note.lack in (Lack.FILE, Lack.DEVICE_END)}
    whole = {(s.rank, s.step) for rank in split.ranks for s in rank.steps if s.kind != "partial"}
    blamed = _build_blame(
        [
            structs.replace(one, rank=None, cause="unknown")
            if one.rank in torn and one.cause != "missing" and (one.rank, one.step) not in whole
            else one
            for one in _blame_by_work(
                blame(split, graph, slow_ranks, known, law), split, slow_ranks, law
            )
        ],
        numbers,
    )
    unexplained = _compute_share(blamed, ("unexplained", "unknown"))
    notes = [*work.notes, *bottlenecks.notes]
    # Only what no dependency explains makes savings doubtful: a replay keeps it as it is.
    doubtful = _compute_share(blamed, ("unexplained",)) or 0.0
    if doubtful > _MAX_UNEXPLAINED_SHARE:
        text = (
            f"{units.format_percent(doubtful)} of the waiting is not explained by launches, "
            "streams and the other ranks: collectives start later than everything that they were "
            "seen to depend on, or are not matched across ranks; estimated savings may be off by "
            "as much"
        )
        notes.append(Note("unexplained_waits", text))
    paths = find_critical_paths(split, graph, numbers)
    return Diagnosis(
        findings=tuple(
            structs.replace(
                one, basis=one.basis and structs.replace(one.basis, unexplained_share=unexplained)
            )
            for one in bottlenecks.findings
        ),
        blame=blamed,
        critical_path=paths.parts,
        path_steps=tuple(
            structs.replace(step, start_ns=step.start_ns - origin, end_ns=step.end_ns - origin)
            for step in paths.steps
        ),
        path_kernels=tuple(
            structs.replace(one, start_ns=one.start_ns - origin) for one in paths.kernels
        ),
        lateness=lateness,
        slow_kernels=slow_kernels,
        notes=tuple(notes),
        step_work=work.rows,
        work=work.law.summary if work.law is not None else None,
    )


def _blame_by_work(
    blamed: Sequence[Blame], split: RunSplit, slow_ranks: frozenset[int], law: WorkLaw | None
) -> Sequence[Blame]:
    """Blame without that of a rank for usual compute where its work differs from its peers': what
    its work does not explain is variation, unless the rank is slow."""
    stages = {split.layout.find_stage(rank.trace.rank) for rank in split.ranks}
    if law is None or len(stages) > 1:
        return blamed
    return [
        structs.replace(one, rank=None, cause="variation")
        if one.cause == "compute" and one.rank is not None and one.rank not in slow_ranks
        else one
        for one in blamed
    ]


def _build_blame(blamed: Sequence[Blame], steps: frozenset[int]) -> tuple[BlameRow, ...]:
    """Sums what was blamed in these steps by rank, cause and axis."""
    together: dict[tuple[int | None, str, str | None], list[Blame]] = defaultdict(list)
    for one in blamed:
        if one.step in steps and (one.skew_ns or one.bubble_ns):
            together[one.rank, one.cause, one.axis].append(one)
    rows = [
        BlameRow(
            rank, cause, sum(b.skew_ns for b in same), sum(b.bubble_ns for b in same),
            sum(b.skew_ns + b.bubble_ns for b in same), axis, tuple(sorted({b.step for b in same})),
        )
        for (rank, cause, axis), same in together.items()
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -row.caused_ns))


def _compute_share(blamed: Sequence[BlameRow], causes: Collection[str]) -> float | None:
    """The share of these causes in all waiting; None without waiting."""
    total = sum(row.caused_ns for row in blamed)
    part = sum(row.caused_ns for row in blamed if row.cause in causes)
    return part / total if total else None


_MAX_UNEXPLAINED_SHARE = 0.05
"""More unexplained waiting than this fraction is a warning."""
