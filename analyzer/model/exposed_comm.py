"""How much of a stage's communication is exposed, and how much overlaps its compute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from stepsplit.analyzer.model.comm_ops import CommOp, is_torch_ring
from stepsplit.analyzer.model.comm_volume import is_kept_gathered, is_reduced_every_microbatch
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.layer_time import LayerPass
from stepsplit.analyzer.model.prediction import Band, Communication
from stepsplit.analyzer.model.profile import load_device
from stepsplit.analyzer.model.rank_layout import place_group

EXPOSED = Formula(
    "step.exposed",
    "overlapped: max(first or last call + channels/multiprocessors of t_comm for gradients and"
    " weights, t_comm - concurrent compute), for what runs once per step the compute of one"
    " microbatch, interleaved of pp (1 - 1/v); else all of t_comm",
    "Rajbhandari et al., ZeRO, arXiv:1910.02054, section 7; Zhao et al., PyTorch FSDP,"
    " arXiv:2304.11277, section 3.3",
)

TENSOR_EXPOSED_SHARE = 0.25
"""A GEMM that overlaps its own collective is split in four, and one part stays exposed (Wang et
al., ASPLOS 2023; Transformer Engine's default of four splits)."""

DISPATCHER_PROCESSORS = {"all-to-all": 0, "deepep": 20, "hybridep": 16}
"""Multiprocessors that a dispatcher takes from the compute that overlaps it, which loses as much of
the time: 20 of 132 in DeepSeek-V3 (arXiv:2412.19437, section 3.2.2), 16 by default in HybridEP
(deepseek-ai/DeepEP, branch hybrid-ep)."""

COLLECTIVE_PROCESSORS = 16
"""The same of NCCL's collectives in a node, one for each channel that its logs name there ("16 coll
channels", NVIDIA/nccl issue 892; up to 24)."""

NETWORK_PROCESSORS = 2
"""The same over nodes, for each rank of the group in a node: "16 coll channels" with eight GPUs and
network cards, 2 with one (NVIDIA/nccl-tests issue 133). Neither is fitted."""

DATA_AXES = ("dp", "dp_shard", "dp_replicate", "expert_dp")

BACKWARD = ("backward", "recompute")

ONCE_A_STEP = ("grad_sync", "optimizer", "other")

OVERLAP_ORDER = ("cp", "ulysses", "tp", "ep", "pp", "dp")
"""Communication inside a layer overlaps first, prefetched communication last."""

OverlapGroup = tuple[str, str]
"""Axis (dp for all data-parallel axes) and phase (backward for all that runs in it)."""


@dataclass(frozen=True, slots=True)
class TimedMessage:
    """A message and the time of one call (each)."""

    message: CommOp
    call: Band

    @property
    def time(self) -> Band:
        """The time of all calls in a step."""
        return self.call * self.message.count


@dataclass(frozen=True, slots=True)
class OverlapCompute:
    """Compute of one rank that communication can overlap, in ns per step; core is attention.

    last_microbatches: how many of the microbatches overlap communication that runs once per step.
    """

    forward_ns: float
    backward_ns: float
    core_ns: float
    core_backward_ns: float
    microbatches: int
    last_microbatches: float = 1.0


def _find_pass(phase: str) -> str:
    return "backward" if phase in ("backward", "grad_sync") else "forward"


def count_last_microbatches(job: JobConfig) -> float:
    """Microbatches whose compute overlaps what runs once per step: the last one (for weights the
    first); interleaved, all but one chunk of the last group of pp."""
    layout = job.parallel
    if layout.schedule != "interleaved" or layout.chunks == 1:
        return 1.0
    return max(1.0, min(layout.pp, job.microbatches) * (1 - 1 / layout.chunks))


def compute_exposed_time(
    job: JobConfig, timed: Iterable[TimedMessage], compute: OverlapCompute
) -> tuple[Communication, ...]:
    """Compute the exposed time of each message.

    Messages of one axis and phase overlap together; compute that overlaps one axis is not used for
    another.
    """
    messages = tuple(timed)
    groups = _group_by_overlap(job, messages)
    # By pass, and whether it runs once per step.
    used_ns: defaultdict[tuple[str, bool], float] = defaultdict(float)
    shares: dict[OverlapGroup, float] = {}
    for key in sorted(groups, key=lambda each: OVERLAP_ORDER.index(each[0])):
        axis, phase = key
        total_ns = sum(each.time.ns for each in groups[key])
        if not total_ns or not can_overlap(job, axis):
            shares[key] = 1.0
            continue
        pool, is_once = _find_pass(phase), phase in ONCE_A_STEP
        window = compute.last_microbatches / compute.microbatches if is_once else 1.0
        pass_ns = compute.backward_ns if pool == "backward" else compute.forward_ns
        # What overlaps another axis in every microbatch is in this window for its share.
        free_ns = pass_ns * window - used_ns[pool, True] - used_ns[pool, False] * window
        # Context parallelism overlaps only attention's core: in a ring without its last step, after
        # which no message follows, and in torch's forward only the first.
        if axis in ("cp", "ulysses"):
            core_ns = compute.core_backward_ns if phase == "backward" else compute.core_ns
            free_ns = min(
                free_ns, core_ns * (_compute_ring_share(job, phase) if axis == "cp" else 1.0)
            )
        least = _compute_min_exposed_share(job, key, groups[key], total_ns)
        shares[key] = min(1.0, max(least, 1 - max(0.0, free_ns) / total_ns))
        used_ns[pool, is_once] += total_ns * (1 - shares[key])
    return tuple(
        Communication(
            each.message,
            each.time,
            round(each.time.ns * shares[find_overlap_group(job, each.message)]),
        )
        for each in messages
    )


def overlap_idle_ns(
    job: JobConfig,
    timed: tuple[TimedMessage, ...],
    communication: tuple[Communication, ...],
    idle: tuple[LayerPass, ...],
) -> float:
    """Idle time of one microbatch that overlaps communication which runs once per step."""
    movable_ns = {"forward": 0.0, "backward": 0.0}
    for key, group in _group_by_overlap(job, timed).items():
        total_ns = sum(each.time.ns for each in group)
        if key[1] in ONCE_A_STEP and total_ns and can_overlap(job, key[0]):
            left_ns = sum(
                each.exposed_ns
                for each in communication
                if find_overlap_group(job, each.message) == key
            )
            alone_ns = _compute_min_exposed_share(job, key, group, total_ns) * total_ns
            movable_ns[_find_pass(key[1])] += max(0.0, left_ns - alone_ns)
    forward_ns = sum(each.forward_ns for each in idle)
    backward_ns = sum(each.input_ns + each.weight_ns for each in idle)
    return min(movable_ns["forward"], forward_ns) + min(movable_ns["backward"], backward_ns)


def _group_by_overlap(
    job: JobConfig, timed: Iterable[TimedMessage]
) -> dict[OverlapGroup, list[TimedMessage]]:
    groups: defaultdict[OverlapGroup, list[TimedMessage]] = defaultdict(list)
    for each in timed:
        groups[find_overlap_group(job, each.message)].append(each)
    return groups


def find_overlap_group(job: JobConfig, message: CommOp) -> OverlapGroup:
    """Axis and phase of the messages that overlap together with this one."""
    axis = "dp" if message.axis in DATA_AXES else message.axis
    if message.phase == "grad_sync" and job.parallel.pp == 1:
        # Gradients may be reduced in the backward of every microbatch.
        in_backward = message.strategy in ("fsdp", "hsdp") or (
            message.strategy == "zero-2" and is_reduced_every_microbatch(job)
        )
    else:
        in_backward = message.phase in BACKWARD
    return axis, "backward" if in_backward else message.phase


def can_overlap(job: JobConfig, axis: str) -> bool:
    """Whether the axis can overlap compute; on CPU, FSDP has one stream and waits for each call.

    What torch.compile traces waits for each functional collective where it is called
    (_functional_collectives.py, _maybe_wrap_tensor).
    """
    if axis == "dp" and job.is_fsdp and load_device(job.hardware.family).processor:
        return False
    if axis == "cp":
        waits = is_torch_ring(job) and job.training.compile
        return (_is_ring(job) and not waits) or "cp" in job.parallel.overlap
    return ("cp" if axis == "ulysses" else axis) in job.parallel.overlap


def _compute_ring_share(job: JobConfig, phase: str) -> float:
    """The share of attention's core beside which the ring sends."""
    if is_torch_ring(job):
        return 1.0 if phase == "backward" else 1 / job.parallel.cp
    return 1 - 1 / job.parallel.ring if _is_ring(job) else 1.0


def _is_ring(job: JobConfig) -> bool:
    return job.parallel.ring > 1


def _compute_min_exposed_share(
    job: JobConfig, key: OverlapGroup, group: list[TimedMessage], total_ns: float
) -> float:
    """The share of the calls' time that cannot overlap: the first or last of a phase, and what the
    compute beside the others loses by the multiprocessors that they take; in a ring the last hop of
    the gradients of keys and values, one of 2 (c-1) calls in the backward, with torch one of its c
    all_to_alls."""
    axis, phase = key
    if axis == "tp":
        return TENSOR_EXPOSED_SHARE
    if axis == "ep" and job.hardware.multiprocessors:
        return DISPATCHER_PROCESSORS[job.parallel.dispatcher] / job.hardware.multiprocessors
    if axis == "cp" and phase == "backward" and is_torch_ring(job):
        hops_ns = sum(each.time.ns for each in group if each.message.op == "all_to_all")
        return hops_ns / job.parallel.cp / total_ns
    if axis == "cp" and phase == "backward" and _is_ring(job):
        return 1 / (2 * (job.parallel.ring - 1))
    if axis != "dp":
        return 0.0
    largest_ns = max(each.call.ns for each in group if each.message.count)
    # How often per step such calls start without concurrent compute.
    alone = 1 if phase in ONCE_A_STEP or is_kept_gathered(job) else job.microbatches
    processors = job.hardware.multiprocessors
    taken_ns = 0.0
    for each in group:
        span = place_group(job, each.message.axis)
        over_nodes = min(COLLECTIVE_PROCESSORS, NETWORK_PROCESSORS * span.ranks_per_node)
        channels = COLLECTIVE_PROCESSORS if span.nodes == 1 else over_nodes
        taken_ns += each.time.ns * channels / processors if processors else 0.0
    return min(1.0, (alone * largest_ns + taken_ns) / total_ns)
