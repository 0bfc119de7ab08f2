"""How far a predicted step time may be off: its error band, and the reasons to doubt it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.model.config import (
    AUTOCAST_FRAMEWORKS,
    GroupPlacement,
    JobConfig,
    place_group,
)
from stepsplit.analyzer.model.config_decode import (
    Mistakes,
    collect_kinds,
    decode_keys,
    read_table,
    select_fields,
)
from stepsplit.analyzer.model.hardware_config import PRESETS
from stepsplit.analyzer.model.layer_time import compute_launch_time, is_host_bound
from stepsplit.analyzer.model.memory import is_within_memory
from stepsplit.analyzer.model.memory_states import find_sharding_stage
from stepsplit.analyzer.model.prediction import Confidence, StageMemory
from stepsplit.analyzer.model.step_time import StageTime

# The error band: what 9 of 10 published runs of the same kind stay within, none of which was known
# to the constants that predicted it.

LEVEL = 0.9
"""Share of unseen runs within the band."""

MIN_RUNS, MIN_SOURCES = 9, 2
"""A kind of run has its own band from so many runs and publishers on; others borrow one."""

MIN_DOUBTED_RUNS = 6
"""The same of runs with low confidence: their band is the largest error, and what they would borrow
is that of the ZeRO-3 of 2021, 150 %."""


@dataclass(frozen=True, slots=True)
class RunKind:
    """Runs with a common error band; "" stands for all.

    family is that of the GPU, model "dense" or "experts", dtype "16-bit" or "8-bit", states
    "sharded" (ZeRO-3) or "replicated".
    """

    family: str = ""
    model: str = ""
    dtype: str = ""
    states: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.family, self.model, self.dtype, self.states))) or "all"

    def list_wider(self) -> tuple[RunKind, ...]:
        """This kind, then the wider ones that it belongs to, the widest last."""
        of_model = replace(self, dtype="", states="")
        return self, replace(self, states=""), of_model, replace(of_model, family=""), RunKind()


@dataclass(frozen=True, slots=True)
class StepBand:
    """The error (a ratio) that LEVEL of the runs of this kind stay below."""

    error: float
    runs: int
    sources: int
    kind: RunKind = RunKind()


BandIndex = Mapping[tuple[RunKind, bool], StepBand]
"""Bands by kind and whether the runs had a reason for low confidence."""


def find_run_kind(job: JobConfig) -> RunKind:
    return RunKind(
        job.hardware.family,
        "dense" if job.model.experts is None else "experts",
        "8-bit" if job.training.dtype == "fp8" else "16-bit",
        "sharded" if find_sharding_stage(job) == 3 else "replicated",
    )


@lru_cache(maxsize=1)
def load_error_bands() -> BandIndex:
    """The bands of bands.toml. Raises DataError."""
    presets, mistakes = read_table(PRESETS / "bands.toml"), Mistakes()
    decode_keys(presets, {"band": list[dict[str, object]]}, mistakes)
    kinds = {**collect_kinds(StepBand), **collect_kinds(RunKind), "doubted": bool}
    bands = {}
    for table in presets.list_subtables("band"):
        stated = decode_keys(table, kinds, mistakes)
        kind = RunKind(**select_fields(RunKind, stated))
        doubted = stated.get("doubted", False)
        bands[kind, doubted] = StepBand(**select_fields(StepBand, stated), kind=kind)
    mistakes.raise_all()
    return bands


def find_error_band(kind: RunKind, doubted: bool, bands: BandIndex | None = None) -> StepBand:
    """The band of the narrowest kind with enough runs, or of any kind; the wider one of the runs
    with and without doubts if this run is doubted."""
    known = load_error_bands() if bands is None else bands
    usual = _find_narrowest(kind, False, known)
    if not doubted:
        return usual
    return max(usual, _find_narrowest(kind, True, known), key=lambda band: band.error)


def _find_narrowest(kind: RunKind, doubted: bool, known: BandIndex) -> StepBand:
    min_runs = MIN_DOUBTED_RUNS if doubted else MIN_RUNS
    for wider in kind.list_wider():
        band = known.get((wider, doubted))
        if band is not None and band.runs >= min_runs and band.sources >= MIN_SOURCES:
            return band
    return known.get((RunKind(), doubted), StepBand(NO_BAND, 0, 0))


NO_BAND = 0.5
"""The error without any run to estimate it from."""

EAGER_ERROR = 0.15
"""What 13 unseen runs of transformers on an H100 stay below (measured_jobs.csv); no band of
published runs has the frameworks that cast by autocast."""


# The reasons to doubt a prediction.

Doubt = Literal["medium", "low"]

COMM_SHARE_LIMIT = 0.4
"""Share of communication above which a step depends more on link constants than on kernels."""


@dataclass(frozen=True, slots=True)
class Caveat:
    """A reason why the step time may be further off, and the confidence that it leaves."""

    text: str
    confidence: Doubt


def list_caveats(
    job: JobConfig, stages: tuple[StageTime, ...], split: Split, memory: tuple[StageMemory, ...]
) -> tuple[Caveat, ...]:
    """All reasons to doubt the step time of the slowest stage (split), the worst first."""
    return (
        *(Caveat(text, "low") for text in _list_unmodelled(job, stages, split, memory)),
        *(Caveat(text, "medium") for text in _list_distances(job)),
        *(Caveat(text, "medium") for text in _list_full_memory(job, memory)),
    )


FULL_MEMORY = 0.8
"""Share of the memory from which on the allocator may free and retry: with FSDP it reserves 1.2
times the peak. Of llm-foundry's runs 9 are fuller, one of them 23 % slower than predicted and the
others as predicted; of 34 that fill 0.7 to 0.8 one is 22 % slower. No factor would hold."""


def _list_full_memory(job: JobConfig, memory: tuple[StageMemory, ...]) -> Iterator[str]:
    share = max(stage.total_bytes for stage in memory) / job.hardware.memory_bytes
    if job.training.framework == "fsdp2" and share > FULL_MEMORY:
        yield f"memory is {share:.0%} full: the allocator may free and retry"


def _list_unmodelled(
    job: JobConfig, stages: tuple[StageTime, ...], split: Split, memory: tuple[StageMemory, ...]
) -> Iterator[str]:
    """What the model is known to be wrong about."""
    if any(_is_stage_host_bound(job, stage) for stage in stages):
        yield "host-bound: launching a layer takes about as long as computing it"
    if (group := place_group(job, "tp")).nodes > 1:
        yield _describe_crossing("tp", group)
    if job.training.offload & {"parameters", "activations"}:
        yield "transfers of offloaded parameters and activations are not modelled"
    if split.exposed_comm_ns > COMM_SHARE_LIMIT * split.step_ns:
        yield "communication takes most of the step: the estimate depends on link constants"
    if not is_within_memory(job, memory):
        yield "does not fit in memory: whatever ran was another job"
    efficiency = job.hardware.efficiency
    if not efficiency.rows:
        yield f"{job.hardware.name}: efficiencies are not calibrated"
    most = efficiency.most_sharded
    if find_sharding_stage(job) == 3 and 0 < most < job.parallel.shard_size:
        yield f"ZeRO-3 over {job.parallel.shard_size:,} ranks: known up to {most:,}"


def _list_distances(job: JobConfig) -> Iterator[str]:
    """In what the job differs from the runs that the efficiencies were fitted on."""
    efficiency, hardware = job.hardware.efficiency, job.hardware
    if not efficiency.rows:
        return
    for fitted, this in (
        (efficiency.frameworks, job.training.framework),
        (efficiency.devices, hardware.name),
        (efficiency.dtypes, job.training.dtype),
    ):
        if fitted and this not in fitted:
            yield (
                f"{hardware.family} efficiencies are calibrated on {' and '.join(fitted)},"
                f" not {this}"
            )
    for axis in ("cp", "ep"):
        if (group := place_group(job, axis)).nodes > 1:
            yield _describe_crossing(axis, group)
    if 0 < efficiency.most_tokens < job.training.seq_len:
        yield (
            f"sequences of {job.training.seq_len:,} tokens: known up to {efficiency.most_tokens:,}"
        )
    if 0 < efficiency.most_gpus < job.parallel.world_size:
        yield f"{job.parallel.world_size:,} GPUs: known up to {efficiency.most_gpus:,}"
    kind = find_run_kind(job)
    if not is_calibrated(job) and find_error_band(kind, doubted=False).kind != kind:
        yield f"too few published runs of this kind ({kind}) for a band of its own"


def _describe_crossing(axis: str, group: GroupPlacement) -> str:
    return (
        f"{axis} crosses nodes: a group of {group.ranks} over {group.nodes} nodes communicates over"
        " the network in every layer"
    )


def _is_stage_host_bound(job: JobConfig, stage: StageTime) -> bool:
    """Whether launching takes about as long as computing and the launch time is not calibrated."""
    return not job.hardware.efficiency.host_ns and any(
        is_host_bound(one, compute_launch_time(job, chunk.layers, chunk.expert_layers))
        for one, chunk in zip(stage.passes, stage.stage.chunks, strict=True)
    )


def is_calibrated(job: JobConfig) -> bool:
    """Whether the user's own runs set the constants."""
    return any(row.startswith("run:") for row in job.hardware.efficiency.rows)


def decide_confidence(job: JobConfig, caveats: tuple[Caveat, ...]) -> Confidence:
    """The lowest that a caveat leaves; calibrated if the user's own runs set the constants."""
    left = {each.confidence for each in caveats}
    if "low" in left:
        return "low"
    if "medium" in left:
        return "medium"
    return "calibrated" if is_calibrated(job) else "high"


def estimate_step_band(
    job: JobConfig, split: Split, caveats: tuple[Caveat, ...]
) -> tuple[int, int]:
    """Error band of the step time in ns, which contains 9 of 10 unseen runs."""
    efficiency, doubted = job.hardware.efficiency, decide_confidence(job, caveats) == "low"
    error = find_error_band(find_run_kind(job), doubted).error
    if is_calibrated(job):
        error = efficiency.error + (error if caveats else 0.0)
    elif not efficiency.rows:
        error = max(error, efficiency.error)
    elif job.training.framework in AUTOCAST_FRAMEWORKS:
        error = max(error, EAGER_ERROR)
    return round(split.step_ns / (1 + error)), round(split.step_ns * (1 + error))
