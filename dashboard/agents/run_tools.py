"""The answers about one run: rows of its report and of its tables."""

from __future__ import annotations

from collections import Counter

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import select_rows
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.report.axis_names import name_axis
from stepsplit.analyzer.report.explain import explain_idle, list_unexplained_buckets
from stepsplit.analyzer.report.headline import describe_lacks, sum_exposed_by_phase, summarize
from stepsplit.analyzer.report.kind_rows import describe_other_steps
from stepsplit.analyzer.report.path_shares import compute_path_shares
from stepsplit.analyzer.report.report import SETTLES, Report, find_world_size, format_hosts
from stepsplit.analyzer.report.same_calls import merge_groups
from stepsplit.analyzer.report.step_rows import list_full_steps, select_full_steps
from stepsplit.analyzer.report.waits import sum_waits_by_root
from stepsplit.analyzer.trace import Lack
from stepsplit.dashboard.agents.answers import CannotAnswer, Own, ToolAnswer, mark_recorded, pick
from stepsplit.dashboard.agents.definitions import NUMBERS, find_number
from stepsplit.dashboard.agents.queries import (
    ExplainQuery,
    ListQuery,
    PagedQuery,
    RunQuery,
    StepsQuery,
    TimelineQuery,
)
from stepsplit.dashboard.agents.recordings import Recordings
from stepsplit.dashboard.agents.unknowns import list_unknowns

# What there is.


def list_recordings(recordings: Recordings, query: ListQuery) -> ToolAnswer:
    """The recordings below the allowed folders and the runs of the store."""
    rows = [(run.name, Own(run.kind), run.title) for run in recordings.list_runs()]
    about = "recordings that can be opened; pass a name as `recording`"
    if not rows:
        roots = ", ".join(mark_recorded(str(root)) for root in recordings.roots) or "no folder"
        # An empty list would be taken for an empty disk.
        about = f"no recording and no report was found below {roots}"
    return ToolAnswer(about, columns=("recording", "kind", "title"), rows=rows)


def describe_recording(recordings: Recordings, query: RunQuery) -> ToolAnswer:
    """What was recorded, and what it lacks."""
    report = recordings.open(query.recording).report
    run, steps = report.run, report.steps
    kinds = Counter(row.kind for row in steps)
    values = {
        "name": run.name,
        "world_size": find_world_size(report),
        "ranks_recorded": Own(units.format_number_list(run.ranks)),
        "hosts": Own(format_hosts(run)),
        "device": run.device,
        "backend": run.backend,
        "mesh": None if run.mesh is None else {one.axis: one.size for one in run.mesh},
        "mesh_source": run.mesh_source,
        "parallelism": [one.in_words for one in run.strategies],
        "versions": pick(run, "torch", "nccl", "driver"),
        "steps": Own(units.format_number_list(sorted({row.step for row in steps})) or "none"),
        "rows_by_kind": dict(kinds),
        "profiling_slowdown": run.profiling_slowdown,
        "warnings": list(dict.fromkeys(row.message for row in report.warnings)),
    }
    return ToolAnswer(
        _describe(report, "what was recorded"),
        values,
        cannot_answer=list_unknowns(report, "recording"),
    )


def _describe(report: Report, what: str) -> str:
    """What an answer is about; what the recording lacks comes first."""
    summary = report.summary or summarize(report.steps, report.exposed)
    lost = summary.lacks if summary else ()
    if not lost:
        return what
    # A text from a report is not repeated as ours: only the kinds that this version knows.
    known = [row for row in lost if row.lack in (*Lack,)]
    text = describe_lacks(known) or "incomplete recording"
    return f"{text[:_MAX_LACKS_CHARS]}. {what}"


_MAX_LACKS_CHARS = 400


# The step and its parts.


def describe_step(recordings: Recordings, query: RunQuery) -> ToolAnswer:
    """The mean step by bucket."""
    report = recordings.open(query.recording).report
    summary = report.summary or summarize(report.steps, report.exposed)
    if summary is None:
        return ToolAnswer("no step", cannot_answer=list_unknowns(report, "summary"))
    values: dict[str, object] = {
        **pick(summary, "steps", "step_ns", "median_ns", "p99_ns", "slowest_ns"),
        **pick(summary, "overlapped_ns", "bubble_covered_ns", "ambiguous_ns"),
        "other_steps": describe_other_steps(report.step_kinds) or None,
        **pick(report, "mfu", "hfu"),
        # In words, since a cause has been looked for in them and not been found.
        "large_parts": [f"{one.bucket}: {one.part}" for one in list_unexplained_buckets(report)],
    }
    rows = [
        (
            one.bucket,
            one.mean_ns,
            round(one.share, 4),
            {name_axis(axis.axis): axis.ns for axis in one.by_axis},
            one.worst_rank,
            one.worst_ns,
        )
        for one in summary.buckets
    ]
    step = units.format_milliseconds(summary.step_ns)
    parts = ", ".join(
        f"{mark_recorded(one.bucket, 20)} {units.format_percent(one.share)}"
        # A report of a stranger may have more.
        for one in summary.buckets[: len(BUCKETS)]
        if one.mean_ns
    )
    about = f"mean step over ranks and full steps {step}: {parts}; the buckets add up to step_ns"
    columns = ("bucket", "mean_ns", "share", "by_axis_ns", "worst_rank", "worst_ns")
    unknowns = list_unknowns(report, "summary")
    return ToolAnswer(_describe(report, about), values, columns, rows, unknowns)


def list_findings(recordings: Recordings, query: PagedQuery) -> ToolAnswer:
    """What costs time, and what a fix would save."""
    report = recordings.open(query.recording).report
    rows = []
    for one in report.findings:
        basis = one.basis
        rows.append(
            (
                one.code,
                one.message,
                one.gain_ns,
                one.bucket,
                list(one.ranks),
                None if basis is None else basis.kind,
                None if basis is None else Own(f"{basis.steps} of {basis.of_steps} steps"),
                None if basis is None else basis.spread_ns,
                Own(", ".join(SETTLES[each] for each in basis.would_settle)) if basis else None,
            )
        )
    columns = ("code", "finding", "gain_ns", "bucket", "ranks", "basis", "seen_in",
               "gain_spread_ns", "to_be_sure")  # fmt: skip
    about = (
        "bottlenecks, largest saving first, but last what gains only once another one is fixed and,"
        " on a CPU, the time between ops; gain_ns: how much shorter the mean step would be"
        " without it. Gains do not add up. basis: measured, replayed or inferred"
    )
    return ToolAnswer(
        _describe(report, about),
        {"step_ns": report.summary.step_ns if report.summary else None},
        columns,
        rows,
        list_unknowns(report, "findings"),
    )


def list_steps(recordings: Recordings, query: StepsQuery) -> ToolAnswer:
    """The split of each step of each rank, slow steps, and kinds of steps."""
    report = recordings.open(query.recording).report
    found = [
        row
        for row in report.steps
        if query.rank in (None, row.rank) and query.step in (None, row.step)
    ]
    values = {
        "slow_steps": [
            pick(one, "step", "step_ns", "excess_ns", "rank", "bucket") for one in report.slow_steps
        ],
        "step_kinds": [
            pick(one, "kind", "count", "mean_ns", "share", "extra") for one in report.step_kinds
        ],
    }
    names = [f"{bucket}_ns" for bucket in BUCKETS]
    columns = ("rank", "step", "kind", "step_ns", *names, "overlapped_ns", "estimated")
    rows = [tuple(getattr(row, name) for name in columns) for row in found]
    about = "the split of each step of a rank; slow_steps are outliers; the buckets add up"
    unknowns = list_unknowns(report, "steps")
    if not found and report.steps:
        ranks = units.format_number_list(report.run.ranks)
        unknown = CannotAnswer(
            "this rank or step",
            "not_recorded",
            f"it is not in the recording, which has the ranks {ranks}",
            "a rank and step of the recording",
        )
        # What was asked for comes before what the recording lacks in general.
        unknowns = (unknown, *unknowns)
    return ToolAnswer(_describe(report, about), values, columns, rows, unknowns)


def list_waits(recordings: Recordings, query: PagedQuery) -> ToolAnswer:
    """Who waits for whom, and why."""
    opened = recordings.open(query.recording)
    report = opened.report
    steps = len(list_full_steps(report.steps)) or 1
    caused = [
        {
            **pick(row, "rank", "cause"),
            "axis": name_axis(row.axis),
            "caused_skew_ns": row.caused_skew_ns // steps,
            "caused_bubble_ns": row.caused_bubble_ns // steps,
        }
        for row in report.blame
    ]
    late = [
        {
            **pick(row, "rank", "last_fraction", late_median_ns="late_ns_median"),
            "axis": name_axis(row.axis),
        }
        for row in report.lateness
        if row.straggler
    ]
    # Pairs of ranks, from the tables; without these, or with too many ranks, caused_by is all.
    rows: list[tuple[object, ...]] = []
    unknowns: tuple[CannotAnswer, ...] = ()
    tables, size = opened.load_tables(), max(report.run.ranks, default=-1) + 1
    if tables is None:
        unknowns = (_lacks_tables("who waits for whom"),)
    elif size > _MAX_MATRIX:
        unknown = CannotAnswer(
            "each pair of ranks",
            "not_known",
            f"there are {size:,} ranks; pairs are summed up to {_MAX_MATRIX:,}",
            "caused_by, which has all ranks",
        )
        unknowns = (unknown,)
    else:
        waits = select_rows(tables.waits, np.isin(tables.waits.step, list_full_steps(report.steps)))
        sums = sum_waits_by_root(waits, size) // steps
        pairs = np.argwhere(sums)
        order = np.argsort(-sums[pairs[:, 0], pairs[:, 1]], kind="stable")
        rows = [(one, other, int(sums[one, other])) for one, other in pairs[order].tolist()]
    about = (
        "caused_by: waiting of all ranks together that a rank caused, per step; rank null: the"
        " schedule, variation or unknown. rows: how long waits_rank waits per step for for_rank, at"
        " the end of the chain of waits"
    )
    return ToolAnswer(
        _describe(report, about),
        {"caused_by": caused, "stragglers": late},
        ("waits_rank", "for_rank", "wait_ns"),
        rows,
        (*unknowns, *list_unknowns(report, "waits")),
    )


# The matrix of ranks by ranks has 32 MB then.
_MAX_MATRIX = 2_048


def _lacks_tables(what: str) -> CannotAnswer:
    return CannotAnswer(
        what,
        "needs_trace",
        "only report.json was kept, without the tables next to it",
        "the traces, or a folder of stepsplit analyze --out",
    )


def list_collectives(recordings: Recordings, query: PagedQuery) -> ToolAnswer:
    """Calls by op, axis and size, with their bandwidth."""
    report = recordings.open(query.recording).report
    rows = []
    for same in merge_groups(report):
        # The slowest group of the axis: a mean would hide the one slow link.
        first = max(same.rows, key=lambda row: row.transfer_ns_median)
        rates = same.busbw_bytes_per_s
        rows.append(
            (
                same.axis,
                first.op,
                first.dtype,
                first.message_bytes,
                len(same.rows),
                round(max(same.per_step), 2),
                first.transfer_ns_median,
                first.wait_ns_median,
                min(rates) if rates else None,
                max(rates) if rates else None,
            )
        )
    full = len(select_full_steps(report.steps)) or 1
    exposed = [
        {"axis": name_axis(axis), "phase": phase}
        | {f"{part}_ns": ns // full for part, ns in parts.items()}
        for (axis, phase), parts in sum_exposed_by_phase(report.steps, report.exposed).items()
    ]
    columns = ("axis", "op", "dtype", "message_bytes", "groups", "calls_per_step",
               "transfer_median_ns", "wait_median_ns", "busbw_slowest_group_bytes_per_s",
               "busbw_fastest_group_bytes_per_s")  # fmt: skip
    about = (
        "calls of one op, dtype and size on the groups of an axis; transfer without waits, of the"
        " slowest group; calls_per_step of one group, not of all. exposed: what compute does not"
        " hide, mean per rank and step"
    )
    return ToolAnswer(
        _describe(report, about),
        {"exposed": exposed},
        columns,
        rows,
        list_unknowns(report, "collectives"),
    )


def list_critical_path(recordings: Recordings, query: PagedQuery) -> ToolAnswer:
    """What the end of a step depends on."""
    report = recordings.open(query.recording).report
    steps = len(report.path_steps) or 1
    rows = [
        (one.bucket, one.axis, round(one.ns), round(one.share, 4), Own(one.ranks_text))
        for one in sorted(compute_path_shares(report), key=lambda one: -one.ns)
    ]
    kernels = [
        {**pick(row, "rank", "kernel", "bucket"), "per_step_ns": row.ns // steps}
        for row in report.path_kernels[:8]
    ]
    about = "the critical path of the mean step, from the first start to the last end of all ranks"
    return ToolAnswer(
        _describe(report, about),
        {"kernels": kernels},
        ("bucket", "axis", "per_step_ns", "share", "mostly_on"),
        rows,
        list_unknowns(report, "critical_path"),
    )


def describe_pipeline(recordings: Recordings, query: PagedQuery) -> ToolAnswer:
    """The pipeline bubble and its ideal."""
    report = recordings.open(query.recording).report
    one = report.pipeline
    unknowns = list_unknowns(report, "pipeline")
    if one is None:
        return ToolAnswer(_describe(report, "no pipeline bubble"), cannot_answer=unknowns)
    shares = ("bubble_fraction", "ideal_bubble_fraction", "bubble_overhead")
    values = pick(one, "schedule", "microbatches", *shares)
    rows = [(row.stage, row.bubble_ns, row.bubble_fraction) for row in one.stages]
    about = "the bubble from the grid of forwards and backwards: bubble / pipeline time"
    return ToolAnswer(
        _describe(report, about), values, ("stage", "bubble_ns", "bubble_fraction"), rows, unknowns
    )


def list_kernels(recordings: Recordings, query: PagedQuery) -> ToolAnswer:
    """Compute by kernel family, and kernels that are slower on one rank."""
    report = recordings.open(query.recording).report
    steps = len(list_full_steps(report.steps)) or 1
    slow = [
        {
            **pick(row, "rank", "kernel", "family", "ratio", lost_per_step_ns="lost_ns"),
            "equal_shapes_known": row.shapes is not None,
        }
        for row in report.slow_kernels
    ]
    contention = [pick(row, "rank", "ratio", "lost_ns") for row in report.contention]
    rows = [
        (row.rank, row.family, row.count, row.total_ns // steps, row.share)
        for row in report.kernels
    ]
    about = (
        "kernel time by family and rank per step; slow_kernels: slower than on peer ranks; longest:"
        " kernels with most time, what bounds each, and what a step saves at the model's rate"
    )
    return ToolAnswer(
        _describe(report, about),
        {
            "slow_kernels": slow,
            "slowed_by_communication": contention,
            "longest": [
                pick(row, "name", "step_ns", "share", "limit", "peak_share", "saves_ns")
                for row in report.kernel_table[:6]
            ],
        },
        ("rank", "family", "count_all_steps", "per_step_ns", "share"),
        rows,
        list_unknowns(report, "kernels"),
    )


def list_parts(recordings: Recordings, query: PagedQuery) -> ToolAnswer:
    """The mean step by part of the model."""
    report = recordings.open(query.recording).report
    evidence = report.part_evidence
    columns = ("layer", "part", "phase", "compute_ns", "exposed_ns", "bubble_ns", "copy_ns",
               "idle_ns", "ranks", "slowest_rank")  # fmt: skip
    rows = [
        tuple(getattr(row, name) for name in columns)
        for row in sorted(report.parts, key=lambda row: -row.total_ns)
    ]
    values = {
        "evidence": None if evidence is None else evidence.evidence,
        "layers": None if evidence is None else evidence.layers,
        "unplaced_share": None if evidence is None else evidence.unplaced_share,
    }
    about = (
        "the mean step by layer, part and phase, largest first; the rows add up to the step."
        " evidence: how the parts were found; other: what nothing places"
    )
    unknowns = list_unknowns(report, "parts")
    return ToolAnswer(_describe(report, about), values, columns, rows, unknowns)


def list_idle(recordings: Recordings, query: PagedQuery) -> ToolAnswer:
    """Why devices idle."""
    report = recordings.open(query.recording).report
    steps = len(list_full_steps(report.steps)) or 1
    rows = [
        (row.rank, row.cause, row.op, row.idle_ns // steps, row.count)
        for row in sorted(report.idle, key=lambda row: -row.idle_ns)
    ]
    about = "idle time by cause and host op, per step of a rank"
    return ToolAnswer(
        _describe(report, about),
        {"largest": explain_idle(report.idle)},
        ("rank", "cause", "op", "per_step_ns", "gaps_all_steps"),
        rows,
        list_unknowns(report, "idle"),
    )


def list_memory(recordings: Recordings, query: PagedQuery) -> ToolAnswer:
    """Memory at its peak."""
    report = recordings.open(query.recording).report
    columns = ("rank", "peak_allocated_bytes", "peak_reserved_bytes", "weights_bytes",
               "gradients_bytes", "optimizer_bytes", "activations_bytes", "transient_bytes",
               "other_bytes")  # fmt: skip
    rows = [tuple(getattr(row, name) for name in columns) for row in report.memory or ()]
    about = "memory of each rank at its peak; null: not measured"
    return ToolAnswer(
        _describe(report, about),
        columns=columns if rows else (),
        rows=rows,
        cannot_answer=list_unknowns(report, "memory"),
    )


# The timeline as text.


def list_timeline(recordings: Recordings, query: TimelineQuery) -> ToolAnswer:
    """The kernels and calls of a rank in a window of time."""
    opened = recordings.open(query.recording)
    report, tables = opened.report, opened.load_tables()
    if tables is None or query.rank not in tables.slices:
        if query.rank not in report.run.ranks:
            ranks = units.format_number_list(report.run.ranks)
            raise UsageError(f"rank {query.rank} is not recorded; recorded are {ranks}")
        return ToolAnswer("no timeline", cannot_answer=(_lacks_tables("what ran when"),))
    start_ns, end_ns = _choose_window(report, query)
    slices = tables.slices[query.rank]
    ends_ns = slices.start_ns + slices.dur_ns
    inside = np.flatnonzero((slices.start_ns < end_ns) & (ends_ns > start_ns))
    order = inside[np.argsort(slices.start_ns[inside], kind="stable")]
    rows: list[tuple[object, ...]] = [
        (
            int(slices.start_ns[at]),
            int(slices.dur_ns[at]),
            slices.lanes[slices.lane[at]],
            BUCKETS[slices.bucket[at]],
            slices.names[slices.name[at]],
            int(slices.owner[at]) if slices.owner[at] >= 0 else None,
        )
        for at in order[: query.offset + _MAX_SLICES].tolist()
    ]
    # The rows beyond are counted, not built.
    rows += [()] * (len(order) - len(rows))
    segments = tables.segments
    own = (segments.rank == query.rank) & (segments.start_ns < end_ns)
    own &= segments.start_ns + segments.dur_ns > start_ns
    spent: Counter[str] = Counter()
    for at in np.flatnonzero(own).tolist():
        begin = max(start_ns, int(segments.start_ns[at]))
        end = min(end_ns, int(segments.start_ns[at] + segments.dur_ns[at]))
        spent[BUCKETS[segments.bucket[at]]] += end - begin
    values = {
        "rank": query.rank,
        "start_ns": start_ns,
        "end_ns": end_ns,
        "window_by_bucket_ns": dict(spent.most_common()),
    }
    about = "kernels, copies and parts of calls in the window, by start; a wait names its rank"
    columns = ("start_ns", "dur_ns", "lane", "bucket", "name", "waits_for_rank")
    return ToolAnswer(_describe(report, about), values, columns, rows)


_MAX_SLICES = 200
"""More rows than a page has."""


def _choose_window(report: Report, query: TimelineQuery) -> tuple[int, int]:
    rows = [row for row in report.steps if row.rank == query.rank]
    if query.step is not None:
        rows = [row for row in rows if row.step == query.step]
    if query.start_ns is not None and query.end_ns is not None:
        window = query.start_ns, query.end_ns
    elif not rows:
        of_step = "" if query.step is None else f" number {query.step}"
        raise UsageError(f"rank {query.rank} has no step{of_step}; give start_ns and end_ns")
    else:
        row = max(select_full_steps(rows), key=lambda row: row.step_ns)
        window = (
            row.start_ns if query.start_ns is None else query.start_ns,
            row.start_ns + row.step_ns if query.end_ns is None else query.end_ns,
        )
    if window[0] >= window[1]:
        raise UsageError(f"start_ns ({window[0]}) must be before end_ns ({window[1]})")
    return window


# Where a number comes from.


def explain_number(recordings: Recordings, query: ExplainQuery) -> ToolAnswer:
    """The meaning, formula and rows of a number."""
    from stepsplit.analyzer.schemas import list_meanings

    found = find_number(query.number)
    columns, rows = ("field", "meaning"), list_meanings(query.number)
    if found is None:
        known = ", ".join(NUMBERS)
        about = f"fields of this name. Numbers with a formula: {known}"
        if not rows:
            raise UsageError(f"no number {mark_recorded(query.number)}; there are {known}")
        return ToolAnswer(about, columns=columns, rows=[(Own(a), Own(b)) for a, b in rows])
    name, entry = found
    values: dict[str, object] = {
        "number": Own(name),
        "meaning": Own(entry.meaning),
        "formula": Own(entry.formula),
        "from_rows": Own(entry.rows),
        "docs": Own(entry.page),
    }
    unknowns: tuple[CannotAnswer, ...] = ()
    if query.recording:
        report = recordings.open(query.recording).report
        terms = dict(entry.terms(report)) if entry.terms else {}
        values["terms"] = terms or None
        if entry.terms is not None and not terms:
            unknown = CannotAnswer(
                f"the terms of {name} in this recording",
                "not_recorded",
                "the report has no rows for it",
                "the tools recording and summary say what is missing",
            )
            unknowns = (unknown,)
    return ToolAnswer(
        "where a number comes from",
        values,
        columns if rows else (),
        [(Own(a), Own(b)) for a, b in rows],
        unknowns,
    )
