"""How far a predicted step time may be off: its error band, and the reasons to doubt it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.config_decode import (
    Mistakes,
    collect_kinds,
    decode_keys,
    read_table,
    select_fields,
)
from stepsplit.analyzer.model.config_limits import NonNegative
from stepsplit.analyzer.model.host_time import compute_launch_time, is_host_bound
from stepsplit.analyzer.model.memory import is_within_memory
from stepsplit.analyzer.model.memory_states import (
    find_known_unfused,
    find_sharding_stage,
    is_clamped,
)
from stepsplit.analyzer.model.prediction import Confidence, StageMemory, UnstatedKey
from stepsplit.analyzer.model.preset_names import PRESETS
from stepsplit.analyzer.model.profile import load_device
from stepsplit.analyzer.model.rank_layout import GroupPlacement, place_group
from stepsplit.analyzer.model.stage_time import StageTime
from stepsplit.analyzer.model.unstated import join_spread

# The error band: what 9 of 10 published runs of the same kind stay within, none of which was known
# to the constants that predicted it.

LEVEL = 0.9
"""Share of unseen runs within the band."""

MIN_RUNS, MIN_SOURCES = 9, 4
"""A kind of run has its own band from so many runs and publishers on; others borrow one."""

RunConfidence = Literal["high", "medium", "low"]

RUN_CONFIDENCES: tuple[RunConfidence, ...] = get_args(RunConfidence)
"""Confidence in runs that no constant was calibrated on; each has bands of its own."""


Population = Literal["", "recipe", "report"]


@dataclass(frozen=True, slots=True)
class RunKind:
    """Runs with a common error band; "" stands for all.

    population: "recipe", what the authors of a program or of a GPU tuned and publish of it, or
    "report", what anyone else measured; the latter states less and is further off. family is that
    of the GPU, model "dense" or "experts".
    """

    population: Population = ""
    family: str = ""
    framework: str = ""
    model: str = ""

    def __str__(self) -> str:
        stated = filter(None, (self.family, self.framework, self.model, self.population))
        return " ".join(stated) or "all"

    def list_wider(self) -> tuple[RunKind, ...]:
        """This kind, then the wider ones that it belongs to, the widest last."""
        of_family = replace(self, framework="")
        return self, of_family, replace(of_family, family=""), RunKind(self.population)


@dataclass(frozen=True, slots=True)
class StepBand:
    """The error (a ratio) that LEVEL of the runs of this kind stay below.

    middle is the step of the median run over the predicted one, error the distance from there,
    beyond what the settings that a job does not state explain.
    """

    error: NonNegative
    runs: int
    sources: int
    kind: RunKind = RunKind()
    middle: float = 1.0

    def find_limits(
        self, predicted_ns: float, low: float = 1.0, high: float = 1.0
    ) -> tuple[float, float]:
        """The shortest and the longest step in ns; the predicted one is in between.

        low and high are what the job leaves open: its shortest and its longest step over the
        predicted one.

        >>> StepBand(0.25, 20, 4, middle=1.2).find_limits(100)
        (96.0, 150.0)
        >>> StepBand(0.25, 20, 4, middle=1.2).find_limits(100, low=0.5)
        (48.0, 150.0)
        """
        middle_ns = predicted_ns * self.middle
        low_ns, high_ns = middle_ns * low / (1 + self.error), middle_ns * high * (1 + self.error)
        return min(low_ns, predicted_ns), max(high_ns, predicted_ns)


BandIndex = Mapping[tuple[RunKind, RunConfidence], StepBand]
"""Bands by kind and the confidence in the runs."""


def find_run_kind(job: JobConfig) -> RunKind:
    return RunKind(
        "recipe" if job.training.recipe else "report",
        job.hardware.family,
        job.training.framework,
        "dense" if job.model.experts is None else "experts",
    )


@lru_cache(maxsize=1)
def load_error_bands() -> BandIndex:
    """The bands of bands.toml. Raises DataError."""
    presets, mistakes = read_table(PRESETS / "bands.toml"), Mistakes()
    decode_keys(presets, {"band": list[dict[str, object]]}, mistakes)
    kinds = {**collect_kinds(StepBand), **collect_kinds(RunKind), "confidence": RunConfidence}
    bands = {}
    for table in presets.list_subtables("band"):
        stated = decode_keys(table, kinds, mistakes)
        kind = RunKind(**select_fields(RunKind, stated))
        confidence = stated["confidence"]
        bands[kind, confidence] = StepBand(**select_fields(StepBand, stated), kind=kind)
    mistakes.raise_all()
    return bands


def find_error_band(
    kind: RunKind, confidence: RunConfidence, bands: BandIndex | None = None
) -> StepBand:
    """The band of the narrowest kind with enough runs at this confidence, or at the next lower one
    at which there are enough; no narrower than that of runs with a higher confidence."""
    known = load_error_bands() if bands is None else bands
    found = {each: _find_narrowest(kind, each, known) for each in RUN_CONFIDENCES}
    place = RUN_CONFIDENCES.index(confidence)
    lower = (band for each in RUN_CONFIDENCES[place:] if (band := found[each]) is not None)
    own = next(lower, StepBand(NO_BAND, 0, 0))
    higher = (band.error for each in RUN_CONFIDENCES[:place] if (band := found[each]) is not None)
    return replace(own, error=max([own.error, *higher]))


def _find_narrowest(kind: RunKind, confidence: RunConfidence, known: BandIndex) -> StepBand | None:
    for wider in kind.list_wider():
        band = known.get((wider, confidence))
        if band is not None and band.runs >= MIN_RUNS and band.sources >= MIN_SOURCES:
            return band
    return None


NO_BAND = 0.5
"""The error without any run to estimate it from."""

# The reasons to doubt a prediction.

Doubt = Literal["medium", "low"]

IDLE_SHARE_LIMIT = 0.3
"""Share of the step that waits for the host above which it depends more on the host than on
kernels: of 17 such runs with experts eight took 1.6 to 2.3 times as long as predicted, the others
differ by up to 21 %."""

UPDATE_SHARE_LIMIT = 0.05
"""Share of the update on the host above which a step depends much on the host: of 9 published runs
seven are 18 % too slow to 3 % too fast, two of ALST took 1.5 and 1.8 times as long."""

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
    found = (
        *(Caveat(text, "low") for text in _list_unmodelled(job, stages, split, memory)),
        *_list_offloading(job, stages, split),
        *(Caveat(text, "medium") for text in _list_distances(job)),
        *(Caveat(text, "medium") for text in _list_full_memory(job, memory)),
    )
    return sort_caveats(found)


def sort_caveats(caveats: Sequence[Caveat]) -> tuple[Caveat, ...]:
    """The caveats, the worst first."""
    return tuple(sorted(caveats, key=lambda caveat: caveat.confidence != "low"))


MOVES = 0.05
"""Change of the step by another plausible value of a key above which the job must state the key for
a high confidence."""


def list_open_caveats(unstated: Sequence[UnstatedKey]) -> tuple[Caveat, ...]:
    """The caveat of a job whose step depends on what it does not state."""
    moving = [one for one in unstated if one.moves > MOVES]
    if not moving:
        return ()
    names = ", ".join(one.key for one in moving)
    return (Caveat(f"the step depends on keys that are not stated: {names}", "medium"),)


def list_unproven_caveats(job: JobConfig) -> tuple[Caveat, ...]:
    """The caveat of a job against which nothing else is said: a band that is borrowed from runs of
    a lower confidence is no evidence of a high one."""
    kind = find_run_kind(job)
    if is_calibrated(job) or _find_narrowest(kind, "high", load_error_bands()) is not None:
        return ()
    return (
        Caveat(f"{FEW_RUNS} ({kind}) leave nothing open: its band is that of others", "medium"),
    )


def _list_full_memory(job: JobConfig, memory: tuple[StageMemory, ...]) -> Iterator[str]:
    share = max(stage.total_bytes for stage in memory) / job.hardware.memory_bytes
    limit = job.profile.memory.nearly_full
    if limit and share > limit:
        yield f"memory is {units.format_percent(share)} full: the allocator may free and retry"


def _list_unmodelled(
    job: JobConfig, stages: tuple[StageTime, ...], split: Split, memory: tuple[StageMemory, ...]
) -> Iterator[str]:
    """What the model is known to be wrong about."""
    # Of a device's idle time, what is no wait for the host's update of offloaded states.
    launches_ns = split.idle_ns - max(stage.host_update_ns for stage in stages)
    is_processor = load_device(job.hardware.family).processor
    if any(_is_stage_host_bound(job, stage) for stage in stages):
        yield "host-bound: launching a layer takes about as long as computing it"
    elif launches_ns > IDLE_SHARE_LIMIT * split.step_ns and not is_processor:
        yield "host-bound: waiting for launches takes much of the step"
    if is_clamped(job) and job.training.is_quantized:
        yield (
            "how clamped SwiGLU is fused in 8 bits is not known: published runs took 1.3 to 1.8"
            " times as long as predicted"
        )
    yield from _list_missed(job)
    if (group := place_group(job, "tp")).nodes > 1:
        yield _describe_crossing("tp", group)
    if (group := place_group(job, "ep")).nodes > 1 and job.hardware.inter.name.startswith("efa"):
        yield (
            "experts on other nodes are reached over EFA, over which published runs took 1.2 to 3"
            " times as long as predicted"
        )
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


def _list_missed(job: JobConfig) -> Iterator[str]:
    """Ways to train that published runs show to take other times, for a reason that has no formula
    here; constants of the user's own runs have what theirs take."""
    training = job.training
    if is_calibrated(job):
        return
    if training.dtype == "fp8" and training.fp8_scaling == "row":
        yield "fp8 with a scale per row: published runs took 1.1 to 1.9 times as long as predicted"
    if job.parallel.context_kind == "ulysses" and job.parallel.cp > 1:
        yield "Ulysses: published runs took 1.1 to 1.2 times as long as predicted"
    if job.model.experts is not None and not training.recipe:
        yield (
            "experts outside of tuned recipes, whose dispatch may wait for the host: published runs"
            " took 0.8 to 2.2 times as long as predicted"
        )
    if "activations" in job.offloaded and not training.recipe:
        yield "offloaded activations outside of recipes: a published run took 2.2 times as long"
    if training.document_tokens and not training.recipe:
        yield (
            "documents packed to rows outside of recipes: published runs took 0.6 to 0.8 times as"
            " long as predicted"
        )
    is_plain = job.profile.model.eager and job.profile.model.transformers == "plain"
    is_own_loop = is_plain and not load_device(job.hardware.family).processor
    if is_own_loop and not (training.compile or training.recipe or job.model.gated):
        yield (
            "a plain GPT outside of recipes, run operation by operation: published runs took 0.9 to"
            " 1.2 times as long as predicted"
        )
    if is_plain and training.compile:
        yield "what torch.compile fuses of a plain model: a published run took 0.75 times as long"


def _list_offloading(
    job: JobConfig, stages: tuple[StageTime, ...], split: Split
) -> Iterator[Caveat]:
    """What is not known of the host, unless the user states the rate of its update."""
    if job.offloaded and job.training.offload_to == "nvme":
        yield Caveat("copies to NVMe are timed as those to host memory", "low")
    if job.offloaded & {"activations", "parameters"}:
        yield Caveat("copies to the host are assumed to overlap the compute of a pass", "medium")
    if "optimizer" not in job.offloaded:
        return
    if job.training.optimizer == "muon":
        yield Caveat("Muon's matrix products on the host are not timed", "low")
    share = max(stage.host_update_ns for stage in stages) / split.step_ns
    text = f"updating optimizer states on the host takes {units.format_percent(share)} of the step"
    if job.hardware.host_update_bytes_per_s:
        yield Caveat(f"{text} at the stated hardware.host_update_bytes_per_s", "medium")
        return
    doubt: Doubt = "low" if share > UPDATE_SHARE_LIMIT else "medium"
    yield Caveat(f"{text}, and hosts differ: state hardware.host_update_bytes_per_s", doubt)


FEW_RUNS = "too few published runs of this kind"
"""The beginning of the caveat that says so."""


def _list_distances(job: JobConfig) -> Iterator[str]:
    """In what the job differs from the runs that the efficiencies were fitted on."""
    efficiency, hardware = job.hardware.efficiency, job.hardware
    if not efficiency.rows:
        return
    if program := job.training.program:
        yield f"{program} is timed as {job.training.framework}, whose runs set the efficiencies"
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
    if job.training.unfused is None and find_known_unfused(job):
        yield "that clamped SwiGLU is not fused is inferred from runs of one program"
    if job.training.document_tokens and not is_calibrated(job):
        yield "documents of unequal length in a sequence: ranks that get long ones are waited for"
    if job.training.lora_rank:
        yield "adapters alone are trained: the efficiencies are of runs that train all weights"
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
    if not is_calibrated(job) and not find_error_band(kind, "high").kind.family:
        yield f"{FEW_RUNS} ({kind}) for a band of its GPUs"


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
    job: JobConfig, split: Split, caveats: tuple[Caveat, ...], unstated: Sequence[UnstatedKey] = ()
) -> tuple[int, int]:
    """Error band of the step time in ns, which contains 9 of 10 unseen runs: the error of the model
    and the spread of what the job does not state."""
    efficiency, decided = job.hardware.efficiency, decide_confidence(job, caveats)
    confidence: RunConfidence = "high" if decided == "calibrated" else decided
    band = find_error_band(find_run_kind(job), confidence)
    if is_calibrated(job):
        own = efficiency.error + (band.error if caveats else 0.0)
        band = replace(band, error=own, middle=1.0)
    elif not efficiency.rows:
        band = replace(band, error=max(band.error, efficiency.error))
    else:
        band = replace(band, error=max(band.error, job.profile.times.least_error))
    low_ns, high_ns = band.find_limits(split.step_ns, *join_spread(unstated))
    return round(low_ns), round(high_ns)
