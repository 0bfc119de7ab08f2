"""Terminal screen of model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from stepsplit.analyzer import units
from stepsplit.analyzer.bucket_styles import TERMINAL_STYLE
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.model.config import JobConfig, ParallelConfig
from stepsplit.analyzer.model.formulas import CheckedRule, Explanation, Unit, Verdict
from stepsplit.analyzer.model.memory import MARGIN, add_unallocated_bytes, estimate_peak_band
from stepsplit.analyzer.model.parameters import count_trained_parameters
from stepsplit.analyzer.model.prediction import Communication, Prediction, StageMemory
from stepsplit.analyzer.model.unstated import describe_unstated
from stepsplit.dashboard.reporters.console import DIM, Text
from stepsplit.dashboard.reporters.tables import AXIS_SHORT, MOST_STAGES, build_table

# The screen of model: step time, split, memory, pipeline and communication.

_AXES = ("tp", "cp", "pp", "dp_replicate", "dp_shard", "ep")

_CONFIDENCE = {
    "calibrated": "bold", "high": "bold", "medium": "bold", "low": "bold yellow",
}  # fmt: skip


def build_prediction_screen(job: JobConfig, prediction: Prediction) -> RenderableType:
    """Builds the screen of a prediction for a rich console of any width."""
    parts: list[RenderableType] = [_build_heading(job, prediction), _build_training_line(job)]
    text = Text(f"step {units.format_milliseconds(prediction.split.step_ns)}", style="bold")
    band = units.format_milliseconds_range(prediction.low_ns, prediction.high_ns)
    rate = units.format_tokens_per_second(prediction.tokens_per_s_per_gpu)
    text.append(f" ({band})", style="not bold")
    text.append(f"   confidence {prediction.confidence}", style=_CONFIDENCE[prediction.confidence])
    utilization = "MFU unknown: no peak at this dtype"
    if prediction.mfu is not None and prediction.hfu is not None:
        mfu, hfu = units.format_percent(prediction.mfu), units.format_percent(prediction.hfu)
        utilization = f"MFU {mfu}, HFU {hfu} ({prediction.convention})"
    text.append(f"   {rate} per rank   {utilization}", style="not bold")
    parts.append(text)
    if (bound := prediction.bound) is not None:
        share = units.format_percent(bound.ns / prediction.split.step_ns)
        words = f"bound {units.format_milliseconds(bound.ns)} ({bound.resource})"
        parts.append(Text(f"{words} by data sheets alone, {share} of the step"))
    if open_keys := describe_unstated(prediction.unstated):
        parts.append(Text(open_keys, style="yellow"))
    parts.append(_build_memory_line(job, prediction))
    parts += [Text(), build_split_table(prediction)]
    split = prediction.split
    memo = f"overlapped communication: {units.format_milliseconds(split.overlapped_ns)}"
    if split.bubble_covered_ns:
        covered = units.format_milliseconds(split.bubble_covered_ns)
        memo += f", communication inside the pipeline bubble: {covered}"
    memo += f"; model FLOPs: {units.format_flops(prediction.model_flops)}"
    if prediction.hardware_flops != prediction.model_flops:
        memo += f", with recomputation: {units.format_flops(prediction.hardware_flops)}"
    parts.append(Text(memo, style=DIM))
    if prediction.compute_parts:
        # Compute of the slowest stage by kinds of kernels, and the wait for the host, with the
        # rate that is taken for each: a wrong rate is the first thing to look for.
        table = build_table("compute and idle", "time", "at", "of peak")
        for part in prediction.compute_parts:
            table.add_row(
                part.name,
                units.format_milliseconds(part.ns),
                units.format_rate(part.rate, part.unit),
                "" if part.peak is None else units.format_percent(part.rate / part.peak),
            )
        parts += [Text(), table]
    pipeline = "no pipeline: one stage"
    if job.parallel.pp > 1:
        chunks = job.parallel.stages_per_rank
        of_chunks = f", {chunks} stages per rank" if chunks > 1 else ""
        pipeline = (
            f"pipeline {job.parallel.schedule}{of_chunks}, {job.microbatches:,} microbatches: "
            f"bubble fraction {units.format_percent(prediction.bubble_fraction)}, "
            f"bubble overhead {units.format_percent(prediction.bubble_overhead)}"
        )
    parts += [Text(), Text(pipeline), build_stages_table(prediction)]
    if prediction.communication:
        parts += [Text(), build_communication_table(prediction)]
    if prediction.notes:
        parts += [Text(), *(Text(f"note: {note}", style="yellow") for note in prediction.notes)]
    return Group(*parts)


def _build_heading(job: JobConfig, prediction: Prediction) -> Text:
    hardware, ranks = job.hardware, job.parallel.world_size
    nodes = -(-ranks // hardware.gpus_per_node)
    sizes = f"of {job.model.layers} layers, hidden size {job.model.hidden:,}"
    trained = ""
    if job.training.lora_rank:
        trained = f", {units.format_count(count_trained_parameters(job))} of adapters trained"
    known = (
        f"model {job.model.name or sizes}",
        f"{units.format_count(prediction.parameters)} parameters{trained}",
        f"{ranks} x {hardware.name} ({nodes} node{'s' if nodes > 1 else ''})",
        _format_axes(job.parallel),
    )
    return Text("   ".join(part for part in known if part), style="bold")


def _format_axes(layout: ParallelConfig) -> str:
    """The axes with more than one rank, and the ZeRO stage: "tp 2 pp 2, ZeRO-1"."""
    sizes = [(axis, getattr(layout, axis)) for axis in _AXES]
    axes = " ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "one rank"
    sequence = ", sequence parallel" if layout.sequence_parallel and layout.tp > 1 else ""
    return f"{axes}{sequence}{f', ZeRO-{layout.zero}' if layout.zero else ''}"


def _build_training_line(job: JobConfig) -> Text:
    training = job.training
    # Such as "activations of 40 layers, optimizer".
    layers = f" of {training.offload_layers} layers" if training.offload_layers else ""
    offload = ", ".join(sorted(training.offload)).replace("activations", f"activations{layers}")
    known = (
        f"{training.global_batch:,} sequence{'s' if training.global_batch > 1 else ''} "
        f"of {training.seq_len:,} tokens per step",
        f"{job.microbatches:,} microbatch{'es' if job.microbatches > 1 else ''} "
        f"of {training.micro_batch:,} per rank",
        f"{training.dtype} {training.optimizer}, {training.framework}",
        f"LoRA of rank {training.lora_rank}" if training.lora_rank else "",
        "" if training.recompute == "none" else f"recompute {training.recompute}",
        f"offload {offload}" if training.offload else "",
    )
    return Text("   ".join(part for part in known if part))


NO_DOUBT = 0.995
"""Chance to fit from which on a fit is not qualified."""


def _format_sure(chance: float | None) -> str:
    if chance is None or chance >= NO_DOUBT:
        return ""
    return f", {units.format_percent(chance)} sure"


def _build_memory_line(job: JobConfig, prediction: Prediction) -> Text:
    """The peak memory of the stage that needs most, and whether it fits."""
    most = max(prediction.memory, key=lambda stage: stage.total_bytes)
    available = job.hardware.memory_bytes
    band = estimate_peak_band(job, prediction.memory)
    peak = f"peak memory {units.format_memory_size(most.total_bytes)} "
    peak += (
        f"({units.format_memory_range(band.low_bytes, band.high_bytes)}, stage {most.stage}) of "
    )
    peak += (
        f"{units.format_gibibytes(available)} "
        f"({units.format_percent(most.total_bytes / available)})"
    )
    chance = prediction.fit_chance
    if prediction.fits:
        unsure = chance is not None and chance < MARGIN
        sure = _format_sure(chance)
        return Text(f"{peak}: fits{sure}", style="yellow" if unsure else "")
    # A peak below the device's memory that does not fit needs its reason.
    needed = units.format_memory_size(add_unallocated_bytes(most.total_bytes))
    why = f", {needed} with what the allocator reserves and the CUDA context"
    why = why if most.total_bytes <= available else ""
    sure = _format_sure(None if chance is None else 1 - chance)
    return Text(f"{peak}: DOES NOT FIT{sure}{why}", style="bold red")


# The tables of a prediction: buckets, stages, communication.

MOST_KINDS = 10

_CATEGORIES = ("weights", "gradients", "optimizer", "activations", "transient", "other")


def build_split_table(prediction: Prediction) -> Table:
    """The time and share of the seven buckets in the slowest stage."""
    table = build_table("", "predicted", "share", "")
    split = prediction.split
    for bucket, ns in zip(BUCKETS, split.buckets_ns, strict=True):
        share = ns / split.step_ns if split.step_ns else 0.0
        style = TERMINAL_STYLE[bucket]
        bar = Bar(1.0, 0.0, share, color=style)
        table.add_row(
            Text(bucket, style=style),
            units.format_milliseconds(ns),
            units.format_percent(share),
            bar,
        )
    return table


def build_stages_table(prediction: Prediction) -> Group | Table:
    """Parameters, compute, bubble and memory by category of each stage."""
    # The first, last, slowest and fullest stage, then the others in order.
    count = len(prediction.splits)
    fullest = max(range(count), key=lambda i: prediction.memory[i].total_bytes)
    first = dict.fromkeys((0, count - 1, _find_slowest_stage(prediction), fullest, *range(count)))
    shown = sorted(list(first)[:MOST_STAGES])
    table = build_table("stage", *(str(i) for i in shown))
    splits = [prediction.splits[i] for i in shown]
    memory = [prediction.memory[i] for i in shown]
    table.add_row(
        "parameters", *(units.format_count(prediction.parameters_per_stage[i]) for i in shown)
    )
    table.add_row("compute", *(units.format_milliseconds(split.compute_ns) for split in splits))
    table.add_row("bubble", *(units.format_milliseconds(split.bubble_ns) for split in splits))
    for category in _CATEGORIES:
        _add_memory(table, category, memory, attrgetter(f"{category}_bytes"))
    _add_memory(table, "peak memory", memory, attrgetter("total_bytes"))
    more = len(prediction.splits) - len(shown)
    stages = f"{more} more stage{'s' if more > 1 else ''}"
    left_out = Text(f"and {stages} (see --json)", style=DIM)
    return Group(table, left_out) if more else table


def _add_memory(
    table: Table,
    name: str,
    memory: Sequence[StageMemory],
    get_bytes: Callable[[StageMemory], int],
) -> None:
    """Adds a row to the table unless it is zero for all stages; of small jobs in MiB."""
    # One unit in all rows, or they would not add up by eye.
    is_small = max(row.total_bytes for row in memory) < 2**30
    form = units.format_memory_size if is_small else units.format_gibibytes
    if any(get_bytes(row) for row in memory):
        table.add_row(name, *(form(get_bytes(row)) for row in memory))


def _find_slowest_stage(prediction: Prediction) -> int:
    return prediction.splits.index(prediction.split)


def build_communication_table(prediction: Prediction) -> Group:
    """The communication of a rank of the slowest stage in a step, most exposed first."""
    stage = _find_slowest_stage(prediction)
    # Calls with the same axis, op, phase and size are one row.
    kinds: dict[tuple[str, str, str, int], list[Communication]] = {}
    for row in prediction.communication:
        one = row.message
        if one.stage == stage:
            kinds.setdefault((one.axis, one.op, one.phase, one.message_bytes), []).append(row)
    rows = sorted(
        kinds.items(),
        key=lambda kind: (
            -sum(row.exposed_ns for row in kind[1]),
            -sum(row.time.high_ns for row in kind[1]),
        ),
    )
    table = build_table("axis", "op phase", "calls", "size", "sent", "time", "exposed")
    words = table.columns[1]
    # Text wraps where a number must not.
    words.justify, words.no_wrap, words.overflow = "left", False, "fold"
    for (axis, op, phase, message_bytes), own in rows[:MOST_KINDS]:
        table.add_row(
            AXIS_SHORT.get(axis, axis),
            f"{op} {phase}",
            f"{sum(row.message.count for row in own):,}",
            units.format_size(message_bytes),
            units.format_size(sum(row.message.count * row.message.wire_bytes for row in own)),
            units.format_milliseconds_range(
                sum(row.time.low_ns for row in own), sum(row.time.high_ns for row in own)
            ),
            units.format_milliseconds(sum(row.exposed_ns for row in own)),
        )
    more = len(rows) - MOST_KINDS
    rest = f"and {more} more kind{'s' if more > 1 else ''} (see --json)"
    left_out = [Text(rest, style=DIM)]
    of_stage = f" of stage {stage}" if len(prediction.splits) > 1 else ""
    heading = Text(f"communication per step of a rank{of_stage}")
    return Group(heading, table, *(left_out if more > 0 else ()))


# The list of formulas with the numbers of the job, and common rules of thumb.

_INDENT = (0, 0, 0, 2)

_VERDICTS: dict[Verdict, str] = {
    "right": "is correct",
    "wrong": "is wrong",
    "half": "is only partly correct",
    "unit": "is correct in another unit",
}


def build_formula_listing(
    explained: Sequence[Explanation], rules: Sequence[CheckedRule] = ()
) -> RenderableType:
    """Lists the formulas, then the rules of thumb about them, for any width."""
    heading = Text("FORMULAS with the numbers of this job", style="bold")
    parts: list[RenderableType] = [Text(), heading]
    for entry in explained:
        parts += [Text(), *_build_entry(entry)]
    if rules:
        parts += [Text(), Text("COMMON RULES OF THUMB about these formulas", style="bold")]
        for rule in rules:
            claim = Text(f'"{rule.rule}" {_VERDICTS[rule.verdict]}: {rule.reference}')
            parts.append(claim.append(f" ({rule.citation})", style=DIM))
    return Group(*parts)


def _build_entry(explained: Explanation) -> list[RenderableType]:
    heading = Text(
        f"{explained.what} = {_format_value(explained.value, explained.unit)}", style="bold"
    )
    lines: list[RenderableType] = [Text(f"{explained.formula.id}: {explained.formula.text}")]
    lines += [Text(explained.note)] if explained.note else []
    # Name, value and meaning of each symbol, one per line.
    table = Table.grid(padding=(0, 2, 0, 0))
    for symbol in explained.symbols:
        value = _format_value(symbol.value, symbol.unit)
        table.add_row(Text(f"{symbol.name} = {value}"), Text(symbol.meaning))
    lines += [
        table,
        Text(explained.formula.citation, style=DIM),
    ]
    for rule in explained.rules:
        value = _format_value(rule.value, explained.unit)
        text = f'rule of thumb "{rule.rule}" gives {value}: {rule.why}'
        lines.append(Text(text, style="yellow"))
    return [heading, *(Padding(line, _INDENT, expand=False) for line in lines)]


def _format_value(value: float, unit: Unit) -> str:
    return _IN_UNITS[unit](value)


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3g}"


def _format_time(ns: float) -> str:
    return units.format_milliseconds(ns) if ns >= 1e6 else units.format_microseconds(ns)


_IN_UNITS: dict[Unit, Callable[[float], str]] = {
    "": _format_number,
    "bytes": units.format_size,
    "bytes_per_s": units.format_gigabytes_per_second,
    "flops": units.format_flops,
    "flops_per_s": lambda rate: f"{units.format_flops(rate)}/s",
    "memory_bytes": units.format_gibibytes,
    "ns": _format_time,
    "parameters": units.format_count,
    "ratio": units.format_percent,
}
