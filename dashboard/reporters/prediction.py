"""The terminal's answer to a RUN.toml: how long a step should take, where it goes, what fits."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from stepsplit.analyzer import units
from stepsplit.analyzer.model.config import Job, Layout
from stepsplit.analyzer.model.memory import allocated_band
from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.dashboard.reporters.prediction_tables import (
    communication_table,
    split_table,
    stages_table,
)

_AXES = ("tp", "cp", "pp", "dp_replicate", "dp_shard", "ep")
_CONFIDENCE = {"calibrated": "bold", "high": "bold", "low": "bold yellow"}


def screen(job: Job, prediction: Prediction) -> RenderableType:
    """The whole screen for one prediction, to be printed by a rich console of any width."""
    parts: list[RenderableType] = [_heading(job, prediction), _training(job)]
    parts += [_step(prediction), _memory(job, prediction)]
    parts += [Text(), split_table(prediction), _memo(prediction)]
    parts += [Text(), _pipeline(job, prediction), stages_table(prediction)]
    if prediction.communication:
        parts += [Text(), communication_table(prediction)]
    if prediction.notes:
        parts += [Text(), *(Text(f"note: {note}", style="yellow") for note in prediction.notes)]
    return Group(*parts)


def _heading(job: Job, prediction: Prediction) -> Text:
    hardware, ranks = job.hardware, job.layout.world_size
    nodes = -(-ranks // hardware.gpus_per_node)
    known = (
        f"model {job.model.name or _sizes(job)}",
        f"{units.count(prediction.parameters)} parameters",
        f"{ranks} x {hardware.name} ({nodes} node{'s' if nodes > 1 else ''})",
        _axes(job.layout),
    )
    return Text("   ".join(part for part in known if part), style="bold")


def _sizes(job: Job) -> str:
    return f"of {job.model.layers} layers, hidden size {job.model.hidden:,}"


def _axes(layout: Layout) -> str:
    """The axes of more than one rank, and how the states are spread: "tp 2 pp 2, ZeRO-1"."""
    sizes = [(axis, getattr(layout, axis)) for axis in _AXES]
    axes = " ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "one rank"
    sequence = ", sequence parallel" if layout.sequence_parallel and layout.tp > 1 else ""
    return f"{axes}{sequence}{f', ZeRO-{layout.zero}' if layout.zero else ''}"


def _training(job: Job) -> Text:
    recipe = job.recipe
    known = (
        f"{recipe.global_batch:,} sequence{'s' if recipe.global_batch > 1 else ''} "
        f"of {recipe.seq_len:,} tokens a step",
        f"{job.microbatches:,} microbatch{'es' if job.microbatches > 1 else ''} "
        f"of {recipe.micro_batch:,} a rank",
        f"{recipe.dtype} {recipe.optimizer}, {recipe.framework}",
        "" if recipe.recompute == "none" else f"recompute {recipe.recompute}",
        f"offload {', '.join(sorted(recipe.offload))}" if recipe.offload else "",
    )
    return Text("   ".join(part for part in known if part))


def _step(prediction: Prediction) -> Text:
    text = Text(f"step {units.milliseconds(prediction.split.step_ns)}", style="bold")
    band = units.milliseconds_between(prediction.low_ns, prediction.high_ns)
    rate = units.tokens_per_second(prediction.tokens_per_s_per_gpu)
    text.append(f" ({band})", style="not bold")
    text.append(f"   confidence {prediction.confidence}", style=_CONFIDENCE[prediction.confidence])
    text.append(f"   {rate}/GPU   {_use_of_peak(prediction)}", style="not bold")
    return text


def _use_of_peak(prediction: Prediction) -> str:
    if prediction.mfu is None or prediction.hfu is None:
        return "MFU unknown: no peak at this dtype"
    mfu, hfu = units.percent(prediction.mfu), units.percent(prediction.hfu)
    return f"MFU {mfu}, HFU {hfu} ({prediction.convention})"


def _memory(job: Job, prediction: Prediction) -> Text:
    """Whether the fullest stage fits, and by how much."""
    most = max(prediction.memory, key=lambda stage: stage.total_bytes)
    there = job.hardware.memory_bytes
    band = allocated_band(job, most)
    peak = f"peak memory {units.gibibytes(most.total_bytes)} "
    peak += f"({units.gibibytes_between(band.low_bytes, band.high_bytes)}, stage {most.stage}) of "
    peak += f"{units.gibibytes(there)} ({units.percent(most.total_bytes / there)})"
    if prediction.fits:
        return Text(f"{peak}: fits")
    return Text(f"{peak}: DOES NOT FIT", style="bold red")


def _memo(prediction: Prediction) -> Text:
    split = prediction.split
    memo = f"{units.milliseconds(split.overlapped_ns)} of the compute hides transfers"
    if split.bubble_covered_ns:
        covered = units.milliseconds(split.bubble_covered_ns)
        memo += f", {covered} of communication lies in holes of the schedule"
    memo += f"; model {units.flops(prediction.model_flops)}"
    if prediction.hardware_flops != prediction.model_flops:
        memo += f", with recomputation {units.flops(prediction.hardware_flops)}"
    return Text(memo, style="bright_black")


def _pipeline(job: Job, prediction: Prediction) -> Text:
    if job.layout.pp == 1:
        return Text("no pipeline: one stage")
    chunks = job.layout.stages_per_rank
    of_chunks = f", {chunks} stages a rank" if chunks > 1 else ""
    return Text(
        f"pipeline {job.layout.schedule}{of_chunks}, {job.microbatches:,} microbatches: "
        f"bubble fraction {units.percent(prediction.bubble_fraction)}, "
        f"bubble overhead {units.percent(prediction.bubble_overhead)}"
    )
