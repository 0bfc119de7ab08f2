"""Terminal screens of analyze: a run, a run against its model, a hang."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import mean, median
from typing import TYPE_CHECKING

from rich.bar import Bar
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.readers.workers import Progress as OnProgress
from stepsplit.analyzer.report.explain import list_unexplained_buckets
from stepsplit.analyzer.report.headline import (
    BucketMean,
    Summary,
    divide_parts,
    round_parts,
    round_shares,
    summarize,
)
from stepsplit.analyzer.report.report import (
    SCHEDULE_NAMES,
    ComparedCalls,
    Finding,
    Gap,
    IdleRow,
    Pipeline,
    Report,
    Run,
    SameCalls,
    WarningRow,
    compute_token_rate,
    format_hosts,
    merge_groups,
)
from stepsplit.analyzer.report.step_rows import select_full_steps
from stepsplit.analyzer.split.strategy_evidence import Strategy
from stepsplit.collectors.safe_text import DRAWING
from stepsplit.dashboard.reporters.console import SafeConsole, Text
from stepsplit.dashboard.reporters.tables import (
    AXIS_SHORT,
    BUCKET_STYLE,
    build_table,
    format_clock_error,
    format_coverage,
    format_critical_path,
    format_memory,
    format_overlap,
    format_profiling,
    format_slow_steps,
)

if TYPE_CHECKING:
    from rich.progress import Progress

    from stepsplit.analyzer.diagnose.hang_result import (
        Hang,
        LastCall,
        Missing,
        RankNow,
        Stuck,
        StuckGroup,
    )


# The screen of a report: what ran, where the step went, which ranks and causes matter.


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


def build_report_screen(report: Report) -> RenderableType:
    """The whole screen of a report, for a rich console of any width from 80 columns."""
    summary = summarize(report.steps, report.exposed)
    parts: list[RenderableType] = [
        _describe_run(report.run),
        *_describe_strategies(report.run),
        *_describe_steps(report, summary),
    ]
    parts += _describe_memory(report)
    parts += _format_warnings(report.warnings)
    parts += [Text(), BucketTable(report, summary), _format_memo(report, summary)]
    parts += format_coverage(report)
    parts += format_critical_path(report)
    if report.pipeline is not None:
        parts += [Text(), build_stages_table(report, report.pipeline)]
    if report.collectives:
        parts += [Text(), build_collectives_table(report)]
    if report.gap is not None:
        parts += [Text(), *build_gap_section(report.gap)]
    if report.findings:
        parts += [Text(), *_list_bottlenecks(report.findings)]
    parts += _list_unexplained(report)
    parts += format_slow_steps(report)
    return Group(*parts)


def _describe_run(run: Run) -> Text:
    mesh = " ".join(f"{a.axis} {a.size}" for a in run.mesh) if run.mesh else "mesh unknown"
    known = [f"run {run.name}", f"{run.world_size} x {run.device} ({format_hosts(run)})", mesh]
    known += [run.backend or "", f"torch {run.torch}" if run.torch else ""]
    known += [
        f"NCCL {run.nccl}" if run.nccl else "",
        f"mesh: {run.mesh_source}" if run.mesh_source else "",
    ]
    return Text("   ".join(part for part in known if part), style="bold")


def _describe_strategies(run: Run) -> list[Text]:
    """The parallelism inferred from the traces, in one line; no line if none was detected."""
    known = ", ".join(map(_format_strategy, run.strategies))
    return [Text(f"detected parallelism: {known}", style="bold")] if known else []


def _format_strategy(strategy: Strategy) -> str:
    text = strategy.in_words
    schedule = SCHEDULE_NAMES.get(strategy.detail)
    if schedule is not None:
        text = text.replace(f"({strategy.detail})", f"({schedule})")
    return STRATEGY_NAME.get(strategy.name, strategy.name) + text.removeprefix(strategy.name)


def _describe_steps(report: Report, summary: Summary | None) -> list[Text]:
    """Which steps and ranks were used, and how long a step took."""
    numbers = {row.step for row in report.steps}
    full = {row.step for row in report.steps if row.kind == "full"}
    reasons = [_format_left_out(report, n) for n in sorted(numbers)]
    left_out = ", ".join(filter(None, reasons))
    steps = f"steps {len(full)} of {len(numbers)} used" + (
        f" (left out: {left_out})" if left_out else ""
    )
    ranks = f"{len(report.run.ranks)} of {report.run.world_size} ranks"
    first = (steps, ranks, format_clock_error(report))
    second = (_format_step_time(report.run, summary), *_format_throughput(report))
    return [
        Text("   ".join(part for part in line if part)) for line in (first, second) if any(line)
    ]


_LEFT_OUT = {"partial": "partial", "other": "other calls"}


def _format_left_out(report: Report, number: int) -> str:
    """Why a step is not used, such as "#13 partial on rank 1"; "" if all ranks use it."""
    rows = [row for row in report.steps if row.step == number]
    why = {row.kind: _LEFT_OUT[row.kind] for row in rows if row.kind in _LEFT_OUT}
    if not why:
        return ""
    left = [row.rank for row in rows if row.kind in _LEFT_OUT]
    on = f" on {_name_ranks(left)}" if len(left) < len(rows) else ""
    return f"#{number} {' or '.join(why.values())}{on}"


def _format_step_time(run: Run, summary: Summary | None) -> str:
    if summary is None:
        return ""
    # The mean has the decimals of its parts, which stand in the table below.
    unit_ns = units.choose_part_unit_ns(summary.step_ns)
    (step,) = round_parts([summary.step_ns], unit_ns)
    times = [f"median {units.format_milliseconds(summary.median_ns)}"]
    if summary.p99_ns is not None:
        times.append(f"p99 {units.format_milliseconds(summary.p99_ns)}")
    times.append(f"slowest {units.format_milliseconds(summary.slowest_ns)}")
    known = "; ".join(filter(None, (", ".join(times), format_profiling(run))))
    return f"step {units.format_parts(step, unit_ns)} ({known})"


def _format_throughput(report: Report) -> list[str]:
    """Tokens a second and MFU, which only the job's model gives."""
    per_s = compute_token_rate(report)
    if per_s is None:
        return []
    device = "rank" if report.run.device == "cpu" else "GPU"
    mfu = [f"MFU {units.format_percent(report.mfu)}"] if report.mfu is not None else []
    return [f"{units.format_tokens_per_second(per_s)}/{device}", *mfu]


def _describe_memory(report: Report) -> list[Text]:
    """The rank with the highest usage, in one line; no line if no rank measured memory."""
    line = format_memory(report.memory or ())
    return [Text(line)] if line else []


def _format_warnings(rows: Sequence[WarningRow]) -> list[Text]:
    """One line a warning; a warning that several ranks share is one line."""
    same: dict[str, list[WarningRow]] = {}
    for row in rows:
        same.setdefault(row.code if row.rank is not None else row.message, []).append(row)
    return [_format_warning(group[0], len(group) - 1) for group in same.values()]


def _format_warning(row: WarningRow, more: int) -> Text:
    of_rank = "" if row.rank is None else f" (rank {row.rank})"
    others = f"; also on {more} other rank{'s' if more > 1 else ''}" if more else ""
    return Text(f"warning: {row.message}{of_rank}{others}", style="yellow")


def _format_memo(report: Report, summary: Summary | None) -> Text:
    if summary is None:
        return Text("no step in the recording")
    rows = select_full_steps(report.steps)
    estimated = sum(row.estimated for row in rows)
    memo = (
        "means over ranks and steps. overlapped communication: "
        f"{units.format_milliseconds(summary.overlapped_ns)}{format_overlap(report)}"
    )
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
    return Text(memo, style="bright_black")


def _list_bottlenecks(findings: Sequence[Finding]) -> list[RenderableType]:
    more = "" if len(findings) < 2 else ", not additive"
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for place, finding in enumerate(findings, 1):
        table.add_row(str(place), units.format_milliseconds(finding.gain_ns), finding.message)
    return [Text(f"TOP BOTTLENECKS (estimated saving per step{more})", style="bold"), table]


def _list_unexplained(report: Report) -> list[RenderableType]:
    large = list_unexplained_buckets(report)
    if not large:
        return []
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for one in large:
        table.add_row(one.bucket, units.format_percent(one.share), one.part)
    return [Text(), Text("OTHER LARGE PARTS OF THE STEP", style="bold"), table]


# The tables of the report: buckets, pipeline stages, collectives.

MAX_COLLECTIVES = 6

_FEW_AXES = 2

_LEAST_BAR = 8
"""Columns of the terminal that the bars need to be of use."""

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
        self._axes = [] if summary is None else list_axes(summary)
        self._compared = ("model", "diff") if report.gap is not None else ()
        self._rows = [] if summary is None else _build_rows(report, summary, self._axes)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
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
        names = [_name_axis(axis) for axis in self._axes] if axes else []
        compared = self._compared if model else ()
        bar = ("",) if bars else ()
        table = build_table("", "measured", "share", *compared, *names, "worst rank", *bar)
        for row in self._rows:
            style = BUCKET_STYLE[row.bucket]
            table.add_row(
                Text(row.bucket, style=style),
                *row.measured,
                *(row.compared if model else ()),
                *(row.by_axis if axes else ()),
                row.worst_with_cause if causes else row.worst,
                *([Bar(1.0, 0.0, row.share, color=style)] if bars else []),
            )
        return table


@dataclass(frozen=True, slots=True)
class _BucketCells:
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
    by_axis = [{part.axis: part.ns for part in row.by_axis} for row in summary.buckets]
    # Axes and buckets are rounded together; a bucket without axes is one part.
    parts_ns = [
        [own.get(axis, 0) for axis in axes] if axes and own else [row.mean_ns]
        for row, own in zip(summary.buckets, by_axis, strict=True)
    ]
    counts = iter(round_parts([ns for own in parts_ns for ns in own], unit_ns))
    shares = round_shares([row.mean_ns for row in summary.buckets])
    model_ns = predict_buckets(report)
    model = round_parts([model_ns[bucket] for bucket in BUCKETS], unit_ns) if model_ns else []
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
            if not model_ns[row.bucket] and not row.mean_ns:
                compared = ("", "")
        on_axes = [""] * len(axes)
        if axes and by_axis[place]:
            on_axes = [
                units.format_parts(count, unit_ns) if axis in by_axis[place] else ""
                for axis, count in zip(axes, own_counts, strict=True)
            ]
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


def predict_buckets(report: Report) -> dict[str, int]:
    """The predicted time in ns by bucket, the mean of the stages that the recording holds."""
    if report.gap is None:
        return {}
    stages = [stage.predicted.buckets_ns for stage in report.gap.stages]
    sums = [sum(times) for times in zip(*stages, strict=True)]
    return dict(zip(BUCKETS, divide_parts(sums, len(stages)), strict=True))


def _format_worst_rank(row: BucketMean, time: str, idle: Sequence[IdleRow] = ()) -> str:
    """The rank with the most time in a bucket; of idle time also its main cause, if given."""
    if not row.worst_ns:
        return ""
    known = [one for one in idle if one.rank == row.worst_rank and one.cause != "unknown"]
    why = f" ({known[0].cause.replace('_', ' ')})" if row.bucket == "idle" and known else ""
    return f"r{row.worst_rank}{why} {time}"


def list_axes(summary: Summary) -> list[str | None]:
    """The mesh axes on which the run communicates, in the order of the columns; empty if no group
    lies along a single axis."""
    used = dict.fromkeys(part.axis for row in summary.buckets for part in row.by_axis)
    # A mesh may have axes of any name, and without their column a row would not add up.
    named = [*(axis for axis in _AXES if axis in used), *(axis for axis in used if axis)]
    return [*dict.fromkeys(named), *([None] if None in used else [])] if named else []


def _name_axis(axis: str | None) -> str:
    return AXIS_SHORT.get(axis, axis) if axis else "other"


def build_stages_table(report: Report, pipeline: Pipeline) -> Group:
    """The schedule's bubble fraction and its ideal; compute, bubble and memory of each stage."""
    ideal = pipeline.ideal_bubble_fraction
    schedule = SCHEDULE_NAMES.get(pipeline.schedule or "", pipeline.schedule or "unknown schedule")
    line = f"pipeline {schedule}, {pipeline.microbatches} microbatches: bubble fraction "
    line += units.format_percent(pipeline.bubble_fraction)
    line += f", ideal {units.format_percent(ideal)}" if ideal is not None else ""
    table = build_table("stage", *(str(stage.stage) for stage in pipeline.stages))
    ranks = _list_ranks_by_stage(report, len(pipeline.stages))
    if ranks:
        table.add_row("compute", *(_format_compute(report, each) for each in ranks))
    table.add_row(
        "bubble", *(units.format_milliseconds(stage.bubble_ns) for stage in pipeline.stages)
    )
    table.add_row(
        "bubble fraction",
        *(units.format_percent(stage.bubble_fraction) for stage in pipeline.stages),
    )
    peaks = [_format_peak(report, each) for each in ranks]
    if any(peaks):
        table.add_row("peak memory", *peaks)
    return Group(Text(line), table)


def _list_ranks_by_stage(report: Report, stages: int) -> list[set[int]]:
    """The ranks of each stage by their position in the pp groups; empty if a stage has none."""
    ranks: list[set[int]] = [set() for _ in range(stages)]
    recorded = set(report.run.ranks)
    for group in report.groups:
        if group.axis == "pp" and len(group.ranks) == stages:
            for stage, rank in enumerate(group.ranks):
                ranks[stage] |= {rank} & recorded
    return ranks if all(ranks) else []


def _format_compute(report: Report, ranks: set[int]) -> str:
    times_ns = [row.compute_ns for row in select_full_steps(report.steps) if row.rank in ranks]
    return units.format_milliseconds(mean(times_ns)) if times_ns else ""


def _format_peak(report: Report, ranks: set[int]) -> str:
    peaks = [row.peak_allocated_bytes or 0 for row in report.memory or () if row.rank in ranks]
    return units.format_gibibytes(max(peaks)) if any(peaks) else ""


def build_collectives_table(report: Report) -> Table:
    """The kinds of calls that transferred data for the longest time."""
    table = build_table("axis", "op", "size", "calls/step", "transfer", "wait", "busbw")
    kinds = merge_groups(report)
    for kind in kinds[:MAX_COLLECTIVES]:
        table.add_row(*_list_call_cells(kind))
    if len(kinds) > MAX_COLLECTIVES:
        table.caption = f"{len(kinds) - MAX_COLLECTIVES} more in report.json"
    return table


def _list_call_cells(kind: SameCalls) -> tuple[str, ...]:
    """The medians over the groups."""
    size = kind.rows[0].message_bytes
    return (
        kind.axis,
        kind.rows[0].op,
        units.format_size(size) if size is not None else units.UNKNOWN,
        units.format_per_step(median(kind.per_step)),
        units.format_milliseconds(median(row.transfer_ns_median for row in kind.rows)),
        units.format_milliseconds(median(row.wait_ns_median for row in kind.rows)),
        _format_rate(kind.busbw_bytes_per_s),
    )


def _format_rate(rates: Sequence[float]) -> str:
    return units.format_gigabytes_per_second(median(rates)) if rates else units.UNKNOWN


# Progress bars of long reads and uploads, on standard error if it is a terminal.

LONG_BYTES = 200 << 20
"""Smaller recordings are read before a progress bar would help."""


@contextmanager
def show_reading_bar() -> Iterator[OnProgress]:
    """A callback for a reader: (bytes done, total bytes). Draws only on a terminal."""
    with _show_progress() as bar:
        if bar is None:
            yield lambda done_bytes, all_bytes: None
            return
        task = bar.add_task("reading", visible=False)

        def show(done_bytes: int, all_bytes: int) -> None:
            bar.update(task, completed=done_bytes, total=all_bytes, visible=all_bytes >= LONG_BYTES)

        yield show


@contextmanager
def show_sending_bar(all_bytes: int) -> Iterator[Callable[[int], None]]:
    """A callback for an upload: the bytes of each part that arrived. Draws only on a terminal."""
    with _show_progress() as bar:
        if bar is None:
            yield lambda sent_bytes: None
            return
        task = bar.add_task("sending", total=all_bytes)
        yield lambda sent_bytes: bar.advance(task, sent_bytes)


@contextmanager
def _show_progress() -> Iterator[Progress | None]:
    """A bar on stderr; None if that is no terminal, where rich up to 14 writes an empty line even
    with a disabled bar."""
    console = SafeConsole(sys.stderr, allowed=DRAWING)
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        yield bar


# The comparison with the model: what a step should take, and why it takes longer or less.

_MIN_SHARE = 0.005
"""Parts of the difference below this share of the step are summed up."""


def build_gap_section(gap: Gap) -> list[RenderableType]:
    """The heading, the parts of the difference, speeds, calls, memory and caveats; with several
    stages also the buckets of the stage that the parts belong to."""
    parts: list[RenderableType] = [_build_gap_heading(gap)]
    parts += [_build_gap_table(gap)] if len(gap.stages) > 1 else []
    parts += [*_list_differences(gap), *_compare_speeds(gap), *_compare_calls(gap)]
    parts += _compare_memory(gap)
    return parts + [Text(f"caveat: {note}", style="yellow") for note in gap.notes]


def _build_gap_heading(gap: Gap) -> Text:
    shown = gap.shown
    measured, predicted = shown.measured.step_ns, shown.predicted.step_ns
    band = units.format_milliseconds_range(gap.low_ns, gap.high_ns)
    stage = f", stage {gap.stage}" if len(gap.stages) > 1 or gap.stage else ""
    return Text(
        f"MODEL COMPARISON{stage}   measured {units.format_milliseconds(measured)}, "
        f"predicted {units.format_milliseconds(predicted)} ({band}), "
        f"difference {units.format_signed_percent(measured / predicted - 1)}   "
        f"confidence {gap.confidence}",
        style="bold",
    )


def _build_gap_table(gap: Gap) -> Table:
    table = build_table("", "measured", "model", "diff")
    shown = gap.shown
    for bucket, expected, took in zip(
        BUCKETS, shown.predicted.buckets_ns, shown.measured.buckets_ns, strict=True
    ):
        if expected or took:
            name = Text(bucket, style=BUCKET_STYLE[bucket])
            sides = units.format_milliseconds(took), units.format_milliseconds(expected)
            table.add_row(name, *sides, units.format_signed_milliseconds(took - expected))
    return table


def _list_differences(gap: Gap) -> list[RenderableType]:
    """The parts of the difference, largest first; the small ones in one line."""
    least = _MIN_SHARE * gap.shown.measured.step_ns
    large = sorted((row for row in gap.rows if abs(row.ns) >= least), key=lambda row: -abs(row.ns))
    small = sum(row.ns for row in gap.rows if abs(row.ns) < least)
    parts = [(row.ns, row.message) for row in large]
    if small:
        parts.append((small, "smaller differences together"))
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    for ns, message in parts:
        table.add_row(units.format_signed_milliseconds(ns), message)
    return [Text("difference by cause", style="bold"), table] if parts else []


def _compare_calls(gap: Gap) -> list[Text]:
    differing = [calls for calls in gap.calls if not calls.equal]
    if differing:
        return [Text("calls that differ: " + "; ".join(map(_compare_call, differing)))]
    return [Text("calls: counts and bytes as predicted")] if gap.calls else []


def _compare_call(calls: ComparedCalls) -> str:
    size = "" if calls.bytes is None or calls.predicted_bytes is None else (
        f" ({units.format_size(calls.bytes)}, predicted {units.format_size(calls.predicted_bytes)})"
    )  # fmt: skip
    where = f"stage {calls.stage} {calls.op} on {calls.axis}"
    return f"{where} {calls.count}, predicted {calls.predicted_count}{size}"


def _compare_speeds(gap: Gap) -> list[RenderableType]:
    """Transfer time and bandwidth of the stage's calls: measured, model, share of the link."""
    rows = [calls for calls in gap.calls if calls.stage == gap.stage and calls.busbw_bytes_per_s]
    if not rows:
        return []
    table = build_table("axis", "op", "per step", "model", "busbw", "model", "of link peak")
    for calls in rows:
        table.add_row(
            calls.axis, calls.op, units.format_milliseconds(calls.time_ns),
            units.format_milliseconds(calls.predicted_time_ns),
            _format_bandwidth(calls.busbw_bytes_per_s),
            _format_bandwidth(calls.predicted_busbw_bytes_per_s), _format_link_share(calls),
        )  # fmt: skip
    return [table]


def _format_bandwidth(bytes_per_s: float | None) -> str:
    return "" if bytes_per_s is None else units.format_gigabytes_per_second(bytes_per_s)


def _format_link_share(calls: ComparedCalls) -> str:
    if calls.busbw_bytes_per_s is None or not calls.link_bytes_per_s:
        return ""
    return units.format_percent(calls.busbw_bytes_per_s / calls.link_bytes_per_s)


def _compare_memory(gap: Gap) -> list[Text]:
    """A line for the peak, and one for each category that a rank measured."""
    categories = dict.fromkeys(row.category for row in gap.memory)
    return [Text(_compare_category(gap, category)) for category in categories]


def _compare_category(gap: Gap, category: str) -> str:
    size = units.format_gibibytes if category == "peak" else units.format_size
    parts = [
        f"stage {row.stage} {size(row.measured_bytes)} (model {size(row.predicted_bytes)})"
        for row in gap.memory
        if row.category == category
    ]
    return f"{'peak memory' if category == 'peak' else category}: {', '.join(parts)}"


# The screen of a hang: the ranks that block the job, the state of each group, the last stacks.

MOST_BLOCKED, MOST_UNFINISHED = 8, 3

MAX_RANKS = 8

MAX_FRAMES = 6

MAX_ERROR = 160

MAX_LETTERS = 28

_COLUMNS = ("group", "description", "call", "size", "waiting", "missing", "completed")

_WHOLE = ("group", "call", "size")

_STYLE = {"missing": "red"}


def build_hang_screen(hang: Hang) -> RenderableType:
    """The whole screen for one hang, to be printed by a rich console of any width."""
    parts: list[RenderableType] = [_list_culprits(hang), _build_hang_heading(hang)]
    parts += [_format_hang_warning(one.message, one.rank) for one in hang.warnings]
    if hang.stuck:
        parts += [Text(), _build_calls_table(hang), *_count_hidden_calls(hang)]
    if hang.states:
        parts += _list_states(hang)
    elif hang.stuck:
        parts += [Text(), *_list_stacks(hang)]
    if hang.ras:
        parts += [Text(), Text("NCCL RAS", style="bold")]
        parts += [Text(sentence) for sentence in hang.ras[:MAX_RANKS]]
    return Group(*parts)


def _list_states(hang: Hang) -> list[Text]:
    """What each rank does and its stack; ranks at the same place are one entry."""
    same: dict[tuple[object, ...], list[RankNow]] = {}
    for one in hang.states:
        same.setdefault((one.condition, one.error, one.stack), []).append(one)
    to_blame = {rank for one in hang.culprits for rank in one.ranks}
    ordered = sorted(same.values(), key=lambda ones: not to_blame & {one.rank for one in ones})
    lines = [Text(), Text("PYTHON STACKS, INNERMOST FIRST", style="bold")]
    for ones in ordered[:MAX_RANKS]:
        lines.append(Text(f"{_name_ranks([one.rank for one in ones])}  {_describe_state(ones)}"))
        lines += [Text(f"    {frame}", style="bright_black") for frame in _list_frames(ones[0])]
    return lines


def _describe_state(ones: Sequence[RankNow]) -> str:
    """The condition that ranks share, their steps, and the shortest time since the last one."""
    steps = sorted({one.steps for one in ones if one.steps is not None})
    since_ns = min((o.since_step_ns for o in ones if o.since_step_ns is not None), default=None)
    parts = [ones[0].condition]
    if steps:
        parts.append(f"{'-'.join(map(str, dict.fromkeys((steps[0], steps[-1]))))} steps ended")
    if since_ns is not None:
        parts.append(f"the last {since_ns / 1e9:.1f} s ago")
    return ", ".join([*parts, *([_cut(ones[0].error)] if ones[0].error else [])])


def _cut(error: str) -> str:
    return error if len(error) <= MAX_ERROR else f"{error[: MAX_ERROR - 3]}..."


def _list_frames(one: RankNow) -> tuple[str, ...]:
    shown = tuple(f"{frame.file}:{frame.line} {frame.function}" for frame in one.stack)
    more = len(shown) - MAX_FRAMES
    return (*shown[:MAX_FRAMES], f"and {more} more frames") if more > 0 else shown


def _list_culprits(hang: Hang) -> Group:
    from stepsplit.analyzer.diagnose.hang import format_verdict

    lines = (hang.note, *format_verdict([one.message for one in hang.culprits]))
    return Group(*(Text(line, style="bold") for line in lines if line))


def _build_hang_heading(hang: Hang) -> Text:
    known = [_format_count(len(hang.ranks), "dump", "dumps")] if hang.ranks else []
    if hang.states:
        known.insert(0, f"looked at {_format_count(len(hang.states), 'rank', 'ranks')}")
    if hang.no_dump and hang.ranks:
        known.append(f"no dump from {_name_ranks(hang.no_dump)}")
    if hang.stuck:
        first = min(int(call.called_unix_ns) for call in hang.stuck)
        at = datetime.fromtimestamp(first / 1e9, UTC)
        known += [
            _format_count(len(hang.stuck), "unfinished call", "unfinished calls"),
            f"oldest since {at:%Y-%m-%d %H:%M:%S} UTC" if first > 0 else "",
        ]
    return Text("   ".join(part for part in known if part))


def _format_count(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _format_hang_warning(message: str, rank: int | None) -> Text:
    of_rank = "" if rank is None else f" (rank {rank})"
    return Text(f"warning: {message}{of_rank}", style="yellow")


def _build_calls_table(hang: Hang) -> Table:
    shown = _select_calls(hang.stuck)
    rows = [_format_call(call) for call in shown]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    # A column without an entry takes no room.
    columns = [i for i in range(len(_COLUMNS)) if any(row[i] for row in rows)]
    for name in (_COLUMNS[i] for i in columns):
        side: JustifyMethod = "right" if name == "size" else "left"
        table.add_column(name, justify=side, no_wrap=name in _WHOLE, overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[i], style=_STYLE.get(_COLUMNS[i], "")) for i in columns))
    return table


def _count_hidden_calls(hang: Hang) -> list[Text]:
    more = len(hang.stuck) - len(_select_calls(hang.stuck))
    text = f"{more} more calls: see --json FILE"
    return [Text(text, style="bright_black")] if more else []


def _select_calls(stuck: Sequence[Stuck]) -> list[Stuck]:
    """The first calls that wait for a rank, and the first that all ranks entered."""
    blocked = [call for call in stuck if call.waits_for]
    unfinished = [call for call in stuck if not call.waits_for]
    return [*blocked[:MOST_BLOCKED], *unfinished[:MOST_UNFINISHED]]


def _format_call(call: Stuck) -> tuple[str, ...]:
    size = units.UNKNOWN if call.message_bytes is None else units.format_size(call.message_bytes)
    lost = f"{_format_ranks(call.no_dump)} (no dump)" if call.no_dump else ""
    away = _format_ranks([one.rank for one in call.missing])
    return (
        call.group.name,
        _shorten(call.group.description),
        f"{call.op} {call.seq}",
        size,
        _format_ranks(call.waiting),
        ", ".join(part for part in (away, lost) if part),
        _format_ranks(call.completed),
    )


def _shorten(description: str) -> str:
    """A long description without its middle: groups differ at the ends."""
    if len(description) <= MAX_LETTERS:
        return description
    end = (MAX_LETTERS - 3) // 2
    return f"{description[: MAX_LETTERS - 3 - end]}...{description[-end:]}"


def _format_ranks(ranks: Sequence[int]) -> str:
    """Ranks as a list of ranges, such as 0-3,7."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [
        part
        for run in runs
        for part in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(one) for one in run])
    ]
    more = f" +{len(parts) - MAX_RANKS}" if len(parts) > MAX_RANKS else ""
    return ",".join(parts[:MAX_RANKS]) + more


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_format_ranks(ranks)}"


def _list_stacks(hang: Hang) -> list[Text]:
    """The last call and stack of each culprit; a stack that several share is shown once."""
    ranks = [rank for one in hang.culprits for rank in one.ranks if rank in hang.ranks]
    last = {one.rank: one for one in hang.last_calls}
    lines = [Text("LAST CALLS OF THESE RANKS", style="bold")] if ranks else []
    shown: dict[tuple[str, ...], int] = {}
    for rank in ranks[:MAX_RANKS]:
        lines.append(_describe_last_call(rank, last.get(rank), hang))
        stack = _format_stack(last.get(rank))
        if stack and stack in shown:
            lines.append(Text(f"    same stack as rank {shown[stack]}", style="bright_black"))
            continue
        shown[stack] = rank
        lines += [Text(f"    {frame}", style="bright_black") for frame in stack]
    if len(ranks) > MAX_RANKS:
        lines.append(Text(f"and {len(ranks) - MAX_RANKS} more ranks"))
    return lines


def _describe_last_call(rank: int, last: LastCall | None, hang: Hang) -> Text:
    if last is not None:
        call = f"{last.op} {last.seq} of {last.group.in_words}"
        return Text(f"rank {rank}  last called {call}: {last.state}")
    missing = ((call.group, one) for call in hang.stuck for one in call.missing)
    progress = next(
        (_describe_progress(group, one) for group, one in missing if one.rank == rank), ""
    )
    return Text(f"rank {rank}  no call in its dump{progress}")


def _describe_progress(group: StuckGroup, missing: Missing) -> str:
    """Its last call on a group that waits for it."""
    if missing.last_enqueued is None:
        return ""
    done = missing.last_completed == missing.last_enqueued
    state = "completed" if done else "not completed"
    return f"; its last on {group.in_words} is {missing.last_enqueued}, {state}"


def _format_stack(last: LastCall | None) -> tuple[str, ...]:
    """The innermost frames of the stack, without torch's own if there are others."""
    frames = () if last is None else last.stack
    own = [one for one in frames if "/torch/" not in one.file] or list(frames)
    shown = tuple(f"{one.file}:{one.line} {one.function}" for one in own[:MAX_FRAMES])
    return (*shown, f"and {len(own) - MAX_FRAMES} more frames") if len(own) > MAX_FRAMES else shown
