"""The terminal screen of a run: what ran, where the step went, which ranks and causes matter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import mean, median

from msgspec import UNSET, Struct
from rich.bar import Bar
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table

from stepsplit.analyzer import units
from stepsplit.analyzer.bucket_styles import TERMINAL_STYLE
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.axis_names import name_axis
from stepsplit.analyzer.report.explain import list_unexplained_buckets
from stepsplit.analyzer.report.headline import (
    BucketMean,
    Summary,
    describe_lacks,
    divide_parts,
    round_parts,
    round_shares,
    summarize,
)
from stepsplit.analyzer.report.kind_rows import describe_other_steps
from stepsplit.analyzer.report.report import (
    SCHEDULE_NAMES,
    SETTLES,
    IdleRow,
    Pipeline,
    Report,
    Run,
    WarningRow,
    compute_token_rate,
    count_devices,
    describe_ideal_bubble,
    format_hosts,
    format_world_size,
)
from stepsplit.analyzer.report.same_calls import merge_groups
from stepsplit.analyzer.report.step_rows import select_full_steps
from stepsplit.dashboard.reporters.console import DIM, Text
from stepsplit.dashboard.reporters.gap import build_gap_section
from stepsplit.dashboard.reporters.parts import build_all_parts, build_parts_section
from stepsplit.dashboard.reporters.rl_step import build_rl_section
from stepsplit.dashboard.reporters.tables import (
    AXIS_SHORT,
    MOST_STAGES,
    build_table,
    format_clock_error,
    format_coverage,
    format_critical_path,
    format_memory,
    format_overlap,
    format_profiling,
    format_slow_steps,
    name_ranks,
)

STRATEGY_NAME = {
    "cp": "CP",
    "ddp": "DDP",
    "ep": "EP",
    "fsdp": "FSDP",
    "hsdp": "HSDP",
    "pp": "PP",
    "sp": "SP",
    "tp": "TP",
    "zero-1": "ZeRO-1",
    "zero-2": "ZeRO-2",
}


def build_report_screen(report: Report, all_parts: bool = False) -> RenderableType:
    """The whole screen of a report, for a rich console of any width from 80 columns; with all_parts
    also the parts by layer and the kernels."""
    summary = report.summary or summarize(report.steps, report.exposed)
    run = report.run
    known = (
        f"run {run.name}",
        f"{count_devices(report)} x {run.device} ({format_hosts(run)})",
        " ".join(f"{a.axis} {a.size}" for a in run.mesh) if run.mesh else "mesh unknown",
        run.backend or "",
        f"torch {run.torch}" if run.torch else "",
        f"NCCL {run.nccl}" if run.nccl else "",
        f"mesh: {run.mesh_source}" if run.mesh_source else "",
    )
    parts: list[RenderableType] = [Text("   ".join(filter(None, known)), style="bold")]
    # What the recording lacks comes before all that is computed without it.
    if lacks := describe_lacks(summary.lacks if summary else ()):
        parts.append(Text(lacks, style="bold yellow"))
    if run.strategies:
        strategies = []
        for strategy in run.strategies:
            words, schedule = strategy.in_words, SCHEDULE_NAMES.get(strategy.detail)
            if schedule is not None:
                words = words.replace(f"({strategy.detail})", f"({schedule})")
            name = STRATEGY_NAME.get(strategy.name, strategy.name)
            strategies.append(name + words.removeprefix(strategy.name))
        known_strategies = ", ".join(strategies)
        parts.append(Text(f"detected parallelism: {known_strategies}", style="bold"))
    parts += _describe_steps(report, summary)
    if memory := format_memory(report.memory or ()):
        parts.append(Text(memory))
    # One line a warning; a warning that several ranks share is one line.
    same: dict[str, list[WarningRow]] = {}
    for row in report.warnings:
        same.setdefault(row.code if row.rank is not None else row.message, []).append(row)
    lines = []
    for first, *others in same.values():
        of_rank = "" if first.rank is None else f" (rank {first.rank})"
        also = f"; also on {len(others)} other rank{'s' if others[1:] else ''}" if others else ""
        lines.append(Text(f"warning: {first.message}{of_rank}{also}", style="yellow"))
    parts += lines
    parts += [Text(), BucketTable(report, summary), _format_memo(report, summary)]
    parts += format_coverage(report)
    parts += format_critical_path(report)
    if report.rl_step is not UNSET:
        parts += build_rl_section(report.rl_step)
    parts += build_parts_section(report)
    if report.pipeline is not None:
        parts += [Text(), build_stages_table(report, report.pipeline)]
    if report.collectives:
        parts += [Text(), build_collectives_table(report)]
    if report.gap is not None:
        parts += [Text(), *build_gap_section(report.gap)]
    if report.findings:
        more = "" if len(report.findings) < 2 else ", not additive"
        bases = [finding.basis for finding in report.findings if finding.basis is not None]
        # What holds for all is said once, and what is certain is not.
        doubts = [set(basis.would_settle) for basis in bases]
        common = set.intersection(*doubts) if doubts else set()
        more += "".join(f"; to be sure: {SETTLES[one]}" for one in sorted(common))
        rows = []
        for place, finding in enumerate(report.findings, 1):
            basis, doubt = finding.basis, ""
            if basis and (needed := [one for one in basis.would_settle if one not in common]):
                known_how = "inferred, " if basis.kind == "inferred" else ""
                doubt = f"; {known_how}to be sure: {', '.join(SETTLES[one] for one in needed)}"
            saving = units.format_milliseconds(finding.gain_ns)
            rows.append((str(place), saving, finding.message + doubt))
        parts += _build_list(f"TOP BOTTLENECKS (estimated saving per step{more})", rows)
    if large := list_unexplained_buckets(report):
        rows = [(one.bucket, units.format_percent(one.share), one.part) for one in large]
        parts += _build_list("OTHER LARGE PARTS OF THE STEP", rows)
    parts += format_slow_steps(report)
    if all_parts:
        parts += build_all_parts(report)
    return Group(*parts)


def _describe_steps(report: Report, summary: Summary | None) -> list[Text]:
    """Which steps and ranks were used, and how long a step took."""
    numbers = {row.step for row in report.steps}
    full = {row.step for row in report.steps if row.kind == "full"}
    reasons = []
    for number in sorted(numbers):
        # Such as "#13 partial on rank 1"; nothing if all ranks use the step.
        rows = [row for row in report.steps if row.step == number]
        why = {row.kind: _LEFT_OUT[row.kind] for row in rows if row.kind in _LEFT_OUT}
        if why:
            left = [row.rank for row in rows if row.kind in _LEFT_OUT]
            on = f" on {name_ranks(left)}" if len(left) < len(rows) else ""
            reasons.append(f"#{number} {' or '.join(why.values())}{on}")
    steps = f"steps {len(full)} of {len(numbers)} used"
    steps += f" (left out: {', '.join(reasons)})" if reasons else ""
    ranks = f"{len(report.run.ranks)} of {format_world_size(report)} ranks"
    first = (steps, ranks, format_clock_error(report))
    second = []
    if summary is not None:
        # The mean has the decimals of its parts, which stand in the table below.
        unit_ns = units.choose_part_unit_ns(summary.step_ns)
        (step,) = round_parts([summary.step_ns], unit_ns)
        times = [f"median {units.format_milliseconds(summary.median_ns)}"]
        if summary.p99_ns is not None:
            times.append(f"p99 {units.format_milliseconds(summary.p99_ns)}")
        times.append(f"slowest {units.format_milliseconds(summary.slowest_ns)}")
        known = "; ".join(filter(None, (", ".join(times), format_profiling(report.run))))
        second.append(f"step {units.format_parts(step, unit_ns)} ({known})")
    # Tokens a second and MFU, which only the job's model gives.
    per_s = compute_token_rate(report)
    if per_s is not None:
        device = "rank" if report.run.device == "cpu" else "GPU"
        second.append(f"{units.format_tokens_per_second(per_s)}/{device}")
        if report.mfu is not None:
            second.append(f"MFU {units.format_percent(report.mfu)}")
    third = describe_other_steps(report.step_kinds)
    counted = report.work.describe() if report.work else ""
    return [
        Text("   ".join(part for part in line if part))
        for line in (first, second, [counted], [third])
        if any(line)
    ]


_LEFT_OUT = {"partial": "partial", "other": "other work"}


def _format_memo(report: Report, summary: Summary | None) -> Text:
    if summary is None:
        return Text("no step in the recording")
    rows = select_full_steps(report.steps)
    estimated = sum(row.estimated for row in rows)
    memo = (
        "means over ranks and steps. overlapped communication: "
        f"{units.format_milliseconds(summary.overlapped_ns)}{format_overlap(report)}"
    )
    # Shown only if they are not zero: most runs have neither.
    rare = {
        "inside the pipeline bubble": units.format_milliseconds(summary.bubble_covered_ns),
        "ambiguous gaps": units.format_milliseconds(summary.ambiguous_ns),
    }
    memo += "".join(
        f"; {name}: {time}" for name, time in rare.items() if time != units.format_milliseconds(0)
    )
    if estimated:
        missing = "(ranks or ends of calls missing)"
        memo += f"; waits of {estimated} of {len(rows)} steps are estimates {missing}"
    return Text(memo, style=DIM)


def _build_list(heading: str, rows: Sequence[tuple[str, str, str]]) -> list[RenderableType]:
    """A heading, and below it a line of name, number and sentence for each row."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return [Text(), Text(heading, style="bold"), table]


# The tables of the report: buckets, pipeline stages, collectives.

MAX_COLLECTIVES = 6

_FEW_AXES = 2

_LEAST_BAR = 8
"""Columns of the terminal that the bars need to be of use."""

# Wider than any table: the width that a table would like to have is measured.
_ANY_WIDTH = 1000

_AXES = ("tp", "cp", "ep", "pp", "dp_replicate", "dp_shard")


class BucketTable:
    """The seven buckets: measured, share, model and difference, by axis, and the worst rank.

    Means over ranks and full steps in one unit: the buckets add up to the step, and the axes to
    their bucket, as printed. model is the mean of the predicted stages. A narrow terminal shows
    fewer columns, as no number is cut: without the model, which the comparison below has too, or
    without the axes.
    """

    def __init__(self, report: Report, summary: Summary | None) -> None:
        self._axes = list[str | None]()
        if summary is not None:
            parts = (part for row in summary.buckets for part in row.by_axis)
            used = dict.fromkeys(_find_column(part.axis, report.run) for part in parts)
            # A mesh may have axes of any name, and without their column a row would not add up.
            named = [*(axis for axis in _AXES if axis in used), *(axis for axis in used if axis)]
            # If no group lies along axes there is no column.
            if named:
                self._axes = [*dict.fromkeys(named), *([None] if None in used else [])]
        self._compared = ("model", "diff") if report.gap is not None else ()
        self._rows = [] if summary is None else _build_rows(report, summary, self._axes)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # From the most to the fewest columns: the first that fits.
        few = len(self._axes) <= _FEW_AXES
        wide = options.update(max_width=_ANY_WIDTH)
        for axes, model, causes, bars in (
            (True, True, few, True),
            (True, True, False, True),
            (True, True, False, False),
            (True, False, False, True),
            (True, False, False, False),
            (False, True, False, True),
            (False, False, False, False),
        ):
            bare = Measurement.get(console, wide, self._build(axes, model, causes, bars=False))
            if bare.maximum + _LEAST_BAR * bars <= options.max_width:
                break
        yield self._build(axes, model, causes, bars)

    def _build(self, axes: bool, model: bool, causes: bool, bars: bool) -> Table:
        """The table with these columns; causes are those of idle time."""
        shown = map(name_axis, self._axes if axes else ())
        names = [AXIS_SHORT.get(name, name) for name in shown]
        compared = self._compared if model else ()
        bar = ("",) if bars else ()
        table = build_table("", "measured", "share", *compared, *names, "worst rank", *bar)
        for row in self._rows:
            style = TERMINAL_STYLE[row.bucket]
            table.add_row(
                Text(row.bucket, style=style),
                *row.measured,
                *(row.compared if model else ()),
                *(row.by_axis if axes else ()),
                row.worst_with_cause if causes else row.worst,
                *([Bar(1.0, 0.0, row.share, color=style)] if bars else []),
            )
        return table


def _find_column(axis: str | None, run: Run) -> str | None:
    """The column of an axis or of several; groups that are known by their descriptions alone, which
    may be many and long, share one."""
    known = {*_AXES, *(one.axis for one in run.mesh or ())}
    return axis if axis and known.issuperset(axis.split(" x ")) else None


class _BucketCells(Struct, frozen=True):
    """The cells of a bucket; measured includes its share, compared are model and difference."""

    bucket: str
    share: float
    measured: tuple[str, str]
    compared: tuple[str, ...]
    by_axis: tuple[str, ...]
    worst: str
    worst_with_cause: str


def _build_rows(report: Report, summary: Summary, axes: Sequence[str | None]) -> list[_BucketCells]:
    unit_ns = units.choose_part_unit_ns(summary.step_ns)
    by_axis: list[Counter[str | None]] = []
    for row in summary.buckets:
        by_axis.append(Counter())
        for part in row.by_axis:
            by_axis[-1][_find_column(part.axis, report.run)] += part.ns
    # Axes and buckets are rounded together; a bucket without axes is one part.
    parts_ns = [
        [own.get(axis, 0) for axis in axes] if axes and own else [row.mean_ns]
        for row, own in zip(summary.buckets, by_axis, strict=True)
    ]
    counts = iter(round_parts([ns for own in parts_ns for ns in own], unit_ns))
    shares = round_shares([row.mean_ns for row in summary.buckets])
    model_ns: dict[str, int] = {}
    model: Sequence[int] = ()
    if report.gap is not None:
        # The mean of the stages that the recording holds.
        stages = [stage.predicted.buckets_ns for stage in report.gap.stages]
        sums = [sum(times) for times in zip(*stages, strict=True)]
        model_ns = dict(zip(BUCKETS, divide_parts(sums, len(stages)), strict=True))
        model = round_parts([*model_ns.values()], unit_ns)
    rows = []
    for place, row in enumerate(summary.buckets):
        own_counts = [next(counts) for _ in parts_ns[place]]
        compared: tuple[str, ...] = ()
        if model:
            difference = sum(own_counts) - model[place]
            compared = (
                units.format_parts(model[place], unit_ns),
                units.format_signed_parts(difference, unit_ns),
            )
            # A bucket that neither has says nothing by its zeros.
            if not model_ns[row.bucket] and not row.mean_ns:
                compared = ("", "")
        on_axes = [""] * len(axes)
        if axes and by_axis[place]:
            on_axes = [
                units.format_parts(count, unit_ns) if axis in by_axis[place] else ""
                for axis, count in zip(axes, own_counts, strict=True)
            ]
        # In the unit of the table, but by itself: it is no part of the mean.
        (worst,) = round_parts([row.worst_ns], unit_ns)
        rows.append(
            _BucketCells(
                bucket=row.bucket,
                share=row.share,
                measured=(
                    units.format_parts(sum(own_counts), unit_ns),
                    units.format_percent(shares[place]),
                ),
                compared=compared,
                by_axis=tuple(on_axes),
                worst=_format_worst_rank(row, units.format_parts(worst, unit_ns)),
                worst_with_cause=_format_worst_rank(
                    row, units.format_parts(worst, unit_ns), report.idle
                ),
            )
        )
    return rows


def _format_worst_rank(row: BucketMean, time: str, idle: Sequence[IdleRow] = ()) -> str:
    """The rank with the most time in a bucket; of idle time also its main cause, if given."""
    if not row.worst_ns:
        return ""
    known = [one for one in idle if one.rank == row.worst_rank and one.cause != "unknown"]
    why = f" ({known[0].cause.replace('_', ' ')})" if row.bucket == "idle" and known else ""
    return f"r{row.worst_rank}{why} {time}"


def build_stages_table(report: Report, pipeline: Pipeline) -> Group:
    """The schedule's bubble fraction and its ideal; compute, bubble and memory of each stage."""
    ideal = pipeline.ideal_bubble_fraction
    schedule = SCHEDULE_NAMES.get(pipeline.schedule or "", pipeline.schedule or "unknown schedule")
    line = (
        f"pipeline {schedule}, {units.format_microbatches(pipeline.microbatches)}: bubble fraction "
    )
    line += units.format_percent(pipeline.bubble_fraction)
    if ideal is not None:
        line += f", {describe_ideal_bubble(pipeline.bubble_fraction, ideal)}"
    # The first, the last and the stages with the largest bubbles, then the others in order.
    count = len(pipeline.stages)
    by_bubble = sorted(range(count), key=lambda at: -pipeline.stages[at].bubble_ns)
    first = dict.fromkeys((0, count - 1, *by_bubble[:2], *range(count)))
    places = sorted(list(first)[:MOST_STAGES])
    shown = [pipeline.stages[at] for at in places]
    table = build_table("stage", *(str(stage.stage) for stage in shown))
    # The ranks of each stage by their position in the pp groups; none if a stage has none.
    ranks: list[set[int]] = [set() for _ in pipeline.stages]
    recorded = set(report.run.ranks)
    for group in report.groups:
        if group.axis == "pp" and len(group.ranks) == count:
            for stage, rank in enumerate(group.ranks):
                ranks[stage] |= {rank} & recorded
    ranks = [ranks[at] for at in places] if all(ranks) else []
    if ranks:
        full = select_full_steps(report.steps)
        compute_ns = [[row.compute_ns for row in full if row.rank in own] for own in ranks]
        table.add_row(
            "compute", *(units.format_milliseconds(mean(ns)) if ns else "" for ns in compute_ns)
        )
    table.add_row("bubble", *(units.format_milliseconds(stage.bubble_ns) for stage in shown))
    table.add_row(
        "bubble fraction", *(units.format_percent(stage.bubble_fraction) for stage in shown)
    )
    memory = report.memory or ()
    peaks = [
        max((row.peak_allocated_bytes or 0 for row in memory if row.rank in own), default=0)
        for own in ranks
    ]
    # A recording without memory has no such row.
    if any(peaks):
        table.add_row("peak memory", *(units.format_gibibytes(n) if n else "" for n in peaks))
    if count > len(shown):
        table.caption = f"{count - len(shown)} more in report.json"
    return Group(Text(line), table)


def build_collectives_table(report: Report) -> Table:
    """The kinds of calls that transferred data for the longest time."""
    table = build_table("axis", "op", "size", "calls/step", "transfer", "wait", "busbw")
    kinds = merge_groups(report)
    for kind in kinds[:MAX_COLLECTIVES]:
        # Medians over the groups of the axis.
        size, rates = kind.rows[0].message_bytes, kind.busbw_bytes_per_s
        table.add_row(
            kind.axis,
            kind.rows[0].op,
            units.format_size(size) if size is not None else units.UNKNOWN,
            units.format_calls(median(kind.per_step)),
            units.format_milliseconds(median(row.transfer_ns_median for row in kind.rows)),
            units.format_milliseconds(median(row.wait_ns_median for row in kind.rows)),
            units.format_gigabytes_per_second(median(rates)) if rates else units.UNKNOWN,
        )
    if len(kinds) > MAX_COLLECTIVES:
        table.caption = f"{len(kinds) - MAX_COLLECTIVES} more in report.json"
    return table
