"""Terminal screens of plan, calibrate and validate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.model.comm_measured import TransferSweep
from stepsplit.analyzer.model.config import HardwareConfig, JobConfig
from stepsplit.analyzer.model.plan_space import (
    AxisPlacement,
    Candidate,
    Choice,
    Plan,
    Reason,
    RunnerUp,
    Searched,
    Trial,
    toml_lines,
)
from stepsplit.analyzer.validation.tables import Check, Row
from stepsplit.dashboard.reporters.tables import bare_table

if TYPE_CHECKING:
    from stepsplit.analyzer.gap.calibrate import Calibration, ExplainedStage


# The screen of plan: the best layouts, why others are slower, and the rule-of-thumb layout.

_DIM = "bright_black"

MOST_REFUSED = 3


def plan_screen(job: JobConfig, plan: Plan) -> RenderableType:
    """Builds the screen of a plan for a rich console of any width."""
    parts: list[RenderableType] = [_plan_heading(job, plan), _searched(plan.searched), Text()]
    parts += [_ranking(job, plan), Text(), _details(plan), Text(), *_tree(job, plan)]
    lines = toml_lines(plan.best.choice, job.model.experts is not None)
    parts += [Text(), Text("add to job.toml", style="bold"), *map(Text, lines)]
    return Group(*parts)


def _plan_heading(job: JobConfig, plan: Plan) -> Text:
    recipe, name = job.training, job.model.name or f"of {job.model.layers} layers"
    text = Text(f"model {name}   {plan.gpus:,} x {job.hardware.name}", style="bold")
    text.append(
        f"\n{recipe.global_batch:,} sequences of {recipe.seq_len:,} tokens per step   "
        f"{recipe.dtype} {recipe.optimizer}, {recipe.framework}",
        style="not bold",
    )
    return text


def _searched(searched: Searched) -> Text:
    refused = searched.considered - searched.too_big - searched.fit
    text = f"{searched.considered:,} layouts considered: {searched.fit:,} fit, "
    text += f"{searched.too_big:,} do not fit, {refused:,} are invalid"
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in searched.refused[:MOST_REFUSED])
    text += f" ({kinds})" if kinds else ""
    return Text(f"{text}; {searched.timed:,} timed, others ruled out by lower bounds", style=_DIM)


def _ranking(job: JobConfig, plan: Plan) -> Table:
    """One line per layout."""
    table = bare_table("", "layout", "step", "slower", "MFU", "peak memory", "confidence")
    table.columns[1].justify = "left"
    for rank, one in enumerate((plan.best, *(each.candidate for each in plan.runners_up)), 1):
        behind = one.step_ns / plan.best.step_ns - 1
        table.add_row(
            str(rank),
            Text(axes_words(one.choice), style="bold" if rank == 1 else ""),
            units.milliseconds(one.step_ns),
            units.signed_percent(behind) if rank > 1 else "",
            "" if one.mfu is None else units.percent(one.mfu),
            f"{units.gibibytes(one.peak_bytes)}",
            one.confidence,
        )
    return table


def _details(plan: Plan) -> Table:
    """The settings of each layout, and why it is slower."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("1", _settings(plan.best))
    for rank, one in enumerate(plan.runners_up, 2):
        text = Text(lost_words(plan.best, one), style="yellow")
        table.add_row(str(rank), Group(_settings(one.candidate), text))
    return table


def _settings(one: Candidate) -> Text:
    return Text(settings_words(one))


def _tree(job: JobConfig, plan: Plan) -> list[RenderableType]:
    """The decisions of the rule-of-thumb layout, and the links of the best layout."""
    table = bare_table("rule of thumb", "memory per GPU", "")
    for trial in _shown_trials(plan.tree):
        needs = units.gibibytes(trial.peak_bytes)
        answer = Text("fits", style="green") if trial.fits else Text("does not fit", style=_DIM)
        table.add_row(_question(trial), needs, answer)
    links = ", ".join(_place(place) for place in plan.places) or "none (one GPU)"
    there = f"memory of a GPU: {units.gibibytes(job.hardware.memory_bytes)}"
    rest = Text(f"each in its most memory-efficient form, full recomputation; {there}", style=_DIM)
    return [table, rest, _by_hand(plan), Text(f"links of the best layout: {links}")]


def _by_hand(plan: Plan) -> Text:
    """The rule-of-thumb layout and the fastest layout."""
    last, best = plan.tree[-1], axes_words(plan.best.choice)
    sizes = [f"{axis} {size}" for axis, size in (("tp", last.tp), ("pp", last.pp)) if size > 1]
    alone = "data parallelism only" if plan.gpus > 1 else "one GPU"
    by_hand = f"{' '.join(sizes)} and data parallelism" if sizes else alone
    return Text(f"rule-of-thumb layout: {by_hand}; fastest layout: {best}")


def _shown_trials(tree: tuple[Trial, ...]) -> list[Trial]:
    """The last trial of each question, and the last pipeline that does not fit."""
    last = {trial.question: trial for trial in tree}
    before = [trial for trial in tree[-2:-1] if trial.pp > 1]
    return [*list(last.values())[:-1], *before, *list(last.values())[-1:]]


def _question(trial: Trial) -> str:
    words = [f"tp {trial.tp}"] * (trial.tp > 1) + [f"pp {trial.pp}"] * (trial.pp > 1)
    words += [f"ZeRO-{trial.zero}"] * (trial.zero > 0)
    return f"{trial.question}{': ' if words else ''}{' '.join(words)}"


def _place(place: AxisPlacement) -> str:
    where = "within a node" if place.nodes == 1 else f"across {place.nodes:,} nodes"
    return f"{place.axis} {place.ranks:,} {where} ({place.link})"


# Layouts as text, and why a runner-up is slower.

LEAST = 0.0005
"""Share of the best step time; smaller changes are omitted."""

MOST_REASONS = 3

_PLAIN = {
    "skew": "stragglers", "copy": "offloading", "idle": "host-bound idle time",
    "bubble": "bubble", "collective": "collectives", "p2p": "p2p messages",
}  # fmt: skip


def axes_words(choice: Choice) -> str:
    """The axes with more than one rank: "tp 8 pp 16 dp 64"."""
    sizes = zip(("tp", "pp", "cp", "dp", "ep"), choice.axes, strict=True)
    return " ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "one GPU"


def settings_words(one: Candidate) -> str:
    """Schedule, microbatches, ZeRO stage and recomputation of a layout."""
    choice = one.choice
    chunks = f", {choice.chunks} stages per rank" if choice.chunks > 1 else ""
    known = (
        f"{choice.schedule}{chunks}" if choice.pp > 1 else "",
        f"{_microbatches(one.microbatches)} of {choice.micro_batch:,}",
        f"ZeRO-{choice.zero}" if choice.zero else "",
        f"in groups of {choice.dp_shard}" if choice.zero == 3 and choice.dp_replicate > 1 else "",
        f"expert tp {choice.expert_tp}" if choice.expert_tp > 1 else "",
        "sequence parallel" if choice.sequence_parallel else "",
        "" if choice.recompute == "none" else f"recompute {choice.recompute}",
        "uneven stages" if choice.layers_per_stage else "",
    )
    return ", ".join(part for part in known if part)


def lost_words(best: Candidate, one: RunnerUp) -> str:
    """What makes a runner-up slower, and what offsets it, as shares of the best step time."""
    step_ns = best.step_ns
    told = [reason for reason in one.reasons if abs(reason.delta_ns) > LEAST * step_ns]
    more = [reason for reason in told if reason.delta_ns > 0][:MOST_REASONS]
    less = [reason for reason in told if reason.delta_ns < 0][-1:]
    if not more:
        return f"equally fast, with {_memory(one.more_bytes)}"
    words = ", ".join(_reason(best, one.candidate, reason) for reason in more)
    return words + "".join(f"; offset by {_reason(best, one.candidate, reason)}" for reason in less)


def _microbatches(count: int) -> str:
    return f"{count:,} microbatch{'es' if count > 1 else ''}"


def _memory(more_bytes: int) -> str:
    if not more_bytes:
        return "the same memory"
    return f"{units.gibibytes(abs(more_bytes))} {'more' if more_bytes > 0 else 'less'} memory"


def _reason(best: Candidate, other: Candidate, reason: Reason) -> str:
    share = units.signed_percent(reason.delta_ns / best.step_ns)
    return f"{_what(best, other, reason)} {share}{_why(other, reason)}"


def _what(best: Candidate, other: Candidate, reason: Reason) -> str:
    if reason.bucket == "compute":
        return _compute(best.choice, other.choice) if reason.delta_ns > 0 else "compute"
    if reason.bucket == "p2p" and reason.axis == "pp":
        return "messages between pipeline stages"
    return f"exposed {reason.axis}" if reason.axis else _PLAIN[reason.bucket]


def _compute(best: Choice, other: Choice) -> str:
    """Why the same model needs more compute time."""
    if other.recompute != best.recompute and other.recompute != "none":
        return f"recomputation ({other.recompute})"
    if other.tp > best.tp:
        return "narrower GEMMs"
    if other.micro_batch < best.micro_batch or other.cp > best.cp:
        return "smaller GEMMs"
    return "compute of the slowest stage"


def _why(other: Candidate, reason: Reason) -> str:
    choice = other.choice
    if reason.bucket == "bubble" and choice.pp > 1:
        chunks = f" x {choice.chunks}" if choice.chunks > 1 else ""
        return f" ({_microbatches(other.microbatches)} for {choice.pp} stages{chunks})"
    sizes = dict(zip(("tp", "pp", "cp", "dp", "ep"), choice.axes, strict=True))
    size = sizes.get(reason.axis, 0)
    return f" ({reason.axis} {size})" if size and reason.axis != "pp" else ""


# The screen of calibrate: the constants, and how well they reproduce the runs.

MOST_TRANSFERS = 8

_UNSEEN = "default"


def calibration_screen(found: Calibration, out: Path | None) -> RenderableType:
    """Builds the screen of a calibration; out is the file that was written, if any."""
    parts: list[RenderableType] = [_calibration_heading(found), Text(), _constants(found), Text()]
    if found.transfers:
        parts += [_transfers(found.transfers), Text()]
    parts += [_stages(found.stages), *_mend(found, out)]
    return Group(*parts)


def _calibration_heading(found: Calibration) -> Text:
    runs = list(dict.fromkeys(one.run for one in found.stages))
    words = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    text = Text(f"{found.hardware.name} calibrated from {words}: {', '.join(runs)}", style="bold")
    off = units.percent(found.hardware.efficiency.error)
    text.append(f"\nexpected error for other layouts: {off}", style="not bold")
    return text


def _constants(found: Calibration) -> Table:
    table = bare_table("constant", "before", "calibrated")
    before, now = _constant_lines(found.known), _constant_lines(found.hardware)
    for (name, old), (_, new) in zip(before, now, strict=True):
        if new:
            table.add_row(name, old or _UNSEEN, new)
    return table


def _constant_lines(hardware: HardwareConfig) -> Iterable[tuple[str, str]]:
    """(name, formatted value) of each constant, in the same order for any hardware."""
    known, intra, inter = hardware.efficiency, hardware.intra, hardware.inter
    peak = hardware.peaks_flops_per_s[0][1]
    bytes_per_s = known.memory * hardware.memory_bytes_per_s
    return (
        ("GEMM", f"{units.flops(known.gemm * peak)}/s"),
        ("attention", f"{units.flops(known.attention * peak)}/s"),
        ("memory", units.gigabytes_per_second(bytes_per_s)),
        ("kernel launch", units.microseconds(known.launch_ns)),
        ("host, forward of a layer", units.milliseconds(known.host_ns) if known.host_ns else ""),
        (f"{intra.name}, busbw", units.gigabytes_per_second(intra.bytes_per_s * intra.ring)),
        (f"{intra.name}, latency of a step", units.microseconds(intra.latency_ns)),
        (f"{inter.name}, busbw", units.gigabytes_per_second(inter.bytes_per_s * inter.ring)),
        (f"{inter.name}, latency of a step", units.microseconds(inter.latency_ns)),
        ("activations, measured / predicted", units.percent(hardware.learned.activations)),
    )


def _transfers(transfers: tuple[TransferSweep, ...]) -> Group:
    table = bare_table("collective", "ranks", "size", "time")
    rows = [
        (one.op, str(one.ranks), units.size(size), units.milliseconds(ns))
        for one in transfers
        for size, ns in zip(one.sizes_bytes, one.times_ns, strict=True)
    ]
    for row in rows[:MOST_TRANSFERS]:
        table.add_row(*row)
    more = len(rows) - MOST_TRANSFERS
    left_out = Text(f"and {more} more (see --json)", style=_DIM)
    return Group(table, left_out) if more > 0 else Group(table)


def _stages(stages: tuple[ExplainedStage, ...]) -> Table:
    """Measured and predicted step of each stage, and the bucket with the largest error."""
    table = bare_table("run", "stage", "measured", "predicted", "error", "largest in")
    for one in stages:
        off = units.signed_percent(one.predicted.step_ns / one.step_ns - 1)
        table.add_row(
            one.run,
            str(one.stage),
            units.milliseconds(one.step_ns),
            units.milliseconds(one.predicted.step_ns),
            off,
            _farthest(one),
        )
    return table


def _farthest(one: ExplainedStage) -> str:
    missed = (one.predicted - one.measured).buckets_ns
    bucket, ns = max(zip(BUCKETS, missed, strict=True), key=lambda pair: abs(pair[1]))
    return f"{bucket} {units.signed_percent(ns / one.step_ns)}"


def _mend(found: Calibration, out: Path | None) -> list[RenderableType]:
    """How to use the constants."""
    if out is None:
        return [Text(), Text("save these constants with --out FILE", style=_DIM)]
    lines = ("add to job.toml", "[hardware]", f'file = "{out}"')
    return [Text(), Text(lines[0], style="bold"), *map(Text, lines[1:])]


# The screen of validate: error and limit of each check, and the rows with the largest errors.

EQUALITIES = "equalities"

_TOPICS = {"step time": ("step time",), "memory": ("memory", "activations")}

_COLLECTIVES = "collectives"

_GROUPS = (EQUALITIES, "memory", "step time", _COLLECTIVES)

_NAMES = {
    "mean/max": ("mean", "max"), "mean/p90": ("mean", "p90"), "mean": ("mean",),
    "median": ("median",),
}  # fmt: skip


def validation_screen(checks: Sequence[Check], every_row: bool = False) -> RenderableType:
    """One line per check, by group, then its worst rows, or all rows including fitted ones."""
    parts: list[RenderableType] = []
    for group in _GROUPS:
        parts += _group([check for check in checks if _group_of(check) == group], group)
    for check in checks:
        rows = check.rows if every_row else far_off(check)
        if rows:
            parts += [
                Text(_validation_heading(check, every_row), style="bold"),
                row_table(rows),
                Text(),
            ]
    return Group(*parts, _total(checks))


def _group_of(check: Check) -> str:
    """The group of a check: equalities, or by the words of its name."""
    if check.measure == "equality":
        return EQUALITIES
    topics = (topic for topic, words in _TOPICS.items() if any(w in check.name for w in words))
    return next(topics, _COLLECTIVES)


def _group(checks: Sequence[Check], name: str) -> list[RenderableType]:
    if not checks:
        return []
    table = _equalities(checks) if name == EQUALITIES else _within_bars(checks, name)
    return [table, *_baselines(checks), *_notes(checks), Text()]


def _equalities(checks: Sequence[Check]) -> Table:
    table = _table(EQUALITIES, "rows", "equal", "verdict")
    for check in checks:
        rows = check.reported
        equal = sum(row.equal for row in rows)
        table.add_row(check.name, str(len(rows)), str(equal), _verdict(check))
    return table


def _within_bars(checks: Sequence[Check], name: str) -> Table:
    table = _table(name, "rows", "result", "limit", "verdict")
    for check in checks:
        bar = _numbers(check.bar) if check.bar else "none"
        table.add_row(_short(check), str(len(check.reported)), _result(check, check.result), bar,
                      _verdict(check))  # fmt: skip
    return table


def _table(first: str, *others: str) -> Table:
    """A table whose first column wraps, so that numbers are never cut."""
    table = bare_table(first, *others)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    return table


def _short(check: Check) -> str:
    """The name of a check without the words that its group heading has."""
    return check.name.replace(", step time", "").replace(", peak memory", "")


def _result(check: Check, values: tuple[float, ...]) -> str:
    """(0.039, 0.063) -> "mean 3.9 %, p90 6.3 %"."""
    names = _NAMES[check.measure]
    return ", ".join(f"{n} {units.percent(v)}" for n, v in zip(names, values, strict=False))


def _numbers(values: tuple[float, ...]) -> str:
    """(0.02, 0.035) -> "2.0 / 3.5 %"."""
    return " / ".join(f"{100 * value:.1f}" for value in values) + " %"


def _verdict(check: Check) -> Text:
    """Met, or by how much the limit is missed."""
    if check.skipped:
        return Text("skipped", style="bright_black")
    if not check.bar:
        return Text("no limit", style="bright_black")
    if check.met:
        return Text("met", style="green")
    return Text(f"missed by {_missed_by(check)}", style="red")


def _missed_by(check: Check) -> str:
    if check.measure == "equality":
        count = sum(not row.equal for row in check.reported)
        return f"{count} row{'s' if count > 1 else ''}"
    over = max(result - bar for result, bar in zip(check.result, check.bar, strict=True))
    return f"{100 * over:.1f} pt"


def _baselines(checks: Sequence[Check]) -> list[RenderableType]:
    """The error of the simplest model on the same rows, and whether it is better."""
    compared = [check for check in checks if check.baseline and not check.skipped]
    if not compared:
        return []
    table = _table("", "", "")
    table.show_header = table.expand = False
    for check in compared:
        better = check.baseline is not None and check.baseline[0] < check.result[0]
        said = (
            Text("better than the model", "yellow")
            if better
            else Text("worse than the model", "bright_black")
        )
        table.add_row(_short(check), _result(check, check.baseline or ()), said)
    return [Text("for comparison, one constant utilization per GPU and dtype, same rows:"), table]


def _notes(checks: Sequence[Check]) -> list[Text]:
    """The notes of the checks, and the first row that each one excluded."""
    lines = [f"{check.name}: {check.note}" for check in checks if check.note]
    for check in checks:
        if check.left_out:
            more = f" (and {len(check.left_out) - 1} more)" if len(check.left_out) > 1 else ""
            lines.append(f"{check.name}: excluded {check.left_out[0]}{more}")
    return [Text(line, style="bright_black") for line in lines]


def _total(checks: Sequence[Check]) -> Text:
    held = [check for check in checks if check.bar and not check.skipped]
    met = sum(check.met for check in held)
    fitted = len({row.case for check in checks for row in check.rows if row.fitted})
    words = f"{met} of {len(held)} checks met; rows excluded because fitted: {fitted}"
    return Text(words, style="bold" if met == len(held) else "bold red")


def _validation_heading(check: Check, every_row: bool) -> str:
    if every_row:
        return f"{check.name}: all rows"
    return f"{check.name}: {'not equal' if check.measure == 'equality' else 'largest errors'}"


# The table of published and predicted values.

_SHOWN, _NOTABLE = 3, 0.01


def far_off(check: Check) -> Sequence[Row]:
    """The worst rows: not equal, or with an error of at least 1 %."""
    rows = check.worst
    if check.measure != "equality":
        rows = tuple(row for row in rows if abs(row.error) >= _NOTABLE)
    return rows[:_SHOWN]


def row_table(rows: Sequence[Row]) -> Table:
    """One line per row; long ids wrap."""
    several = len({row.what for row in rows}) > 1
    marks = ["fitted"] if any(row.fitted for row in rows) else []
    table = bare_table("row", "published", "predicted", "error", *marks)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    for row in rows:
        table.add_row(
            f"{row.case}, {row.what}" if several else row.case,
            _value(row.published, row.unit), _value(row.predicted, row.unit),
            f"{'+' if row.error >= 0 else ''}{units.percent(row.error)}",
            *[Text("yes" if row.fitted else "", style="bright_black") for _ in marks],
        )  # fmt: skip
    return table


def _value(value: float, unit: str) -> str:
    if unit == "ns":
        return units.milliseconds(value) if value >= 1e6 else units.microseconds(value)
    shown = f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.5g}"
    return f"{shown} {unit}"
