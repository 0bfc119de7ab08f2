"""Terminal screens of analyze: a run, a run against its model, a hang."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING

from rich.bar import Bar
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.readers.workers import Progress as OnProgress
from stepsplit.analyzer.report.report import (
    BucketMedian,
    ComparedCalls,
    Finding,
    Gap,
    Pipeline,
    Report,
    Run,
    WarningRow,
    bucket_medians,
    full_steps,
    step_median_ns,
)
from stepsplit.analyzer.split.bandwidth import CollectiveRow
from stepsplit.dashboard.reporters.tables import (
    AXIS_SHORT,
    BUCKET_STYLE,
    bare_table,
    clocks,
    coverage,
    critical_path,
    memory,
    overlap,
    profiling,
    slow_steps,
)

if TYPE_CHECKING:
    from stepsplit.analyzer.diagnose.hang_progress import Hang, LastCall, Missing, Stuck, StuckGroup


# The terminal's answer: what ran, where the step went, who and what held it up.


def report_screen(report: Report) -> RenderableType:
    """The whole screen for one report, to be printed by a rich console of any width."""
    parts: list[RenderableType] = [
        _report_heading(report.run),
        *_strategies(report.run),
        _used(report),
    ]
    parts += _memory(report)
    parts += _warnings(report.warnings)
    parts += [Text(), split_table(report), _memo(report), *coverage(report)]
    parts += critical_path(report)
    if report.pipeline is not None:
        parts += [Text(), stages_table(report.pipeline)]
    if report.collectives:
        parts += [Text(), collectives_table(report)]
    if report.gap is not None:
        parts += [Text(), *gap_section(report.gap)]
    if report.findings:
        parts += [Text(), *_causes(report.findings)]
    parts += slow_steps(report)
    return Group(*parts)


def _report_heading(run: Run) -> Text:
    mesh = " ".join(f"{a.axis} {a.size}" for a in run.mesh) if run.mesh else "mesh unknown"
    hosts = f"{len(run.hosts)} host" + ("s" if len(run.hosts) > 1 else "")
    known = [f"run {run.name}", f"{run.world_size} x {run.device} ({hosts})", mesh]
    known += [run.backend or "", f"torch {run.torch}" if run.torch else ""]
    known += [
        f"NCCL {run.nccl}" if run.nccl else "",
        f"mesh from {run.mesh_source}" if run.mesh_source else "",
    ]
    return Text("   ".join(part for part in known if part), style="bold")


def _strategies(run: Run) -> list[Text]:
    """One line of what the steps show of how the job was parallel; none where they show nothing."""
    known = ", ".join(one.in_words for one in run.strategies)
    return [Text(f"seen in the steps: {known}", style="bold")] if known else []


def _used(report: Report) -> Text:
    numbers = {row.step for row in report.steps}
    full = {row.step for row in report.steps if row.kind == "full"}
    left_out = ", ".join(f"#{n}" for n in sorted(numbers - full))
    steps = f"steps {len(full)} of {len(numbers)} used" + (
        f" ({left_out} left out)" if left_out else ""
    )
    ranks = f"{len(report.run.ranks)} of {report.run.world_size} ranks"
    rows = full_steps(report.steps)
    spread = ""
    if rows:
        slowest = max(
            median(r.step_ns for r in rows if r.step == n) for n in {r.step for r in rows}
        )
        spread = f"step {units.milliseconds(step_median_ns(rows))}"
        spread += f" (slowest {units.milliseconds(slowest)})"
    parts = (steps, ranks, spread, clocks(report), profiling(report.run))
    return Text("   ".join(part for part in parts if part))


def _memory(report: Report) -> list[Text]:
    """One line of the rank that holds most; none where no rank measured."""
    told = memory(report.memory or ())
    return [Text(told)] if told else []


def _warnings(rows: Sequence[WarningRow]) -> list[Text]:
    """One line for each, and one for what is said of several ranks."""
    same: dict[str, list[WarningRow]] = {}
    for row in rows:
        same.setdefault(row.code if row.rank is not None else row.message, []).append(row)
    return [_warning(group[0], len(group) - 1) for group in same.values()]


def _warning(row: WarningRow, more: int) -> Text:
    of_rank = "" if row.rank is None else f" (rank {row.rank})"
    like_it = f"; the like on {more} rank{'s' if more > 1 else ''} more" if more else ""
    return Text(f"warning: {row.message}{of_rank}{like_it}", style="yellow")


def _memo(report: Report) -> Text:
    rows = full_steps(report.steps)
    if not rows:
        return Text("no step in the recording")
    overlapped = median(row.overlapped_ns for row in rows)
    covered = median(row.bubble_covered_ns for row in rows)
    estimated = sum(row.estimated for row in rows)
    axes = "medians; by axis, means. " if axes_of(report) else "medians. "
    memo = f"{axes}{units.milliseconds(overlapped)} of the compute hides transfers"
    memo += overlap(report)
    if covered:
        memo += f", {units.milliseconds(covered)} of communication lies in holes of the schedule"
    if estimated:
        memo += f"; {estimated} of {len(rows)} splits estimated for want of counterparts"
    return Text(memo, style="bright_black")


def _causes(findings: Sequence[Finding]) -> list[Text]:
    words = "WHY, and by how much a step would be shorter without it"
    more = "" if len(findings) < 2 else " (each alone: they do not add up)"
    return [Text(words + more, style="bold")] + [
        Text(f"{i} {units.milliseconds(f.gain_ns):>9}  {f.message}")
        for i, f in enumerate(findings, 1)
    ]


# The terminal's tables: the buckets by axis, the stages of a pipeline, the kinds of calls.

MOST_COLLECTIVES = 6

_FEW_AXES = 2

_AXES = ("tp", "cp", "ep", "pp", "dp_replicate", "dp_shard", None)


def split_table(report: Report) -> Table:
    """The seven buckets: median, share, by axis, and the worst rank."""
    axes = axes_of(report)
    table = bare_table("", *("median", "share"), *(_axis_name(a) for a in axes), "worst rank", "")
    for row in bucket_medians(report.steps):
        of_axes = [_on_axis(report, row.bucket, axis) for axis in axes]
        worst = _worst(report, row, roomy=len(axes) <= _FEW_AXES)
        table.add_row(
            Text(row.bucket, style=BUCKET_STYLE[row.bucket]),
            units.milliseconds(row.median_ns),
            units.percent(row.share),
            *of_axes,
            worst,
            Bar(1.0, 0.0, row.share, color=BUCKET_STYLE[row.bucket]),
        )
    return table


def _worst(report: Report, row: BucketMedian, roomy: bool) -> str:
    """The rank with most of a bucket; of idle also its cause, where there is room for it."""
    if not row.worst_ns:
        return ""
    causes = [one for one in report.idle if one.rank == row.worst_rank and one.cause != "unknown"]
    why = (
        f" ({causes[0].cause.replace('_', ' ')})"
        if row.bucket == "idle" and causes and roomy
        else ""
    )
    return f"r{row.worst_rank}{why} {units.milliseconds(row.worst_ns)}"


def axes_of(report: Report) -> list[str | None]:
    """The axes on which this run communicates; none where all lie on no single axis."""
    seen = {row.axis for row in report.exposed}
    return [axis for axis in _AXES if axis in seen] if seen - {None} else []


def _axis_name(axis: str | None) -> str:
    return AXIS_SHORT.get(axis, axis) if axis else "other"


def _on_axis(report: Report, bucket: str, axis: str | None) -> str:
    """The mean time a step of the average rank in a communication bucket on one axis."""
    if bucket not in ("collective", "p2p", "skew", "bubble"):
        return ""
    full = {(row.rank, row.step) for row in full_steps(report.steps)}
    parts = (
        int(getattr(row, f"{bucket}_ns"))
        for row in report.exposed
        if row.axis == axis and (row.rank, row.step) in full
    )
    total = sum(parts)
    return units.milliseconds(total / len(full)) if total else ""


def stages_table(pipeline: Pipeline) -> Group:
    """The schedule's bubble beside its ideal, and each stage's."""
    ideal = pipeline.ideal_bubble_fraction
    line = f"pipeline {pipeline.schedule}, {pipeline.microbatches} microbatches: bubble fraction "
    line += units.percent(pipeline.bubble_fraction)
    line += f", ideal {units.percent(ideal)}" if ideal is not None else ""
    table = bare_table("stage", *(str(stage.stage) for stage in pipeline.stages))
    table.add_row("bubble", *(units.milliseconds(stage.bubble_ns) for stage in pipeline.stages))
    table.add_row(
        "of its window", *(units.percent(stage.bubble_fraction) for stage in pipeline.stages)
    )
    return Group(Text(line), table)


def collectives_table(report: Report) -> Table:
    """The kinds of calls that moved data longest."""
    axis = {group.id: group.axis or group.description or "unknown" for group in report.groups}
    table = bare_table("axis", "op", "size", "calls", "transfer", "wait", "busbw")
    rows = _merged(report.collectives, axis)
    for row in rows[:MOST_COLLECTIVES]:
        table.add_row(*row)
    if len(rows) > MOST_COLLECTIVES:
        table.caption = f"and {len(rows) - MOST_COLLECTIVES} kinds more in report.json"
    return table


def _merged(rows: Sequence[CollectiveRow], axis: dict[int, str]) -> list[tuple[str, ...]]:
    """One line for groups of one axis that do the same, by the medians of their medians."""
    same: dict[tuple[str, str, int | None], list[CollectiveRow]] = {}
    for row in rows:
        same.setdefault((axis.get(row.group, "unknown"), row.op, row.message_bytes), []).append(row)
    return [
        (
            on, op, units.size(size) if size is not None else units.UNKNOWN,
            f"{sum(r.count for r in group):,}",
            units.milliseconds(median(r.transfer_ns_median for r in group)),
            units.milliseconds(median(r.wait_ns_median for r in group)),
            _rate([r.busbw_bytes_per_s for r in group if r.busbw_bytes_per_s is not None]),
        )
        for (on, op, size), group in same.items()
    ]  # fmt: skip


def _rate(rates: Sequence[float]) -> str:
    return units.gigabytes_per_second(median(rates)) if rates else units.UNKNOWN


# How far a long reading has come, on standard error, where somebody watches.

LONG_BYTES = 200 << 20
"""Less than this is read before a bar would be of use."""


@contextmanager
def reading_bar() -> Iterator[OnProgress]:
    """What a reader calls with (bytes done, bytes in all); draws on a terminal alone."""
    console = Console(stderr=True)
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("reading", visible=False)

        def show(done_bytes: int, all_bytes: int) -> None:
            bar.update(task, completed=done_bytes, total=all_bytes, visible=all_bytes >= LONG_BYTES)

        yield show


@contextmanager
def sending_bar(all_bytes: int) -> Iterator[Callable[[int], None]]:
    """What a sender calls with the bytes of each part that arrived; draws on a terminal alone."""
    console = Console(stderr=True)
    columns = (TextColumn("sending"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("sending", total=all_bytes)
        yield lambda sent_bytes: bar.advance(task, sent_bytes)


# The terminal's answer to: what should this step have cost, and why did it not?

_LEAST = 0.005
"""Parts of the gap below this share of the step are summed up."""


def gap_section(gap: Gap) -> list[RenderableType]:
    """The heading, the buckets of the stage that the model takes for the slowest side by side, the
    parts of the gap, calls and memory."""
    parts: list[RenderableType] = [_gap_heading(gap), _buckets(gap), *_explained(gap)]
    parts += [*_speeds(gap), *_calls(gap), *_memory_gap(gap)]
    return parts + [Text(f"doubt: {note}", style="yellow") for note in gap.notes]


def _gap_heading(gap: Gap) -> Text:
    shown = gap.shown
    measured, predicted = shown.measured.step_ns, shown.predicted.step_ns
    band = units.milliseconds_between(gap.low_ns, gap.high_ns)
    stage = f", stage {gap.stage}" if len(gap.stages) > 1 or gap.stage else ""
    return Text(
        f"AGAINST THE MODEL{stage}   measured {units.milliseconds(measured)}, "
        f"{units.signed_percent(measured / predicted - 1)} of {units.milliseconds(predicted)} "
        f"predicted ({band})   confidence {gap.confidence}",
        style="bold",
    )


def _buckets(gap: Gap) -> Table:
    """The buckets that either side has."""
    table = bare_table("", "predicted", "measured", "difference")
    shown = gap.shown
    for bucket, expected, took in zip(
        BUCKETS, shown.predicted.buckets_ns, shown.measured.buckets_ns, strict=True
    ):
        if expected or took:
            name = Text(bucket, style=BUCKET_STYLE[bucket])
            sides = units.milliseconds(expected), units.milliseconds(took)
            table.add_row(name, *sides, units.signed_milliseconds(took - expected))
    return table


def _explained(gap: Gap) -> list[RenderableType]:
    """The parts of the gap, largest first; the small ones in one line."""
    least = _LEAST * gap.shown.measured.step_ns
    large = sorted((row for row in gap.rows if abs(row.ns) >= least), key=lambda row: -abs(row.ns))
    small = sum(row.ns for row in gap.rows if abs(row.ns) < least)
    parts = [(row.ns, row.message) for row in large]
    if small:
        parts.append((small, "smaller parts together"))
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    for ns, message in parts:
        table.add_row(units.signed_milliseconds(ns), message)
    return [Text("the difference is", style="bold"), table] if parts else []


def _calls(gap: Gap) -> list[Text]:
    odd = [one for one in gap.calls if not one.equal]
    if odd:
        return [Text("calls that differ: " + "; ".join(map(_call, odd)))]
    return [Text("calls: as many and as large as predicted, to the byte")] if gap.calls else []


def _call(one: ComparedCalls) -> str:
    size = "" if one.bytes is None or one.predicted_bytes is None else (
        f" ({units.size(one.bytes)} of {units.size(one.predicted_bytes)})"
    )  # fmt: skip
    where = f"stage {one.stage} {one.op} on {one.axis}"
    return f"{where} {one.count} of {one.predicted_count} predicted{size}"


def _speeds(gap: Gap) -> list[RenderableType]:
    """How fast the shown stage's calls moved data, beside the model and the link's peak."""
    rows = [one for one in gap.calls if one.stage == gap.stage and one.busbw_bytes_per_s]
    if not rows:
        return []
    table = bare_table("axis", "op", "a step", "predicted", "busbw", "predicted", "of the link")
    for one in rows:
        table.add_row(
            one.axis, one.op, units.milliseconds(one.time_ns),
            units.milliseconds(one.predicted_time_ns), _compared_rate(one.busbw_bytes_per_s),
            _compared_rate(one.predicted_busbw_bytes_per_s), _share(one),
        )  # fmt: skip
    return [table]


def _compared_rate(bytes_per_s: float | None) -> str:
    return "" if bytes_per_s is None else units.gigabytes_per_second(bytes_per_s)


def _share(one: ComparedCalls) -> str:
    if one.busbw_bytes_per_s is None or not one.link_bytes_per_s:
        return ""
    return units.percent(one.busbw_bytes_per_s / one.link_bytes_per_s)


def _memory_gap(gap: Gap) -> list[Text]:
    """A line for the peak, and one for each category that some rank measured."""
    categories = dict.fromkeys(one.category for one in gap.memory)
    return [Text(_held(gap, category)) for category in categories]


def _held(gap: Gap, category: str) -> str:
    size = units.gibibytes if category == "peak" else units.size
    parts = [
        f"stage {one.stage} {size(one.measured_bytes)} of {size(one.predicted_bytes)} predicted"
        for one in gap.memory
        if one.category == category
    ]
    return f"{'peak memory' if category == 'peak' else category}: {', '.join(parts)}"


# The terminal's answer to a hang: who holds the job up, where each group stands, last stacks.

MOST_WAITS, MOST_STANDS = 8, 3

MOST_RANKS_AT = 8

MOST_FRAMES = 6

MOST_LETTERS = 28

_COLUMNS = ("group", "description", "call", "size", "waiting", "missing", "completed")

_WHOLE = ("group", "call", "size")

_STYLE = {"missing": "red"}


def hang_screen(hang: Hang) -> RenderableType:
    """The whole screen for one hang, to be printed by a rich console of any width."""
    parts: list[RenderableType] = [_verdict(hang), _hang_heading(hang)]
    parts += [_hang_warning(one.message, one.rank) for one in hang.warnings]
    if hang.stuck:
        parts += [Text(), _open_calls(hang), *_left_out(hang)]
        parts += [Text(), *_whereabouts(hang)]
    return Group(*parts)


def _verdict(hang: Hang) -> Group:
    from stepsplit.analyzer.diagnose.hang import whole

    lines = whole([one.message for one in hang.culprits])
    return Group(*(Text(line, style="bold") for line in lines))


def _hang_heading(hang: Hang) -> Text:
    known = [_count(len(hang.ranks), "dump", "dumps")]
    if hang.no_dump:
        known.append(f"no dump of {_ranks(hang.no_dump)}")
    if hang.stuck:
        first = min(int(call.called_unix_ns) for call in hang.stuck)
        at = datetime.fromtimestamp(first / 1e9, UTC)
        known += [
            _count(len(hang.stuck), "call does not end", "calls do not end"),
            f"the oldest since {at:%Y-%m-%d %H:%M:%S} UTC" if first > 0 else "",
        ]
    return Text("   ".join(part for part in known if part))


def _count(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _hang_warning(message: str, rank: int | None) -> Text:
    of_rank = "" if rank is None else f" (rank {rank})"
    return Text(f"warning: {message}{of_rank}", style="yellow")


def _open_calls(hang: Hang) -> Table:
    shown = _shown(hang.stuck)
    rows = [_row(call) for call in shown]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    # A column in which nobody has anything takes no room.
    kept = [i for i in range(len(_COLUMNS)) if any(row[i] for row in rows)]
    for name in (_COLUMNS[i] for i in kept):
        side: JustifyMethod = "right" if name == "size" else "left"
        table.add_column(name, justify=side, no_wrap=name in _WHOLE, overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[i], style=_STYLE.get(_COLUMNS[i], "")) for i in kept))
    return table


def _left_out(hang: Hang) -> list[Text]:
    more = len(hang.stuck) - len(_shown(hang.stuck))
    text = f"and {more} calls more, which --json FILE tells"
    return [Text(text, style="bright_black")] if more else []


def _shown(stuck: Sequence[Stuck]) -> list[Stuck]:
    """The first calls that wait for somebody, and the first that wait for nobody."""
    waits = [call for call in stuck if call.waits_for]
    stands = [call for call in stuck if not call.waits_for]
    return [*waits[:MOST_WAITS], *stands[:MOST_STANDS]]


def _row(call: Stuck) -> tuple[str, ...]:
    size = units.UNKNOWN if call.message_bytes is None else units.size(call.message_bytes)
    lost = f"{_listed(call.no_dump)} (no dump)" if call.no_dump else ""
    away = _listed([one.rank for one in call.missing])
    return (
        call.group.name,
        _short(call.group.description),
        f"{call.op} {call.seq}",
        size,
        _listed(call.waiting),
        ", ".join(part for part in (away, lost) if part),
        _listed(call.completed),
    )


def _short(description: str) -> str:
    """A description without its middle where it is long: its ends tell groups apart."""
    if len(description) <= MOST_LETTERS:
        return description
    end = (MOST_LETTERS - 3) // 2
    return f"{description[: MOST_LETTERS - 3 - end]}...{description[-end:]}"


def _listed(ranks: Sequence[int]) -> str:
    """Ranks as people list them: runs of three and more joined."""
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
    more = f" +{len(parts) - MOST_RANKS_AT}" if len(parts) > MOST_RANKS_AT else ""
    return ",".join(parts[:MOST_RANKS_AT]) + more


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)}"


def _whereabouts(hang: Hang) -> list[Text]:
    """Where the culprits are; a stack that several share is shown once."""
    ranks = [rank for one in hang.culprits for rank in one.ranks if rank in hang.ranks]
    last = {one.rank: one for one in hang.last_calls}
    lines = [Text("WHERE THEY ARE", style="bold")] if ranks else []
    seen: dict[tuple[str, ...], int] = {}
    for rank in ranks[:MOST_RANKS_AT]:
        lines.append(_place(rank, last.get(rank), hang))
        stack = _stack(last.get(rank))
        if stack and stack in seen:
            lines.append(Text(f"    the same stack as rank {seen[stack]}", style="bright_black"))
            continue
        seen[stack] = rank
        lines += [Text(f"    {frame}", style="bright_black") for frame in stack]
    if len(ranks) > MOST_RANKS_AT:
        lines.append(Text(f"and {len(ranks) - MOST_RANKS_AT} ranks more"))
    return lines


def _place(rank: int, last: LastCall | None, hang: Hang) -> Text:
    if last is not None:
        call = f"{last.op} {last.seq} of {last.group.in_words}"
        return Text(f"rank {rank}  last called {call}: {last.state}")
    missing = ((call.group, one) for call in hang.stuck for one in call.missing)
    told = next((_came(group, one) for group, one in missing if one.rank == rank), "")
    return Text(f"rank {rank}  its dump holds no call{told}")


def _came(group: StuckGroup, missing: Missing) -> str:
    """How far it came on a group that waits for it."""
    if missing.last_enqueued is None:
        return ""
    done = missing.last_completed == missing.last_enqueued
    state = "completed" if done else "not completed"
    return f"; its last on {group.in_words} is {missing.last_enqueued}, {state}"


def _stack(last: LastCall | None) -> tuple[str, ...]:
    """The innermost lines of the stack, torch's own left out where others are there."""
    frames = () if last is None else last.stack
    own = [one for one in frames if "/torch/" not in one.file] or list(frames)
    shown = tuple(f"{one.file}:{one.line} {one.function}" for one in own[:MOST_FRAMES])
    return (*shown, f"and {len(own) - MOST_FRAMES} lines more") if len(own) > MOST_FRAMES else shown
