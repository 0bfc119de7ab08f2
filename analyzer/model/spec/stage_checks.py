"""What the pipeline's schedule asks of layers, stages and microbatches."""

from __future__ import annotations

from stepsplit.analyzer.model.spec.fault import Fault, rest_of, uneven
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.layout import TWO_STAGES
from stepsplit.analyzer.model.spec.stages import chunk_count


def _chunks(job: Job) -> Fault | None:
    """Several chunks are of interleaved schedules; V schedules hold two, whatever is said."""
    layout = job.layout
    if layout.pp == 1:
        problem = f"chunks {layout.chunks} with pp 1"
        return Fault(problem, "leave chunks out") if layout.chunks > 1 else None
    if layout.schedule in TWO_STAGES:
        problem = f"{layout.schedule} holds two stages on a rank, not chunks {layout.chunks}"
        return Fault(problem, "leave chunks out") if layout.chunks > 2 else None
    if layout.schedule != "interleaved":
        problem = f"chunks {layout.chunks} with schedule {layout.schedule}"
        return Fault(problem, 'write schedule = "interleaved"') if layout.chunks > 1 else None
    problem = "interleaved needs several chunks on a rank, not chunks 1"
    return Fault(problem, "write chunks = 2 or more") if layout.chunks == 1 else None


def _layers(job: Job) -> Fault | None:
    """Megatron-LM cuts the layers evenly; other frameworks give the first stages the rest."""
    layout, layers = job.layout, job.model.layers
    over = f"pp {layout.pp}" if chunk_count(job) == layout.pp else _stages(job)
    if layout.layers_per_stage is not None:
        return None
    if layers < chunk_count(job):
        return Fault(f"layers {layers} < {over} = {chunk_count(job)} stages", "mend one of them")
    if job.recipe.framework != "megatron":
        return None
    return rest_of("layers", layers, over, chunk_count(job), "give layers_per_stage")


def _stages(job: Job) -> str:
    return f"(pp {job.layout.pp} x chunks {job.layout.stages_per_rank})"


def _layers_per_stage(job: Job) -> Fault | None:
    """As many entries as stages, as many layers as the model."""
    stated = job.layout.layers_per_stage
    if stated is None:
        return None
    if len(stated) != chunk_count(job):
        over = f"pp {job.layout.pp}" if chunk_count(job) == job.layout.pp else _stages(job)
        problem = f"layers_per_stage has {len(stated)} entries, but {over} = {chunk_count(job)}"
        return Fault(problem, "give one for each stage")
    if sum(stated) == job.model.layers:
        return None
    total = f"{' + '.join(map(str, stated))} = {sum(stated)}"
    return Fault(f"layers_per_stage {total}, but layers {job.model.layers}", "mend one of them")


def _interleaved(job: Job) -> Fault | None:
    layout = job.layout
    if layout.schedule != "interleaved" or layout.pp == 1:
        return None
    mend = "make the microbatches of a rank a multiple of pp"
    return uneven("microbatches", job.microbatches, "pp", layout.pp, mend)


def _dualpipe(job: Job) -> Fault | None:
    """DualPipe runs two halves of the microbatches from the two ends of an even pipeline.

    deepseek-ai/DualPipe, dualpipe.py: an even number of ranks, an even number of microbatches, at
    least two for each rank; dualpipev.py: at least two for each rank.
    """
    p, m, schedule = job.layout.pp, job.microbatches, job.layout.schedule
    if p == 1 or schedule not in ("dualpipe", "dualpipe-v"):
        return None
    if m < 2 * p:
        return Fault(f"microbatches {m} < 2 x pp {p} of {schedule}", "raise global_batch")
    if schedule == "dualpipe-v":
        return None
    mend = "dualpipe needs an even number"
    return rest_of("pp", p, "2 directions", 2, mend) or rest_of(
        "microbatches", m, "2 directions", 2, mend
    )


STAGE_CHECKS = (_chunks, _layers, _layers_per_stage, _interleaved, _dualpipe)
