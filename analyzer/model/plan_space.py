"""The types and the search space of a plan, and why its runners-up are slower."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TypeVar, cast

from stepsplit.analyzer.buckets import BUCKETS, Split
from stepsplit.analyzer.model.config import (
    RECOMPUTE_PARTS,
    JobConfig,
    ParallelConfig,
    Recompute,
    StoredDtype,
    TrainingConfig,
)
from stepsplit.analyzer.model.config_checks import find_violation
from stepsplit.analyzer.model.config_decode import TomlTable, format_toml_lines, parse_table
from stepsplit.analyzer.model.config_limits import KEY
from stepsplit.analyzer.model.framework_defaults import choose_activation_dtype
from stepsplit.analyzer.model.layout_table import build_layout, list_framework_keys
from stepsplit.analyzer.model.memory import compute_memory, is_within_memory
from stepsplit.analyzer.model.rank_layout import place_group
from stepsplit.analyzer.model.schedule_names import MAX_STAGE_PAIRS, Schedule

# The types of a plan.

SCHEMA = "stepsplit.plan/1"


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout: sizes of the parallel axes, and the settings that go with them."""

    tp: int
    pp: int
    cp: int
    dp_replicate: int
    dp_shard: int
    ep: int
    expert_tp: int
    sequence_parallel: bool
    zero: int
    schedule: str
    chunks: int
    layers_per_stage: tuple[int, ...] | None
    micro_batch: int
    recompute: str

    @property
    def axes(self) -> tuple[int, ...]:
        """The split of the GPUs: tp, pp, cp, dp, ep."""
        return self.tp, self.pp, self.cp, self.dp_replicate * self.dp_shard, self.ep

    @property
    def recompute_value(self) -> str | list[str]:
        """The value of recompute in a job.toml: a list of parts of a layer if it names these."""
        parts = self.recompute.split("+")
        return parts if {*parts} <= {*RECOMPUTE_PARTS} else self.recompute


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that fits, with its prediction.

    split is that of the slowest stage and exposed_ns its exposed communication by axis, largest
    first. peak_bytes is the peak of the stage with the most memory. mfu is None if the peak FLOP/s
    at the dtype is unknown. fit_chance: how sure it is that the peak fits, 0..1 (None in a plan
    that an earlier version wrote).
    """

    choice: Choice
    microbatches: int
    split: Split
    exposed_ns: tuple[tuple[str, int], ...]
    peak_bytes: int
    mfu: float | None
    confidence: str
    fit_chance: float | None = None

    @property
    def step_ns(self) -> int:
        return self.split.step_ns


@dataclass(frozen=True, slots=True)
class Reason:
    """Difference of one bucket to the best layout, in ns; below 0 it is shorter.

    axis is that of the communication, "" for other buckets than collective and p2p.
    """

    bucket: str
    axis: str
    delta_ns: int


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The best layout of another split of the GPUs, compared with the best of all.

    behind_ns and more_bytes are the differences in step time and peak memory. reasons are sorted
    from the largest loss to the largest gain.
    """

    candidate: Candidate
    behind_ns: int
    more_bytes: int
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """One step of the usual decision tree: does the model fit on this part of the cluster?

    The layout is the one with the least memory of its kind: micro_batch 1, full recomputation,
    experts spread over ep ranks (default 1, without experts).
    """

    question: str
    tp: int
    pp: int
    zero: int
    ranks: int
    peak_bytes: int
    fits: bool
    ep: int = 1


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """A layout than which no other is faster with as little memory on as few GPUs.

    Attributes:
        gpus: number of GPUs.
        candidate: the layout with its predicted step.
        headroom_bytes: memory of the device beyond the peak.
    """

    gpus: int
    candidate: Candidate
    headroom_bytes: int


@dataclass(frozen=True, slots=True)
class AxisPlacement:
    """Placement of an axis of the best layout: its slowest link and the nodes of a group."""

    axis: str
    ranks: int
    nodes: int
    link: str


@dataclass(frozen=True, slots=True)
class SearchCounts:
    """Counts of the search: considered = refused + too_big + fit, timed of those that fit.

    Layouts that fit and were not timed have a lower bound above the slowest layout of the plan.
    refused counts invalid layouts by the rule that they break.
    """

    considered: int
    too_big: int
    fit: int
    timed: int
    refused: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The best layout of a job on a number of GPUs, and the best of each other split of them.

    Args:
        gpus: number of GPUs.
        best: the fastest layout, with its predicted step in ns and its peak memory in bytes.
        runners_up: the fastest layouts of other splits, with the reasons why they are slower.
        tree: the usual decision tree (one GPU, ZeRO, one node, a pipeline) up to the first fit.
        places: link and number of nodes of each axis of the best layout.
        searched: how many layouts were considered, invalid, too big and timed.
        tokens: tokens of a step of all GPUs, default 0; 0 when an earlier version wrote the plan.
        price_per_gpu_hour: price of a GPU per hour in any currency, default None.
        pareto: the layouts that no other beats in step time, peak memory and number of GPUs at
            once, by GPUs and step time; default (), when they were not asked for.
        read_as: what of the job's files was read as which key; default ().
        margin: the chance with which the best layout fits at least, 0..1; 0 if none leaves a
            margin, and when an earlier version wrote the plan. A runner-up may be faster if it is
            less sure to fit.

    Examples:
        >>> from stepsplit.analyzer import plan, read_job
        >>> found = plan(read_job("job.toml"), gpus=16)
        >>> [runner.candidate.choice.axes for runner in found.runners_up]  # tp, pp, cp, dp, ep
        [(8, 2, 1, 1, 1)]
    """

    gpus: int
    best: Candidate
    runners_up: tuple[RunnerUp, ...]
    tree: tuple[Trial, ...]
    places: tuple[AxisPlacement, ...]
    searched: SearchCounts
    tokens: int = 0
    price_per_gpu_hour: float | None = None
    pareto: tuple[ParetoPoint, ...] = ()
    read_as: tuple[str, ...] = ()
    margin: float = 0.0

    def compute_cost(self, candidate: Candidate, gpus: int) -> float | None:
        """Price of a million tokens of training; None without a price."""
        if self.price_per_gpu_hour is None or not self.tokens:
            return None
        hours = candidate.step_ns / 3.6e12
        return self.price_per_gpu_hour * gpus * hours / self.tokens * 1e6


# The usual decision tree, with this job's numbers.

AXES = ("tp", "cp", "ep", "pp", "dp")


def build_decision_tree(job: JobConfig, gpus: int) -> tuple[Trial, ...]:
    """The decision tree up to the first fit: one GPU, ZeRO, one node with tensor parallelism, then
    a pipeline over more and more nodes."""
    trials: list[Trial] = []
    for trial in _list_trials(job, gpus):
        trials.append(trial)
        if trial.fits:
            break
    return tuple(trials)


def list_placements(job: JobConfig) -> tuple[AxisPlacement, ...]:
    """Each axis of more than one rank, those inside a node first."""
    placements = []
    for axis in AXES:
        span = place_group(job, axis)
        if span.ranks > 1:
            link = job.hardware.intra if span.nodes == 1 else job.hardware.inter
            ranks = job.parallel.pp if axis == "pp" else span.ranks
            nodes = min(span.nodes * ranks // span.ranks, ranks)
            placements.append(AxisPlacement(axis, ranks, nodes if span.nodes > 1 else 1, link.name))
    return tuple(sorted(placements, key=lambda place: place.nodes > 1))


def _list_trials(job: JobConfig, gpus: int) -> Iterator[Trial]:
    yield from _try_layout(job, "one GPU", 1, 1, 1)
    if gpus > 1:
        yield from _try_layout(job, "states spread over data parallelism", 1, 1, gpus)
    node = min(job.hardware.gpus_per_node, gpus)
    widths = [tp for tp in range(2, node + 1) if node % tp == 0 and _is_possible(job, tp, 1)]
    for tp in widths:
        yield from _try_layout(job, "one node by tensor parallelism", tp, 1, 1)
    widest = max(widths, default=1)
    for pp in range(2, min(gpus // widest, job.model.layers) + 1):
        if gpus % (widest * pp) == 0:
            dp = gpus // (widest * pp)
            yield from _try_layout(job, "a pipeline over nodes", widest, pp, dp)


def _try_layout(job: JobConfig, question: str, tp: int, pp: int, dp: int) -> Iterator[Trial]:
    """Try the job with the least memory: full recomputation, pp microbatches of one sequence."""
    lean_jobs = (
        _build_leanest_job(job, tp, pp, dp, ep) for ep in _list_expert_splits(job, tp * dp)
    )
    lean_job = next((one for one in lean_jobs if find_violation(one) is None), None)
    if lean_job is None:
        return
    memory = compute_memory(lean_job)
    peak_bytes = max(stage.total_bytes for stage in memory)
    zero = lean_job.parallel.zero
    yield Trial(
        question,
        tp,
        pp,
        zero,
        lean_job.parallel.world_size,
        peak_bytes,
        is_within_memory(lean_job, memory),
        lean_job.parallel.ep,
    )


def _list_expert_splits(job: JobConfig, ranks: int) -> tuple[int, ...]:
    """The most ranks of a stage over which the experts can be spread, then none."""
    if job.model.experts is None:
        return (1,)
    most = math.gcd(job.model.experts.count, ranks)
    return (most, 1) if most > 1 else (1,)


def _build_leanest_job(job: JobConfig, tp: int, pp: int, dp: int, ep: int = 1) -> JobConfig:
    zero = max(list_zero_stages(job, dp, pp))
    layout = replace(
        job.parallel, tp=tp, pp=pp, cp=1, ulysses=1, ep=ep, expert_tp=1, zero=zero,
        schedule="1f1b", chunks=1,
        dp_replicate=1 if zero == 3 else dp, dp_shard=dp if zero == 3 else 1,
        layers_per_stage=split_layers_evenly(job.model.layers, pp),
        sequence_parallel=tp > 1 and job.training.seq_len % tp == 0,
    )  # fmt: skip
    training = replace(adjust_training(job, layout), micro_batch=1, recompute="full")
    return replace(job, parallel=layout, training=replace(training, global_batch=pp * dp))


def _is_possible(job: JobConfig, tp: int, pp: int) -> bool:
    return find_violation(_build_leanest_job(job, tp, pp, 1)) is None


# The search space: all splits of the GPUs, with all settings.

_T = TypeVar("_T")

MAX_MISSING_LAYERS = 2
"""Layers that an interleaved pipeline may lack at its ends, where embedding and head take their
place (Llama 3, arXiv:2407.21783, section 3.3.2)."""

MAX_CHUNKS = 128
"""Most chunks of an interleaved pipeline that are searched: messages grow with them. Published runs
have up to 12."""

KEYS = (
    "tp", "pp", "cp", "ep", "expert_tp", "zero", "sequence_parallel", "schedule", "chunks",
    "micro_batch", "recompute",
)  # fmt: skip
"""The settings that the search varies, unless the caller keeps them."""


@dataclass(frozen=True, slots=True)
class JobFamily:
    """Jobs that differ in the microbatch alone, smallest first; each is built when it is asked for,
    as most are larger than one that does not fit."""

    job: JobConfig
    layout: ParallelConfig
    training: TrainingConfig
    micro_batches: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __getitem__(self, index: int) -> JobConfig:
        training = replace(self.training, micro_batch=self.micro_batches[index])
        # What the job leaves open stays so: it is in the band of the peak.
        return replace(self.job, parallel=self.layout, training=training, notes=())

    def __iter__(self) -> Iterator[JobConfig]:
        return map(self.__getitem__, range(len(self)))


def list_families(
    job: JobConfig, gpus: int, keep: frozenset[str] = frozenset()
) -> Iterator[JobFamily]:
    """All jobs of the search space.

    Tensor parallelism stays inside a node. keep names the settings to take from the job.
    """
    for layout in _list_layouts(job, gpus, keep):
        training = adjust_training(job, layout)
        sizes = _list_micro_batches(job, layout, keep)
        for recompute in (training.recompute,) if "recompute" in keep else list_recomputes(job):
            yield JobFamily(job, layout, _choose_recompute(training, recompute), sizes)


def _choose_recompute(training: TrainingConfig, recompute: Recompute) -> TrainingConfig:
    """The training with another recomputation; the job's own parts and layers belong to its own."""
    if recompute == training.recompute:
        return training
    return replace(training, recompute=recompute, recompute_parts=frozenset(), recompute_layers=0)


def _list_layouts(job: JobConfig, gpus: int, keep: frozenset[str]) -> Iterator[ParallelConfig]:
    for axes in _list_axis_layouts(job, gpus, keep):
        pipelines = tuple(_list_pipelines(job, axes.pp, keep))
        for data in _list_data_layouts(job, axes, keep):
            for parallel in _select_values(
                job.parallel.sequence_parallel,
                list_sequence_parallel(job, axes.tp),
                "sequence_parallel",
                keep,
            ):
                for schedule, chunks, layers in pipelines:
                    yield replace(
                        data, sequence_parallel=parallel, schedule=schedule, chunks=chunks,
                        layers_per_stage=layers,
                    )  # fmt: skip


def _list_axis_layouts(job: JobConfig, gpus: int, keep: frozenset[str]) -> Iterator[ParallelConfig]:
    """Sizes of tp, pp and cp, the other ranks as replicas; with experts also ep and expert_tp."""
    node = min(job.hardware.gpus_per_node, gpus)
    bare = replace(job.parallel, dp_shard=1, zero=0)
    for tp in _select_values(job.parallel.tp, _list_divisors(node), "tp", keep):
        for pp in _select_values(job.parallel.pp, _list_divisors(gpus), "pp", keep):
            for cp in _select_values(job.parallel.cp, _list_divisors(gpus), "cp", keep):
                if gpus % (tp * pp * cp) or pp > job.model.layers or job.training.seq_len % cp:
                    continue
                dp = gpus // (tp * pp * cp)
                if dp > job.training.global_batch:
                    continue
                ulysses = math.gcd(job.parallel.ulysses, cp)
                axes = replace(bare, tp=tp, pp=pp, cp=cp, ulysses=ulysses, dp_replicate=dp)
                if "tp" not in keep and place_group(replace(job, parallel=axes), "tp").nodes > 1:
                    continue
                yield from _list_expert_layouts(job, axes, node, keep)


def _list_expert_layouts(
    job: JobConfig, axes: ParallelConfig, node: int, keep: frozenset[str]
) -> Iterator[ParallelConfig]:
    experts = job.model.experts
    if experts is None:
        yield replace(axes, ep=1, expert_tp=1)
        return
    ranks = axes.tp * axes.cp * axes.dp
    cuts = sorted({1, axes.tp}) if job.profile.defaults.expert_tp else [1]
    for ep in _select_values(job.parallel.ep, _list_divisors(experts.count), "ep", keep):
        for expert_tp in _select_values(job.parallel.expert_tp, tuple(cuts), "expert_tp", keep):
            if ranks % (ep * expert_tp) == 0 and expert_tp <= node:
                yield replace(axes, ep=ep, expert_tp=expert_tp)


def _list_data_layouts(
    job: JobConfig, axes: ParallelConfig, keep: frozenset[str]
) -> Iterator[ParallelConfig]:
    """ZeRO stages, and for stage 3 the ranks of a shard group: all, or those of a node (HSDP)."""
    dp = axes.dp_replicate
    for zero in _select_values(
        job.parallel.zero, list_zero_stages(job, dp * axes.cp, axes.pp), "zero", keep
    ):
        if zero != 3:
            yield replace(axes, zero=zero)
            continue
        node = job.hardware.gpus_per_node // (axes.tp * axes.cp)
        for shard in {dp, node if node > 1 and dp % node == 0 else dp}:
            if shard * axes.cp > 1:
                yield replace(axes, zero=3, dp_replicate=dp // shard, dp_shard=shard)


def _list_pipelines(
    job: JobConfig, pp: int, keep: frozenset[str]
) -> Iterator[tuple[Schedule, int, tuple[int, ...] | None]]:
    """Schedules with their chunks and, if the layers don't divide evenly, the layers per stage; the
    job's own, too, where they are as many as the stages."""
    own = job.parallel.layers_per_stage
    if pp == 1:
        yield "1f1b", 1, None
        return
    for schedule in _select_values(job.parallel.schedule, list_schedules(job), "schedule", keep):
        for chunks in _select_values(
            job.parallel.chunks, _list_chunk_counts(job, pp, schedule), "chunks", keep
        ):
            stages = ParallelConfig(pp=pp, schedule=schedule, chunks=chunks).model_stages
            even = split_layers_evenly(job.model.layers, stages)
            yield schedule, chunks, even
            if own is not None and own != even and len(own) == stages:
                yield schedule, chunks, own


def _list_chunk_counts(job: JobConfig, pp: int, schedule: Schedule) -> tuple[int, ...]:
    if schedule != "interleaved":
        return (1,)
    layers = job.model.layers
    max_chunks = min((layers + MAX_MISSING_LAYERS) // pp, MAX_CHUNKS, MAX_STAGE_PAIRS // pp**2)
    return tuple(v for v in range(2, max_chunks + 1) if -layers % (pp * v) <= MAX_MISSING_LAYERS)


def split_layers_evenly(layers: int, stages: int) -> tuple[int, ...] | None:
    """Layers per stage if they don't divide evenly: the middle stages take the remainder, because
    embedding and head load the ends, which may have no layer. None if they divide evenly or are too
    few for the stages between the ends, or if the stages are too many to simulate."""
    per_stage, remainder = divmod(layers, stages)
    if remainder == 0 or layers < stages - MAX_MISSING_LAYERS or stages > MAX_STAGE_PAIRS:
        return None
    inner_first = sorted(range(stages), key=lambda i: (-min(i, stages - 1 - i), i))
    longer = set(inner_first[:remainder])
    return tuple(per_stage + (i in longer) for i in range(stages))


def _list_micro_batches(
    job: JobConfig, layout: ParallelConfig, keep: frozenset[str]
) -> tuple[int, ...]:
    """Powers of two that divide a rank's sequences, and the job's own; 1 if there is none."""
    sequences, remainder = divmod(job.training.global_batch, layout.dp)
    if "micro_batch" in keep or remainder:
        return (job.training.micro_batch if "micro_batch" in keep else 1,)
    powers = {1 << n for n in range(sequences.bit_length()) if sequences % (1 << n) == 0}
    own_size = {job.training.micro_batch} if sequences % job.training.micro_batch == 0 else set()
    return tuple(sorted(powers | own_size))


def _select_values(
    job_value: _T, values: tuple[_T, ...], key: str, keep: frozenset[str]
) -> tuple[_T, ...]:
    return (job_value,) if key in keep else values


@lru_cache(maxsize=64)
def _list_divisors(number: int) -> tuple[int, ...]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


# What the framework supports.

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


def list_zero_stages(job: JobConfig, data_ranks: int, pp: int) -> tuple[int, ...]:
    """ZeRO stages to consider; DeepSpeed has no ZeRO-2 and 3 in a pipeline."""
    if data_ranks == 1:
        return (0,)
    search = job.profile.search
    stages = {*search.zero, job.parallel.zero}
    max_stage = search.pipeline_zero if pp > 1 else 3
    return tuple(zero for zero in sorted(stages) if zero <= max_stage)


def list_schedules(job: JobConfig) -> tuple[Schedule, ...]:
    """The schedules of the framework, and that of the job."""
    names = cast(tuple[Schedule, ...], job.profile.search.schedules)
    return tuple(dict.fromkeys((*names, job.parallel.schedule)))


def list_sequence_parallel(job: JobConfig, tp: int) -> tuple[bool, ...]:
    if tp == 1:
        return (False,)
    can = job.profile.search.sequence_parallel or job.parallel.sequence_parallel
    return (True, False) if can else (False,)


def list_recomputes(job: JobConfig) -> tuple[Recompute, ...]:
    """Kinds of recomputation to consider, the job's own included. With fused attention, selective
    recomputation saves memory only in torchtitan, whose policy drops more than attention."""
    fused = job.training.flash_attention and not job.profile.model.selective_ops
    kinds = tuple(each for each in RECOMPUTES if not (fused and each == "selective"))
    job_kind = job.training.recompute
    return kinds if job_kind in RECOMPUTES else (*kinds, job_kind)


def adjust_training(job: JobConfig, layout: ParallelConfig) -> TrainingConfig:
    """The job's training settings on another layout, with the activation dtype that it implies."""
    training = job.training
    job_dtype, layout_dtype = (
        _select_activation_dtype(job, job.parallel),
        _select_activation_dtype(job, layout),
    )
    if job_dtype == layout_dtype or training.activation_dtype != job_dtype:
        return training
    return replace(training, activation_dtype=layout_dtype)


def _select_activation_dtype(job: JobConfig, layout: ParallelConfig) -> StoredDtype:
    return choose_activation_dtype(job.profile, job.training.dtype, layout)


# Why a runner-up is slower than the best layout.

BY_AXIS = ("collective", "p2p")
"""Buckets that are reported by axis."""


def build_runner_up(best: Candidate, candidate: Candidate) -> RunnerUp:
    """Compare a candidate with the best, bucket by bucket."""
    return RunnerUp(
        candidate=candidate,
        behind_ns=candidate.step_ns - best.step_ns,
        more_bytes=candidate.peak_bytes - best.peak_bytes,
        reasons=list_reasons(best, candidate),
    )


def list_reasons(best: Candidate, candidate: Candidate) -> tuple[Reason, ...]:
    """All differences; they add up to that of the steps, up to 1 ns of rounding per message."""
    delta = candidate.split - best.split
    reasons = [
        Reason(bucket, "", ns)
        for bucket, ns in zip(BUCKETS, delta.buckets_ns, strict=True)
        if ns and bucket not in BY_AXIS
    ]
    best_ns, candidate_ns = dict(best.exposed_ns), dict(candidate.exposed_ns)
    for axis in sorted({*best_ns, *candidate_ns}):
        ns = candidate_ns.get(axis, 0) - best_ns.get(axis, 0)
        if ns:
            reasons.append(Reason("p2p" if axis == "pp" else "collective", axis, ns))
    return tuple(sorted(reasons, key=lambda reason: -reason.delta_ns))


# A layout as the lines of a job.toml.

_VARIED = (*KEYS, "dp_replicate", "dp_shard", "layers_per_stage")


def format_job_lines(job: JobConfig, choice: Choice) -> tuple[str, ...]:
    """The layout of a planned job as a whole [parallel], with what the search left as it was, and
    the keys of [training] that it changes."""
    lines = _format_axes(choice)
    if job.model.experts is not None and choice.tp > 1:
        # Written because Megatron splits experts by tp by default.
        lines.append(f"expert_tp = {choice.expert_tp}")
    if choice.pp > 1:
        lines.append(f'schedule = "{choice.schedule}"')
        if choice.chunks > 1:
            lines.append(f"chunks = {choice.chunks}")
        if choice.layers_per_stage is not None:
            lines.append(f"layers_per_stage = {list(choice.layers_per_stage)}")
    parallel = parse_table("the layout", "\n".join(lines).encode())
    kept = _format_kept_keys(job, parallel)
    return "[parallel]", *lines, *kept, "[training]", *_format_training(job, choice, parallel)


def _format_kept_keys(job: JobConfig, parallel: TomlTable) -> list[str]:
    """Lines of the keys that the search does not vary, where they are not the defaults; ulysses as
    far as it divides cp."""
    usual = build_layout(parallel, job.training.framework, job.model.experts is not None)
    own = replace(job.parallel, ulysses=math.gcd(job.parallel.ulysses, usual.cp))
    kept = {
        str(each.metadata.get(KEY, each.name)): getattr(own, each.name)
        for each in fields(ParallelConfig)
        if each.name not in _VARIED and getattr(own, each.name) != getattr(usual, each.name)
    }
    if own.rank_order != usual.rank_order:
        kept["rank_order"] = "-".join(own.rank_order)
    return format_toml_lines(
        {
            key: sorted(value) if isinstance(value, frozenset) else value
            for key, value in kept.items()
        }
    )


def _format_axes(choice: Choice) -> list[str]:
    """Lines of the axes; zero is always written because its default depends on the framework."""
    lines = [f"{key} = {getattr(choice, key)}" for key in ("tp", "pp", "cp", "ep")]
    lines = [line for line in lines if not line.endswith(" = 1")]
    shards = choice.zero == 3
    if shards and choice.dp_replicate > 1:
        lines += [f"dp_replicate = {choice.dp_replicate}", f"dp_shard = {choice.dp_shard}"]
    else:
        lines.append(f"dp = {choice.dp_replicate * choice.dp_shard}")
    lines.append(f"zero = {choice.zero}")
    if choice.sequence_parallel:
        lines.append("sequence_parallel = true")
    return lines


def _format_training(job: JobConfig, choice: Choice, parallel: TomlTable) -> list[str]:
    """Lines of the keys that follow from the layout, the framework if it follows from another."""
    values = {"micro_batch": choice.micro_batch, "recompute": choice.recompute_value}
    lines = format_toml_lines(values)
    if job.training.recompute_layers and choice.recompute != "full":
        lines.append("recompute_layers = 0")
    return [*lines, *format_toml_lines(list_framework_keys(parallel, job.training.framework))]
