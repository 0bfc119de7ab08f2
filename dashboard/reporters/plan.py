"""Terminal screens of plan, calibrate and validate."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.model.config import HardwareConfig, JobConfig
from stepsplit.analyzer.model.plan_space import (
    Candidate,
    Choice,
    Plan,
    Reason,
    RunnerUp,
    format_job_lines,
)
from stepsplit.analyzer.validation.tables import Check, ValidationRow
from stepsplit.dashboard.reporters.console import Text
from stepsplit.dashboard.reporters.tables import build_table

if TYPE_CHECKING:
    from stepsplit.analyzer.gap.calibrate import Calibration


# The screen of plan: the best layouts, why others are slower, and the rule-of-thumb layout.

_DIM = "bright_black"

MAX_REJECTED_KINDS = 3


def build_plan_screen(job: JobConfig, plan: Plan) -> RenderableType:
    """Builds the screen of a plan for a rich console of any width."""
    training, name = job.training, job.model.name or f"of {job.model.layers} layers"
    adapters = f", LoRA of rank {training.lora_rank}" if training.lora_rank else ""
    searched = plan.searched
    refused = searched.considered - searched.too_big - searched.fit
    search = f"{searched.considered:,} layouts considered: {searched.fit:,} fit, "
    search += f"{searched.too_big:,} do not fit, {refused:,} are invalid"
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in searched.refused[:MAX_REJECTED_KINDS])
    search += f" ({kinds})" if kinds else ""
    search += f"; {searched.timed:,} timed, others ruled out by lower bounds"
    parts: list[RenderableType] = [
        Group(
            Text(f"model {name}   {plan.gpus:,} x {job.hardware.name}", style="bold"),
            Text(
                f"{training.global_batch:,} sequences of {training.seq_len:,} tokens per step   "
                f"{training.dtype} {training.optimizer}, {training.framework}{adapters}"
            ),
        ),
        Text(search, style=_DIM),
        _describe_margin(plan),
        Text(),
    ]
    # One line per layout.
    cost = ("1M tokens",) if plan.price_per_gpu_hour is not None else ()
    table = build_table(
        "", "layout", "step", "slower", "MFU", "memory", "fits", "confidence", *cost
    )
    table.columns[1].justify = "left"
    for rank, candidate in enumerate((plan.best, *(each.candidate for each in plan.runners_up)), 1):
        behind, chance = candidate.step_ns / plan.best.step_ns - 1, candidate.fit_chance
        table.add_row(
            str(rank),
            Text(format_axes(candidate.choice), style="bold" if rank == 1 else ""),
            units.format_milliseconds(candidate.step_ns),
            units.format_signed_percent(behind) if rank > 1 else "",
            "" if candidate.mfu is None else units.format_percent(candidate.mfu),
            f"{units.format_gibibytes(candidate.peak_bytes)}",
            # Never 100 %: the memory model has an error of its own.
            "" if chance is None else units.format_percent(min(chance, 0.99), 0),
            candidate.confidence,
            *_format_cost(plan, candidate, plan.gpus),
        )
    # The settings of each layout, and why it is slower.
    details = Table.grid(padding=(0, 2, 0, 0))
    details.add_column(no_wrap=True)
    details.add_column(overflow="fold")
    details.add_row("1", _build_settings(plan.best))
    for rank, runner_up in enumerate(plan.runners_up, 2):
        text = Text(explain_runner_up(plan.best, runner_up), style="yellow")
        details.add_row(str(rank), Group(_build_settings(runner_up.candidate), text))
    parts += [table, Text(), details, Text(), *_build_decision_tree(job, plan)]
    if plan.pareto:
        # The layouts that no other beats in step time, memory and number of GPUs at once.
        table = build_table("GPUs", "not beaten", "step", "headroom", "recompute", "MFU", *cost)
        table.columns[1].justify = "left"
        for point in plan.pareto:
            candidate = point.candidate
            table.add_row(
                f"{point.gpus:,}",
                format_axes(candidate.choice),
                units.format_milliseconds(candidate.step_ns),
                units.format_gibibytes(point.headroom_bytes),
                candidate.choice.recompute,
                "" if candidate.mfu is None else units.format_percent(candidate.mfu),
                *_format_cost(plan, candidate, point.gpus),
            )
        parts += [Text(), table]
    lines = format_job_lines(job, plan.best.choice)
    heading = "to job.toml: replace [parallel], and these keys of [training]"
    parts += [Text(), Text(heading, style="bold"), *map(Text, lines)]
    return Group(*parts)


def _describe_margin(plan: Plan) -> Text:
    """Why the first layout may be slower than another, or that none leaves a margin."""
    if not plan.margin:
        words = "no layout leaves a margin for the error of the memory model: the first may run"
        return Text(f"{words} out of memory", style="yellow")
    chance = units.format_percent(plan.margin, 0)
    sure = f"the first is the fastest that leaves a margin: it fits with {chance} or more"
    is_faster = any(one.behind_ns < 0 for one in plan.runners_up)
    return Text(f"{sure}; those that are faster may run out of memory" if is_faster else sure)


def _format_cost(plan: Plan, candidate: Candidate, gpus: int) -> tuple[str, ...]:
    """The cost of a million tokens in a cell of its own; no cell without a price."""
    cost = plan.compute_cost(candidate, gpus)
    return () if cost is None else (f"{cost:,.4g}",)


def _build_settings(candidate: Candidate) -> Text:
    # Schedule, microbatches, ZeRO stage and recomputation of a layout.
    choice = candidate.choice
    chunks = f", {choice.chunks} stages per rank" if choice.chunks > 1 else ""
    known = (
        f"{choice.schedule}{chunks}" if choice.pp > 1 else "",
        f"{_format_microbatches(candidate.microbatches)} of {choice.micro_batch:,}",
        f"ZeRO-{choice.zero}" if choice.zero else "",
        f"in groups of {choice.dp_shard}" if choice.zero == 3 and choice.dp_replicate > 1 else "",
        f"expert tp {choice.expert_tp}" if choice.expert_tp > 1 else "",
        "sequence parallel" if choice.sequence_parallel else "",
        "" if choice.recompute == "none" else f"recompute {choice.recompute}",
        "uneven stages" if choice.layers_per_stage else "",
    )
    return Text(", ".join(part for part in known if part))


def _build_decision_tree(job: JobConfig, plan: Plan) -> list[RenderableType]:
    """The decisions of the rule-of-thumb layout, and the links of the best layout."""
    table = build_table("rule of thumb", "memory per GPU", "")
    # The last trial of each question, and the last pipeline that does not fit.
    last = {trial.question: trial for trial in plan.tree}
    before = [trial for trial in plan.tree[-2:-1] if trial.pp > 1]
    for trial in [*list(last.values())[:-1], *before, *list(last.values())[-1:]]:
        needs = units.format_gibibytes(trial.peak_bytes)
        answer = Text("fits", style="green") if trial.fits else Text("does not fit", style=_DIM)
        words = [f"tp {trial.tp}"] * (trial.tp > 1) + [f"pp {trial.pp}"] * (trial.pp > 1)
        words += [f"ep {trial.ep}"] * (trial.ep > 1)
        words += [f"ZeRO-{trial.zero}"] * (trial.zero > 0)
        table.add_row(f"{trial.question}{': ' if words else ''}{' '.join(words)}", needs, answer)
    final = plan.tree[-1]
    axes = (("tp", final.tp), ("pp", final.pp), ("ep", final.ep))
    sizes = [f"{axis} {size}" for axis, size in axes if size > 1]
    alone = "data parallelism only" if plan.gpus > 1 else "one GPU"
    by_hand = f"{' '.join(sizes)} and data parallelism" if sizes else alone
    places = []
    for place in plan.places:
        where = "within a node" if place.nodes == 1 else f"across {place.nodes:,} nodes"
        places.append(f"{place.axis} {place.ranks:,} {where} ({place.link})")
    links = ", ".join(places) or "none (one GPU)"
    gpu_memory = f"memory of a GPU: {units.format_gibibytes(job.hardware.memory_bytes)}"
    rest = Text(
        f"each in its most memory-efficient form, full recomputation; {gpu_memory}", style=_DIM
    )
    return [
        table,
        rest,
        Text(f"rule-of-thumb layout: {by_hand}; fastest layout: {format_axes(plan.best.choice)}"),
        Text(f"links of the best layout: {links}"),
    ]


# Layouts as text, and why a runner-up is slower.

MIN_SHARE = 0.0005
"""Share of the best step time; smaller changes are omitted."""

MAX_REASONS = 3

_BUCKET_NAMES = {
    "skew": "stragglers", "copy": "offloading", "idle": "waiting for the host",
    "bubble": "bubble", "collective": "collectives", "p2p": "p2p messages",
}  # fmt: skip


def format_axes(choice: Choice) -> str:
    """The axes with more than one rank: "tp 8 pp 16 dp 64"."""
    sizes = zip(("tp", "pp", "cp", "dp", "ep"), choice.axes, strict=True)
    return " ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "one GPU"


def explain_runner_up(best: Candidate, runner_up: RunnerUp) -> str:
    """What makes a runner-up slower, and what offsets it, as shares of the best step time."""
    step_ns = best.step_ns
    significant = [
        reason for reason in runner_up.reasons if abs(reason.delta_ns) > MIN_SHARE * step_ns
    ]
    more = [reason for reason in significant if reason.delta_ns > 0][:MAX_REASONS]
    # The reasons are in order, so that this is the largest of the gains.
    less = [reason for reason in significant if reason.delta_ns < 0][-1:]
    if not more and less:
        return f"faster: {_format_reason(best, runner_up.candidate, less[0])}"
    if not more:
        memory = "the same memory"
        # Of two equally fast layouts memory decides which one is first.
        if more_bytes := runner_up.more_bytes:
            size = units.format_gibibytes(abs(more_bytes))
            memory = f"{size} {'more' if more_bytes > 0 else 'less'} memory"
        return f"equally fast, with {memory}"
    words = ", ".join(_format_reason(best, runner_up.candidate, reason) for reason in more)
    return words + "".join(
        f"; offset by {_format_reason(best, runner_up.candidate, reason)}" for reason in less
    )


def _format_microbatches(count: int) -> str:
    return f"{count:,} microbatch{'es' if count > 1 else ''}"


def _format_reason(best: Candidate, candidate: Candidate, reason: Reason) -> str:
    """Such as "exposed tp +3.1 % (tp 8)"."""
    choice = candidate.choice
    if reason.bucket == "compute":
        # Why the same model needs more compute time; less needs no reason.
        if reason.delta_ns <= 0:
            what = "compute"
        elif choice.recompute != best.choice.recompute and choice.recompute != "none":
            what = f"recomputation ({choice.recompute})"
        elif choice.tp > best.choice.tp:
            what = "narrower GEMMs"
        elif choice.micro_batch < best.choice.micro_batch or choice.cp > best.choice.cp:
            what = "smaller GEMMs"
        else:
            what = "compute of the slowest stage"
    elif reason.bucket == "p2p" and reason.axis == "pp":
        what = "messages between pipeline stages"
    else:
        what = f"exposed {reason.axis}" if reason.axis else _BUCKET_NAMES[reason.bucket]
    sizes = dict(zip(("tp", "pp", "cp", "dp", "ep"), choice.axes, strict=True))
    size = sizes.get(reason.axis, 0)
    detail = f" ({reason.axis} {size})" if size and reason.axis != "pp" else ""
    if reason.bucket == "bubble" and choice.pp > 1:
        chunks = f" x {choice.chunks}" if choice.chunks > 1 else ""
        microbatches = _format_microbatches(candidate.microbatches)
        detail = f" ({microbatches} for {choice.pp} stages{chunks})"
    return f"{what} {units.format_signed_percent(reason.delta_ns / best.step_ns)}{detail}"


# The screen of calibrate: the constants, and how well they reproduce the runs.

MAX_TRANSFERS = 8

_GUESS = "default"

_PUBLISHED = "as published"
"""The attention rate of a device: that of the kernel that runs, in presets/attention.toml."""


def build_calibration_screen(calibration: Calibration, out: Path | None) -> RenderableType:
    """Builds the screen of a calibration; out is the file that was written, if any."""
    runs = list(dict.fromkeys(one.run for one in calibration.stages))
    words = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    name = calibration.hardware.name
    off = units.format_percent(calibration.hardware.efficiency.error)
    constants = build_table("constant", "before", "calibrated")
    dtype = calibration.hardware.efficiency.dtypes[0]
    before = _list_constants(calibration.known, dtype)
    now = _list_constants(calibration.hardware, dtype)
    for (constant, old), (_, new) in zip(before, now, strict=True):
        # The time of the host is empty where none was fitted.
        if new:
            constants.add_row(constant, old or _GUESS, new)
    parts: list[RenderableType] = [
        Group(
            Text(f"{name} calibrated from {words}: {', '.join(runs)}", style="bold"),
            Text(f"expected error for other layouts: {off}"),
        ),
        Text(),
        constants,
        Text(),
    ]
    notes = [Text(f"not calibrated: {one}") for one in calibration.refused]
    notes += (Text(f"caveat: {one}", style="yellow") for one in calibration.caveats)
    if notes:
        parts += [*notes, Text()]
    if calibration.transfers:
        table = build_table("collective", "ranks", "size", "time")
        rows = [
            (one.op, str(one.ranks), units.format_size(size), units.format_milliseconds(ns))
            for one in calibration.transfers
            for size, ns in zip(one.sizes_bytes, one.times_ns, strict=True)
        ]
        for row in rows[:MAX_TRANSFERS]:
            table.add_row(*row)
        more = len(rows) - MAX_TRANSFERS
        left_out = Text(f"and {more} more (see --json)", style=_DIM)
        parts += [Group(table, left_out) if more > 0 else Group(table), Text()]
    # Measured and predicted step of each stage, and the bucket with the largest error.
    table = build_table("run", "stage", "measured", "predicted", "error", "largest in")
    for stage in calibration.stages:
        errors = zip(BUCKETS, (stage.predicted - stage.measured).buckets_ns, strict=True)
        bucket, ns = max(errors, key=lambda pair: abs(pair[1]))
        table.add_row(
            stage.run,
            str(stage.stage),
            units.format_milliseconds(stage.step_ns),
            units.format_milliseconds(stage.predicted.step_ns),
            units.format_signed_percent(stage.predicted.step_ns / stage.step_ns - 1),
            f"{bucket} {units.format_signed_percent(ns / stage.step_ns)}",
        )
    parts += [table, Text()]
    if out is None:
        return Group(*parts, Text("save these constants with --out FILE", style=_DIM))
    hint = (Text("[hardware]"), Text(f'file = "{out}"'))
    return Group(*parts, Text("add to job.toml", style="bold"), *hint)


def _list_constants(hardware: HardwareConfig, dtype: str) -> Iterable[tuple[str, str]]:
    """(name, formatted value) of each constant at a dtype, in the same order for any hardware."""
    known, intra, inter = hardware.efficiency, hardware.intra, hardware.inter
    peak = hardware.peak_flops_per_s(dtype) or 0.0
    bytes_per_s = known.memory * hardware.memory_bytes_per_s
    # The forward rate of attention; in words if it is that of the kernel that runs.
    if hardware.attention is not None:
        attention = f"{units.format_flops(hardware.attention.forward_flops_per_s)}/s"
    else:
        share = known.attention
        attention = f"{units.format_flops(share * peak)}/s" if share else _PUBLISHED
    return (
        ("GEMM", f"{units.format_flops(known.gemm * peak)}/s"),
        ("attention", attention),
        ("memory", units.format_gigabytes_per_second(bytes_per_s)),
        ("kernel launch", units.format_microseconds(known.launch_ns)),
        (
            "host, forward of a layer",
            units.format_milliseconds(known.host_ns) if known.host_ns else "",
        ),
        (f"{intra.name}, busbw", units.format_gigabytes_per_second(intra.bytes_per_s * intra.ring)),
        (f"{intra.name}, latency of a step", units.format_microseconds(intra.latency_ns)),
        (f"{inter.name}, busbw", units.format_gigabytes_per_second(inter.bytes_per_s * inter.ring)),
        (f"{inter.name}, latency of a step", units.format_microseconds(inter.latency_ns)),
        ("activations, measured / predicted", units.format_percent(hardware.learned.activations)),
    )


# The screen of validate: error and limit of each check, and the rows with the largest errors.

EQUALITIES = "equalities"

_TOPICS = {
    "step time": ("step time",), "same steps": ("confidence",), "memory": ("memory", "activations"),
    "measured steps": ("measured step",),
}  # fmt: skip

_COLLECTIVES = "collectives"

_GROUPS = (EQUALITIES, *_TOPICS, _COLLECTIVES)

_NAMES = {
    "mean/max": ("mean", "max"), "mean/p90": ("mean", "p90"), "mean": ("mean",),
    "median": ("median",),
}  # fmt: skip


def build_validation_screen(checks: Sequence[Check], every_row: bool = False) -> RenderableType:
    """One line per check that has rows, by group, then its worst rows, or all rows including fitted
    ones."""
    parts: list[RenderableType] = []
    found = [check for check in checks if check.rows or check.left_out]
    by_group: dict[str, list[Check]] = {group: [] for group in _GROUPS}
    for check in found:
        # A check belongs to the equalities, or to the first topic with a word of its name.
        topics = (topic for topic, words in _TOPICS.items() if any(w in check.name for w in words))
        is_equality = check.measure == "equality"
        by_group[EQUALITIES if is_equality else next(topics, _COLLECTIVES)].append(check)
    for group, own in by_group.items():
        if not own:
            continue
        if group == EQUALITIES:
            table = _build_table(EQUALITIES, "rows", "equal", "verdict")
            for check in own:
                equal = sum(row.equal for row in check.reported)
                verdict = _format_verdict(check)
                table.add_row(check.name, str(len(check.reported)), str(equal), verdict)
        else:
            table = _build_limit_table(own, group)
        parts += [table, *_build_baseline_table(own), *_list_notes(own), Text()]
    for check in found:
        if check.sources:
            # The rows of other checks.
            continue
        rows = check.rows
        if not every_row:
            # The worst rows: not equal, or with an error that is worth a look.
            is_equality = check.measure == "equality"
            notable = [row for row in check.worst if is_equality or abs(row.error) >= _NOTABLE]
            rows = tuple(notable[:_SHOWN])
        if rows:
            what = "not equal" if check.measure == "equality" else "largest errors"
            heading = Text(f"{check.name}: {'all rows' if every_row else what}", style="bold")
            parts += [heading, build_row_table(rows), Text()]
    if absent := len(checks) - len(found):
        parts.append(Text(f"checks without rows in this folder: {absent}", style=_DIM))
    # A check without a limit is shown for comparison and can neither be met nor missed.
    counted = [check for check in checks if check.bar and not check.skipped]
    met = sum(check.met for check in counted)
    fitted = len({row.case for check in checks for row in check.rows if row.fitted})
    words = f"{met} of {len(counted)} checks met; rows excluded because fitted: {fitted}"
    return Group(*parts, Text(words, style="bold" if met == len(counted) else "bold red"))


def _build_limit_table(checks: Sequence[Check], name: str) -> Table:
    has_bands = any(check.banded for check in checks)
    has_sources = any(check.sources for check in checks)
    table = _build_table(
        name, "rows", *["sources"] * has_sources, "result", "limit", *["in band"] * has_bands,
        "verdict",
    )  # fmt: skip
    for check in checks:
        bar = (
            (" / ".join(f"{100 * value:.1f}" for value in check.bar) + " %")
            if check.bar
            else "none"
        )
        inside = units.format_percent(check.inside / len(check.banded)) if check.banded else ""
        table.add_row(
            _trim_name(check),
            str(len(check.reported)),
            *[str(check.sources)] * has_sources,
            _format_result(check, check.result),
            bar,
            *[inside] * has_bands,
            _format_verdict(check),
        )
    return table


def _build_table(first: str, *others: str) -> Table:
    """A table whose first column wraps, so that numbers are never cut."""
    table = build_table(first, *others)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    return table


def _trim_name(check: Check) -> str:
    """The name of a check without the words that its group heading has."""
    return re.sub(", (step time|peak memory|measured step)$", "", check.name)


def _format_result(check: Check, values: tuple[float, ...]) -> str:
    """(0.039, 0.063) -> "mean 3.9 %, p90 6.3 %"."""
    names = _NAMES[check.measure]
    return ", ".join(f"{n} {units.format_percent(v)}" for n, v in zip(names, values, strict=False))


def _format_verdict(check: Check) -> Text:
    """Met, or by how much the limit is missed."""
    if check.skipped:
        return Text("skipped", style="bright_black")
    if not check.bar:
        return Text("no limit", style="bright_black")
    if check.met:
        return Text("met", style="green")
    if check.measure == "equality":
        count = sum(not row.equal for row in check.reported)
        missed = f"{count} row{'s' if count > 1 else ''}"
    else:
        # By the measure that misses most.
        over = max(result - bar for result, bar in zip(check.result, check.bar, strict=True))
        missed = f"{100 * over:.1f} pt"
    return Text(f"missed by {missed}", style="red")


def _build_baseline_table(checks: Sequence[Check]) -> list[RenderableType]:
    """The error of the simplest model on the same rows, and whether it is better."""
    compared = [check for check in checks if check.baseline and not check.skipped]
    if not compared:
        return []
    table = _build_table("", "", "")
    table.show_header = table.expand = False
    for check in compared:
        better = check.baseline is not None and check.baseline[0] < check.result[0]
        label = (
            Text("better than the model", "yellow")
            if better
            else Text("worse than the model", "bright_black")
        )
        table.add_row(_trim_name(check), _format_result(check, check.baseline or ()), label)
    return [
        Text(
            "for comparison, one constant utilization per GPU, dtype, dense or experts, same rows:"
        ),
        table,
    ]


def _list_notes(checks: Sequence[Check]) -> list[Text]:
    """The notes of the checks, and the first row that each one excluded."""
    lines = [f"{check.name}: {check.note}" for check in checks if check.note]
    for check in checks:
        if check.left_out:
            more = f" (and {len(check.left_out) - 1} more)" if len(check.left_out) > 1 else ""
            lines.append(f"{check.name}: excluded {check.left_out[0]}{more}")
    return [Text(line, style="bright_black") for line in lines]


# The table of published and predicted values.

# An error of a row below one percent is that of the digits that were published.
_SHOWN, _NOTABLE = 3, 0.01


def build_row_table(rows: Sequence[ValidationRow]) -> Table:
    """One line per row; long ids wrap."""
    several = len({row.what for row in rows}) > 1
    marks = ["fitted"] if any(row.fitted for row in rows) else []
    table = _build_table("row", "published", "predicted", "error", *marks)
    for row in rows:
        table.add_row(
            f"{row.case}, {row.what}" if several else row.case,
            _format_value(row.published, row.unit), _format_value(row.predicted, row.unit),
            f"{'+' if row.error >= 0 else ''}{units.format_percent(row.error)}",
            *[Text("yes" if row.fitted else "", style="bright_black") for _ in marks],
        )  # fmt: skip
    return table


def _format_value(value: float, unit: str) -> str:
    if unit == "ns":
        return (
            units.format_milliseconds(value) if value >= 1e6 else units.format_microseconds(value)
        )
    shown = f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.5g}"
    return f"{shown} {unit}"
